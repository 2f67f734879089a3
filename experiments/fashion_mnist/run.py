"""FedAvg, local training and Ditto on real Fashion-MNIST, clean and with 20 % label poisoning.

PL_FED_DATA=../data python experiments/fashion_mnist/run.py

100 clients with two classes each, MLP 784-128-64-10, 10 clients a round, 50 rounds, CPU, one
thread. Each run is ``python -m pl_fed fit`` with the shipped configs. Resumable: a run whose row is
in results.csv is not run again. Writes results.csv and, from it, table.md.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
METRICS = ["accuracy", "accuracy_std", "accuracy_worst10"]
ALGORITHMS = {"FedAvg": ["fedavg"], "local": ["local"], "Ditto": ["ditto"]}
SETTINGS = {"clean": [], "20 % poisoned": ["label_poisoning"]}


def run(algorithm: str, setting: str, seed: int) -> dict[str, str]:
    """Run one federation; return its row."""
    configs = ["fashion_mnist", *ALGORITHMS[algorithm], *SETTINGS[setting]]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pl_fed", "fit"]
        for name in configs:
            command += ["--config", str(ROOT / "configs" / f"{name}.yaml")]
        command += ["--seed_everything", str(seed), "--trainer.accelerator", "cpu"]
        command += ["--trainer.default_root_dir", folder, "--trainer.enable_progress_bar", "false"]
        started = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        (file,) = Path(folder).glob("*/metrics.csv")
        with file.open(newline="") as lines:
            last = list(csv.DictReader(lines))[-1]
    row = {"algorithm": algorithm, "setting": setting, "seed": str(seed)}
    for model in ("global", "personal"):
        for metric in METRICS:
            row[f"{model}_{metric}"] = last.get(f"test/{model}/{metric}", "")
    return {**row, "seconds": f"{seconds:.1f}"}


def table(rows: list[dict[str, str]]) -> str:
    """Return the rows as a table: means over seeds."""
    lines = [
        "| | | accuracy | spread (std) | worst 10 % | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        for algorithm in ALGORITHMS:
            found = [r for r in rows if (r["algorithm"], r["setting"]) == (algorithm, setting)]
            for model in ("global", "personal"):
                if not found or not found[0][f"{model}_accuracy"]:
                    continue
                cells = []
                for metric in METRICS:
                    values = [float(row[f"{model}_{metric}"]) for row in found]
                    spread = statistics.stdev(values) if len(values) > 1 else 0.0
                    cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
                seconds = statistics.median(float(row["seconds"]) for row in found)
                name = f"{algorithm}, {model}"
                lines.append(f"| {setting} | {name} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    results = HERE / "results.csv"
    rows: list[dict[str, str]] = []
    if results.exists():
        with results.open(newline="") as file:
            rows = list(csv.DictReader(file))
    done = {(row["algorithm"], row["setting"], int(row["seed"])) for row in rows}
    for seed in seeds:
        for setting in SETTINGS:
            for algorithm in ALGORITHMS:
                if (algorithm, setting, seed) in done:
                    continue
                rows.append(run(algorithm, setting, seed))
                with results.open("w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(rows[-1], flush=True)
    (HERE / "table.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
