"""All algorithms on real Fashion-MNIST under one setting, clean and with 20 % label poisoning.

PL_FED_DATA=../data python -m experiments.fashion_mnist.run

100 clients with two classes each, MLP 784-128-64-10 (MOCHA: a linear model), 10 clients per round,
50 rounds of one pass, minibatches of 10, CPU, one thread per process. Each run is ``python -m
pl_fed fit`` with the shipped configs and their hyperparameters; nothing is tuned here. FedBN is
left out, because the net has no normalisation layers. Metrics are over the benign clients: 80 with
poisoning. Clean runs measure the same 80, by an attack that changes nothing, and again all 100; the
pictures and the short table compare the same 80. Finished runs, with a row in results.csv, are not
repeated. The script writes results.csv, then table.md, algorithms.png and hero.png from it.
Then ``python -m experiments.summary`` writes a shorter table into README.md of this folder.

``--only FedAvg Ditto`` selects algorithms, ``--seeds 0 1 2`` selects seeds, and ``--at-once 2`` is
the number of parallel runs.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from experiments.fashion_mnist import picture
from experiments.grid import Job, Row, Rows, read, run_missing, write
from experiments.tables import fold, markdown

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
METRICS = ["accuracy", "accuracy_std", "accuracy_worst10", "class_std_mean"]
MODELS = ("global", "personal", "hybrid")
CLEAN, POISONED, CLEAN_80 = "clean", "20 % poisoned", "clean, the same 80 clients"
SETTINGS = {  # layered configs, then command line arguments that change them
    CLEAN: [],
    POISONED: ["label_poisoning"],
    CLEAN_80: [
        *("--federation.adversary.attack", "experiments.fashion_mnist.no_attack.NoAttack"),
        *("--federation.adversary.fraction", "0.2"),  # as in label_poisoning.yaml
    ],
}
HEADS = {CLEAN_80: "clean", POISONED: "20 % poisoned"}  # of the short table
HEAD = ["", "accuracy", "spread (std)", "worst 10 %", "spread within clients", "seconds"]
ALGORITHMS = {  # layered configs, then command line arguments that change them
    "FedAvg": ["fedavg"],
    "FedProx": ["fedprox"],
    "SCAFFOLD": ["scaffold"],
    "FedAvgM": ["fedavg", "fedavgm"],
    "FedAdam": ["fedavg", "fedadam"],
    "FedYogi": ["fedavg", "fedyogi"],
    "FedAdagrad": ["fedavg", "fedadagrad"],
    "FedADMM": ["fedadmm"],
    "TERM": ["fedavg", "term"],
    "q-FFL": ["fedavg", "q_ffl"],
    "FedMGDA+": ["fedavg", "fedmgda"],
    "local": ["local"],
    "finetuning": ["finetuning"],
    "EWC": ["ewc"],
    "symmetrized KL": ["symmetrized_kl"],
    "Per-FedAvg": ["per_fedavg"],
    "mapper": ["mapper"],
    "APFL": ["apfl"],
    "L2SGD": ["l2sgd"],
    "mean-regularized": ["mean_regularized"],
    "MOCHA (linear)": ["mocha"],
    "FedPer": ["fedper"],
    "FedRep": ["fedrep"],
    "pFedMe": ["pfedme"],
    "pFedMe, epochs": ["pfedme_epochs"],
    "Lp-Proj-2": ["lp_proj"],
    "FLAME": ["flame"],
    "Ditto": ["ditto"],
    "Ditto, FedProx": ["ditto_fedprox"],
    "Ditto, own λ": ["ditto_choice"],
    "Ditto, greedy λ": ["ditto_greedy"],
    "FedTilt": ["fedtilt", "--model.local_epochs", "1", "--model.net.hidden", "[128, 64]"],
}


def run(job: Job) -> Rows:
    """Run one federation and return its row."""
    algorithm, setting, seed = job.key
    parts = ["fashion_mnist", *ALGORITHMS[algorithm], *SETTINGS[setting]]
    configs = [part for part in parts if (ROOT / "configs" / f"{part}.yaml").exists()]
    changes = [part for part in parts if part not in configs]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pl_fed", "fit"]
        for name in configs:
            command += ["--config", str(ROOT / "configs" / f"{name}.yaml")]
        command += [*changes, "--seed_everything", seed, "--trainer.accelerator", "cpu"]
        command += ["--trainer.default_root_dir", folder, "--trainer.enable_progress_bar", "false"]
        command += ["--trainer.check_val_every_n_epoch", "50", "--trainer.logger", "false"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["?"])[-1])
        (file,) = Path(folder).glob("*/metrics.csv")
        last = read(file)[-1]
    names = [(model, metric) for model in MODELS for metric in METRICS]
    row = {f"{model}_{metric}": last.get(f"test/{model}/{metric}", "") for model, metric in names}
    return {"results.csv": [row]}


def found(rows: Iterable[Row], algorithm: str, setting: str, column: str) -> list[float]:
    """Return a column's values of an algorithm in a setting, one per seed."""
    chosen = [r for r in rows if (r["algorithm"], r["setting"]) == (algorithm, setting)]
    return [float(row[column]) for row in chosen if row.get(column)]


def table(rows: list[Row]) -> str:
    """Return a table of means over seeds for each setting, and the failures."""
    parts = []
    for setting in SETTINGS:
        lines = []
        for algorithm in ALGORITHMS:
            seconds = found(rows, algorithm, setting, "seconds")
            for model in MODELS:
                columns = [found(rows, algorithm, setting, f"{model}_{m}") for m in METRICS]
                if columns[0]:
                    middle = f"{statistics.median(seconds):.0f}"
                    lines.append([f"{algorithm}, {model}", *map(_cell, columns), middle])
        parts.append(f"## {setting.capitalize()}\n\n" + fold("All models", markdown(HEAD, lines)))
    failures = [f"- {r['algorithm']}, {r['setting']}: {r['failed']}" for r in rows if r["failed"]]
    return "\n".join([*parts, *failures])


def short_table(rows: list[Row]) -> str:
    """Return the table of all settings for one model: the personal model if there is one."""
    lines = []
    for algorithm in ALGORITHMS:
        own = any(found(rows, algorithm, setting, "personal_accuracy") for setting in SETTINGS)
        model = "personal" if own else "global"
        cells = [
            _cell(found(rows, algorithm, setting, f"{model}_{metric}"))
            for setting in (CLEAN_80, POISONED)
            for metric in METRICS[:3]
        ]
        lines.append([algorithm, model, *cells])
    head = [
        name
        for setting in (CLEAN_80, POISONED)
        for name in (f"{HEADS[setting]}: accuracy", "spread (std)", "worst 10 %")
    ]
    return markdown(["algorithm", "model", *head], lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def sort_rows(rows: list[Row]) -> list[Row]:
    """Return the rows in a fixed order."""
    settings, names = list(SETTINGS), list(ALGORITHMS)

    def place(row: Row) -> tuple[str, int, int]:
        return row["seed"], settings.index(row["setting"]), names.index(row["algorithm"])

    return sorted(rows, key=place)


def main() -> None:
    """Run the missing runs, and write the table and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--at-once", type=int, default=2)
    asked = parser.parse_args()
    results = HERE / "results.csv"
    wanted = [
        Job((algorithm, setting, str(seed)))
        for seed in asked.seeds
        for setting in SETTINGS
        for algorithm in asked.only
    ]
    run_missing(wanted, results, ("algorithm", "setting", "seed"), run, asked.at_once)
    rows = sort_rows(read(results))
    write(results, rows)
    (HERE / "table.md").write_text(f"{(HERE / 'head.md').read_text()}\n{table(rows)}")
    picture.draw(rows, list(ALGORITHMS), (CLEAN_80, POISONED), HERE / "algorithms.png")
    picture.draw(rows, picture.HERO, (CLEAN_80, POISONED), HERE / "hero.png")
    print(table(rows))


if __name__ == "__main__":
    main()
