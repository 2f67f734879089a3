"""The name of the program on the command line, as the user called it."""

import sys
from pathlib import Path


def program_name() -> str:
    """Return ``pl_fed`` if the console script runs, else ``python -m pl_fed``."""
    return "pl_fed" if Path(sys.argv[0]).stem == "pl_fed" else "python -m pl_fed"
