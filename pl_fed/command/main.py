"""Entry point of the command line: chooses the subcommand and reports errors."""

import dis
import logging
import re
import signal
import sys
import traceback
import warnings
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_fed.command.fit import FederatedCLI
from pl_fed.command.hints import format_error
from pl_fed.command.messages import describe_file_error, escape_invisible, summarize
from pl_fed.command.start import run_light_command
from pl_fed.command.wandb_runs import prepare_wandb
from pl_fed.devices import is_out_of_memory
from pl_fed.run_folder import is_first_process
from pl_fed.text import describe_error

# Lines of Lightning's log about pl_fed's own lines: devices, seed, number of rounds
_KNOWN = re.compile(
    r".*💡|(\[rank: \d+\] )?Seed set to|[GT]PU available:|`Trainer\.fit` stopped: `max_"
)


def main(args: ArgsType = None) -> None:
    """Run the command line; print one sentence, not a traceback, for errors of the user."""
    prepare_output()
    arguments = sys.argv[1:] if args is None else args
    try:
        _run_command(arguments)
    except SIGTERMException:  # Lightning would exit with the status of success
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:  # FederatedCLI reports the stop of a run itself
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
        MemoryError,
        MisconfigurationException,
    ) as error:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        text = describe_file_error(error) or _describe_shortage(error) or summarize(message)
        if not _is_refusal(error, text):
            raise
        notes = getattr(error, "__notes__", [])
        print(format_error(" ".join([text, *notes]), arguments), end="", file=sys.stderr)
        sys.exit(1)


def prepare_output() -> None:
    """Leave out lines of libraries that say no more than pl_fed's own, and shorten warnings."""
    for library in ("lightning.pytorch", "lightning.fabric"):
        for module in ("rank_zero", "seed"):
            logging.getLogger(f"{library}.utilities.{module}").addFilter(_is_news)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended.*")
    # it asks to file an issue with torch, but users of pl_fed did not call torch.vmap
    warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet")
    warnings.formatwarning = _format_warning
    prepare_wandb()


def _format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """Return a warning as one line, without the place in the code that a user cannot change."""
    return f"warning: {escape_invisible(str(message))}\n"


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of Lightning's log says more than pl_fed's own lines do."""
    return _KNOWN.match(record.getMessage()) is None


def _run_command(arguments: ArgsType) -> None:
    """Run the command that the first argument names.

    Only ``partition`` draws, and only ``export`` writes models: other commands do not import them.
    """
    if not isinstance(arguments, list):
        FederatedCLI(arguments)
    elif run_light_command(arguments):
        return
    elif arguments[0] == "partition":
        from pl_fed.command.partition import WITHOUT_MODEL, PartitionCLI

        PartitionCLI([*_full_help(arguments[1:]), *WITHOUT_MODEL])
    elif arguments[0] == "export":
        from pl_fed.command.export import ExportCLI

        ExportCLI(arguments[1:])
    else:
        FederatedCLI(_full_help(arguments))


def _full_help(arguments: list[str]) -> list[str]:
    """Return a command line in which ``--help all`` is the parser's own ``--help``."""
    if "--help" not in arguments:
        return arguments
    place = arguments.index("--help")
    is_all = arguments[place + 1 : place + 2] == ["all"]
    return [*arguments[: place + 1], *arguments[place + 2 :]] if is_all else arguments


def _describe_shortage(error: Exception) -> str:
    """Describe an error of a lack of memory; else return an empty text."""
    if not is_out_of_memory(error):
        return ""
    return (
        f"Expected enough memory for the run but got: {describe_error(error)}: set a smaller"
        " `data.batch_size`, `federation.engine.chunk_size` or net."
    )


def _is_refusal(error: Exception, text: str) -> bool:
    """Return whether an error is a sentence for the user, and not a failure of pl_fed or torch.

    A refusal is the work of a ``raise`` statement: of Lightning, which mostly refuses an argument
    of the trainer, or of other code whose sentence says what it expected. torch's own errors may
    begin with the same word ("Expected all tensors to be on the same device"), but come from torch
    or from a line of Python that called an operator.

    Args:
        error: The error.
        text: Its text for the user.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    room = str(frame.f_globals.get("__name__")).partition(".")[0]
    if is_out_of_memory(error):
        return True
    if room == "torch" or not _ends_with_raise(error):
        return bool(describe_file_error(error))
    return room == "lightning" or text.startswith("Expected")


def _ends_with_raise(error: Exception) -> bool:
    """Return whether a ``raise`` statement, rather than compiled code, raised an error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
