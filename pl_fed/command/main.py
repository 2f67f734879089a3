"""The entry point of the command line: it chooses the subcommand, and reports errors."""

import logging
import os
import signal
import sys
import traceback
import warnings

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_fed.command.export import ExportCLI
from pl_fed.command.fit import FederatedCLI
from pl_fed.command.messages import of_a_class, of_a_file, printable, sentence
from pl_fed.command.partition import WITHOUT_MODEL, PartitionCLI
from pl_fed.command.report import report
from pl_fed.command.run_files import SWEEP_ID
from pl_fed.run_folder import is_first_process


def main(args: ArgsType = None) -> None:
    """Run the command line; one clear sentence, not a trace, for what the user can mend."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "💡" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended.*")
    if SWEEP_ID not in os.environ:  # whose agent waits for what its runs log
        os.environ.setdefault("WANDB_MODE", "offline")
    given = sys.argv[1:] if args is None else args
    try:
        if isinstance(given, list) and given[:1] == ["partition"]:
            PartitionCLI([*given[1:], *WITHOUT_MODEL])
        elif isinstance(given, list) and given[:1] == ["report"]:
            report(given[1:])
        elif isinstance(given, list) and given[:1] == ["export"]:
            ExportCLI(given[1:])
        else:
            FederatedCLI(args)
    except SIGTERMException:  # whose exit status would be that of a success
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:  # of a run, FederatedCLI has reported it
        if is_first_process():
            print("Stopped by Ctrl-C.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (
        ValueError,
        TypeError,
        OSError,
        RuntimeError,
        ImportError,
        KeyError,
        MisconfigurationException,
    ) as error:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        text = of_a_class(error) or of_a_file(error) or sentence(said)
        if not text.startswith("Expected") and not _is_lightnings_refusal(error):
            raise
        notes = getattr(error, "__notes__", [])
        print(f"error: {printable(' '.join([text, *notes]))}", file=sys.stderr)
        sys.exit(1)


def _is_lightnings_refusal(error: Exception) -> bool:
    """Whether Lightning itself raised an error: as a rule, it refuses a trainer argument."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__")).startswith("lightning.")
