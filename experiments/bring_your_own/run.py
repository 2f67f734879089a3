"""Seventeen code bases of plain Lightning: first fitted as they are, then federated.

python -m experiments.bring_your_own.run

Each file of this folder holds a LightningModule and its data module, which know nothing of pl_fed.
``code_bases.py`` holds the lines that federate each of them, at most four. The script fits each
module by Lightning alone, and then under FedAvg, Ditto, APFL and FedRep, without an attack and
with two of six clients (one of four) that flip the signs of their uploads, against the median.
Finished runs are not repeated. The script writes results.csv and table.md.

``--only images tabular`` selects code bases, and ``--at-once 2`` is the number of parallel runs.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from experiments.bring_your_own.code_bases import CODE_BASES, CodeBase
from experiments.experiment import Row, read_csv, shorten, write_csv
from experiments.papers import markdown

HERE = Path(__file__).parent
NAMES = ("code_base", "algorithm", "setting")
EPOCHS = 15  # as many as the rounds of federation.yaml
PLAIN = ("Lightning", "clean")
ALGORITHMS = {"FedAvg": "global", "Ditto": "personal", "APFL": "personal", "FedRep": "personal"}
SETTINGS = {
    "clean": [],
    "attacked": [
        *("--federation.aggregator", "Median"),
        *("--federation.adversary.attack", "SignFlipping"),
        *("--federation.adversary.fraction", "0.34"),
    ],
}


def run(name: str, algorithm: str, setting: str) -> Row:
    """Return the row of a run in a worker; that of a failed run has its error."""
    warnings.filterwarnings("ignore")
    row = dict(zip(NAMES, (name, algorithm, setting)))
    begun, base, failed = time.process_time(), CODE_BASES[name], ""
    try:
        is_plain = (algorithm, setting) == PLAIN
        row |= fit_plainly(base) if is_plain else federate(base, algorithm, setting)
    except (Exception, SystemExit) as error:  # the others go on
        failed = " ".join(f"{type(error).__name__}: {error}".split())
    return {**row, "seconds": f"{time.process_time() - begun:.1f}", "failed": failed}


def run_missing(keys: list[tuple[str, ...]], path: Path, workers: int) -> None:
    """Run what has no row yet, or a failed one, and write each row as soon as it is there."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for workers
    rows = {tuple(row[name] for name in NAMES): row for row in read_csv(path)}
    missing = [key for key in keys if key not in rows or rows[key]["failed"]]
    print(f"{len(keys)} runs, {len(missing)} of them missing", flush=True)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run, *key): key for key in missing}
        for future in as_completed(futures):
            key = futures[future]
            rows[key] = row = future.result()
            write_csv(path, list(rows.values()))
            print(", ".join(key), row["failed"] or f"{row['seconds']} s", flush=True)


def fit_plainly(base: CodeBase, epochs: int = EPOCHS) -> Row:
    """Fit and test a module by Lightning alone, and return its metric."""
    from lightning.pytorch import Trainer, seed_everything

    seed_everything(0, verbose=False)
    module, data = base.build()
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    evaluate = trainer.test if "test_step" in vars(type(module)) else trainer.validate
    (logged,) = evaluate(module, data, verbose=False)
    (value,) = (v for name, v in logged.items() if name[-len(base.metric) :] == base.metric)
    return {"metric": shorten(value), "engine": "", "spread": "", "worst10": ""}


def federate(base: CodeBase, algorithm: str, setting: str, options: tuple[str, ...] = ()) -> Row:
    """Run the command line of a federation, and return its metric over the clients."""
    from pl_fed.command.fit import FederatedCLI

    command = ["fit", "--config", str(HERE / "federation.yaml")]
    for line in base.lines:
        command += line.split()
    command += ["--model", algorithm, *SETTINGS[setting], *options]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--trainer.default_root_dir", folder]
        command += ["--trainer.enable_progress_bar", "false"]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            run_folder = Path(FederatedCLI(command).run_dir or folder)
        last = read_csv(run_folder / "metrics.csv")[-1]
        engine = json.loads((run_folder / "engine.json").read_text())["engine"]
    name = f"test/{ALGORITHMS[algorithm]}/{base.metric}"
    statistics = {"metric": "", "spread": "_std", "worst10": "_worst10"}
    values = {key: shorten(last[name + suffix]) for key, suffix in statistics.items()}
    return {"engine": engine, **values}


def table(rows: list[Row]) -> str:
    """Return the results as a table with a row for each code base, and the changed lines."""
    found = {tuple(row[name] for name in NAMES): row for row in rows if not row["failed"]}
    lines = []
    for name, base in CODE_BASES.items():
        plain = found.get((name, *PLAIN))
        runs = [found.get((name, a, s)) for a in ALGORITHMS for s in SETTINGS]
        engines = sorted({row["engine"] for row in runs if row})
        seconds = [float(row["seconds"]) for row in runs if row]
        cells = [f"{float(row['metric']):.3g}" if row else "–" for row in (plain, *runs)]
        average = f"{sum(seconds) / len(seconds):.1f}" if seconds else "–"
        lines.append([name, base.metric, str(len(base.lines)), ", ".join(engines), *cells, average])
    head = ["code base", "metric", "lines", "engine", "Lightning"]
    head += [f"{algorithm}, {setting}" for algorithm in ALGORITHMS for setting in SETTINGS]
    results = markdown([*head, "seconds"], lines)
    changes = [
        [name, "<br>".join(f"`{x}`" for x in base.lines)] for name, base in CODE_BASES.items()
    ]
    return results + "\n" + markdown(["code base", "changed lines"], changes)


def main() -> None:
    """Run the missing runs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", default=list(CODE_BASES), choices=list(CODE_BASES))
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    kinds = [PLAIN, *((algorithm, setting) for algorithm in ALGORITHMS for setting in SETTINGS)]
    results = HERE / "results.csv"
    keys = [(name, *kind) for name in arguments.only for kind in kinds]
    run_missing(keys, results, arguments.at_once)
    text = table(read_csv(results))
    (HERE / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
