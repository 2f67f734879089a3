"""``python -m pl_fed``."""

from pl_fed.cli import main

if __name__ == "__main__":
    main()
