"""``python -m pl_fed``, and the console script ``pl_fed``."""

import sys


def main() -> None:
    """Run the command line; short commands do not wait for PyTorch and Lightning."""
    from pl_fed.command.lazy_imports import import_torchmetrics
    from pl_fed.command.start import announce, run_light_command

    if not run_light_command(sys.argv[1:]):
        with announce("Loading PyTorch and Lightning …"):
            import_torchmetrics()
            from pl_fed.command.main import main as run_command
        run_command()


if __name__ == "__main__":
    main()
