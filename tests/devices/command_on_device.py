"""Run the command line on the pretend device: ``command_on_device.py [SUBCOMMAND ...]``.

Without a subcommand: run the whole product on the CPU and on the device in ``FOLDER`` (the
environment variable), and write the numbers of both as JSON.
"""

import contextlib
import csv
import io
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("WANDB_MODE", "disabled")

import pretend_device  # noqa: E402

pretend_device.install()

import torch  # noqa: E402

from pl_fed.command.main import main  # noqa: E402

ROUNDS = 2


def call(*arguments):
    """Run a command line in this process; return its output and error."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(list(arguments))
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(errors.getvalue()) from stop
    return output.getvalue() + errors.getvalue()


def read_rows(path):
    """Return the numbers of a run's metrics.csv, but times and W&B's counters."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [
        {n: float(v) for n, v in row.items() if v and not n.startswith("time/")} for row in rows
    ]


def run_folder(parent):
    """Return the only run's folder below a folder."""
    (path,) = parent.rglob("metrics.csv")
    return path.parent


def whole_product(folder, accelerator):
    """Fit, stop and resume, validate, test, predict and export; return the numbers."""
    settings = (
        *("--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.logger=false"),
        *(f"--trainer.accelerator={accelerator}", "--trainer.precision=64-true"),
        *("--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_epoch=1"),
        *("--federation.sampler.cohort_size=4", "--model.local_epochs=1", "--data.num_clients=20"),
    )

    def start(command, name, *more):
        call(command, *settings, f"--trainer.default_root_dir={folder / name}", *more)

    start("fit", "fit", f"--trainer.max_epochs={ROUNDS}")
    start("fit", "half", f"--trainer.max_epochs={ROUNDS - 1}")
    checkpoints = [run_folder(folder / n) / "checkpoints/last.ckpt" for n in ("fit", "half")]
    more = (f"--trainer.max_epochs={ROUNDS}", f"--ckpt_path={checkpoints[1]}")
    start("fit", "resumed", *more)
    for command in ("validate", "test", "predict"):
        start(command, command, f"--ckpt_path={checkpoints[0]}")
    export = ("--client", "3", "17", "--global", f"--trainer.accelerator={accelerator}")
    call("export", "--ckpt", str(checkpoints[0]), "--out", str(folder / "export"), *export)
    numbers = {
        str(path.relative_to(folder)).split("/")[0]: read_rows(path)
        for path in sorted(folder.rglob("metrics.csv"))
    }
    saved = torch.load(checkpoints[0], map_location="cpu", weights_only=True)["state_dict"]
    numbers["models"] = [{name: value.double().sum().item() for name, value in saved.items()}]
    numbers["files"] = sorted(p.suffix for p in (folder / "export").rglob("*") if p.is_file())
    return numbers


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1:])
    else:
        numbers = {}
        for accelerator in ("cpu", "gpu"):
            folder = Path(os.environ["FOLDER"]) / accelerator
            folder.mkdir()
            try:
                numbers[accelerator] = whole_product(folder, accelerator)
            except Exception:
                numbers[accelerator] = {"error": traceback.format_exc()}
        (Path(os.environ["FOLDER"]) / "numbers.json").write_text(json.dumps(numbers))
