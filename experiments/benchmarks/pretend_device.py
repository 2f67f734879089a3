"""Print how far numbers of the pretend device are from the CPU's, by algorithm and engine.

The pretend device (tests/devices) needs no GPU. It shows that nothing mixes devices, and that the
device's path computes the CPU's numbers. It shows neither a GPU's own rounding nor its speed.
Compiled engines run their traced graphs uncompiled on it.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ROOT / "tests" / "devices"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
NETS = {
    "quickstart": [],
    "quickstart with FlameCNN": [
        "--model.init_args.net=pl_fed.models.FlameCNN",
        *[
            f"--model.init_args.net.init_args.{name}={value}"
            for name, value in {"in_channels": 1, "num_classes": 10, "image_size": 8}.items()
        ],
    ],
}
SHOWN = [
    f"val/{model}/{metric}" for model in ("global", "personal") for metric in ("accuracy", "loss")
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="also write pretend_device.csv")
    arguments = parser.parse_args()
    rows = [("case", "engine", "largest difference")]
    with tempfile.TemporaryDirectory() as folder:
        rows += list(read_differences(Path(folder) / "rows.json"))
        for name, net in NETS.items():
            rows += list(compare_runs(name, net, Path(folder) / name))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if arguments.save:
        with Path(__file__).with_suffix(".csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def read_differences(path):
    """Yield algorithm, engine, and the largest difference of any number after two rounds."""
    script = [sys.executable, DEVICES / "run_on_device.py", "algorithms", path]
    subprocess.run(script, check=True, cwd=ROOT)
    for name, row in json.loads(path.read_text()).items():
        algorithm, engine = name.split(" | ")
        yield algorithm, engine, f"{row['difference']:.1e}"


def compare_runs(name, net, folder):
    """Yield results of the quickstart in float32 after three rounds: the CPU's, the device's."""
    results = {}
    for accelerator in ("cpu", "gpu"):
        parent = folder / accelerator
        options = ["--trainer.logger=false", "--trainer.max_epochs=3", *net]
        place = [f"--trainer.accelerator={accelerator}", f"--trainer.default_root_dir={parent}"]
        script = [sys.executable, DEVICES / "command_on_device.py", "fit", f"--config={QUICKSTART}"]
        every = "--trainer.check_val_every_n_epoch=3"
        run = [*script, *options, *place, every]
        subprocess.run(run, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (path,) = parent.rglob("metrics.csv")
        with path.open() as file:
            results[accelerator] = [row for row in csv.DictReader(file) if row.get(SHOWN[0])][-1]
    for metric in SHOWN:
        cpu, device = (float(results[place][metric]) for place in ("cpu", "gpu"))
        yield f"{name}, {metric}", f"CPU {cpu:.6f}, device {device:.6f}", f"{abs(cpu - device):.1e}"


if __name__ == "__main__":
    main()
