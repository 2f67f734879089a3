"""``python -m pl_fed``, and the console script ``pl_fed``."""

import gc
import os
import signal
import sys


def import_from_current_folder() -> None:
    """Let the console script import classes from the current folder, as ``python -m`` does."""
    folder = os.getcwd()
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.insert(0, folder)


def main() -> None:
    """Run the command line; short commands do not wait for PyTorch and Lightning.

    The garbage collector leaves out all objects that the imports make, and at the end all others:
    they stay until the process ends. This halves the time of the imports and of the exit.

    Raises:
        SystemExit: With status 130 after Ctrl-C, also one during the imports.
    """
    try:
        _run()
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _run() -> None:
    import_from_current_folder()
    from pl_fed.command.start import announce, run_light_command
    from pl_fed.command.streams import open_standard_streams
    from pl_fed.command.wandb_runs import import_wandb_first
    from pl_fed.lazy_imports import quick_imports

    open_standard_streams()
    if run_light_command(sys.argv[1:]):
        return
    if sys.argv[1] == "study":
        from pl_fed.studies.command import main as run_study

        run_study(sys.argv[2:])
        return
    gc.disable()
    with announce("Loading PyTorch and Lightning …"):
        import_wandb_first(sys.argv[1:])
        with quick_imports():
            from pl_fed.command.main import main as run_command
    gc.freeze()
    gc.enable()
    try:
        run_command()
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
