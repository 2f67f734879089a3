"""``python -m pl_fed``."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["report"]:  # which waits neither for PyTorch nor for Lightning
        from pl_fed.reports.command import main
    else:
        from pl_fed.cli import main
    main()
