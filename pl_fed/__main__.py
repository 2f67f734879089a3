"""``python -m pl_fed``."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["report"]:  # starts without PyTorch and Lightning
        from pl_fed.command.report import main
    else:
        from pl_fed.command.main import main
    main()
