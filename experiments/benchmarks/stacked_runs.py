"""``OMP_NUM_THREADS=1 python experiments/benchmarks/stacked_runs.py``: runs in one stack.

Would a study be faster if runs that differ in seeds or numbers were trained in one stack, like the
clients of a run? The script times the local steps of a round (8 steps of 10 samples) by the number
of rows of a stack, 10 for each run, and the share of local steps in a warm cell of the quickstart.
The whole of a run would be at most 1 / (1 - share + share / speedup) times as fast. All times are
processor times; medians of rounds in turn, and of cells.
"""

import statistics
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cases import Case
from local_steps import ByPlFed
from report import table

from pl_fed.engine import EngineChoice
from pl_fed.studies.cell_folder import CellRecord
from pl_fed.studies.cell_run import run_cell
from pl_fed.studies.jobs import RunJob
from pl_fed.studies.study import Study

COLUMNS = (*(("stacked", rows) for rows in (10, 20, 50, 100)), ("stacked_compiled", 10))
ROUNDS, CELLS = 25, 4
SMALL = {"in_features": 64, "num_classes": 10}
CASES = {
    "Ditto, MLP 64-32-10": Case("", "MLP", (64,), ditto=True, options={**SMALL, "hidden": [32]}),
    "FedAvg, MLP 64-32-10": Case("", "MLP", (64,), options={**SMALL, "hidden": [32]}),
    "FedAvg, logistic regression 64-10": Case("", "LogisticRegression", (64,), options=SMALL),
    "FedAvg, MLP 784-128-64-10": Case("", "MLP", (784,)),
}
LOGISTIC = {"class_path": "pl_fed.models.LogisticRegression", "init_args": SMALL}


class Clock:
    """Clock: sums the processor time of all local steps of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        run = EngineChoice.run

        def add_time(*args: Any, **kwargs: Any) -> Any:
            """Run local steps, and add their time."""
            begun = time.process_time()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begun

        EngineChoice.run = add_time  # type: ignore[method-assign]


def time_rows(case: Case, clock: Clock) -> list[float]:
    """Return the milliseconds of a run's local steps in a round, for each column of the table."""
    runs = []
    for engine, rows in COLUMNS:
        sized = Case(**{**asdict(case), "clients": rows, "steps": 8})
        runs.append(ByPlFed(sized, sized.data(), engine))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS + 3):
        for run, own in zip(runs, times):
            clock.seconds = 0.0
            run.round()
            own.append(1e3 * clock.seconds)
    return [10 * statistics.median(own[3:]) / rows for own, (_, rows) in zip(times, COLUMNS)]


def time_cells(change: dict[str, Any], clock: Clock) -> tuple[float, float]:
    """Return the median seconds of a warm cell of the quickstart, and the share of local steps."""
    base = ["quickstart", {"trainer.logger": False, **change}]
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in Study("stacked_runs", base, seeds=CELLS).cells:
            record = CellRecord("stacked_runs", cell.name, {}, cell.seed, cell.digest)
            clock.seconds, begun = 0.0, time.process_time()
            run_cell(RunJob(str(Path(folder)), cell.path, cell.arguments, asdict(record)))
            seconds = time.process_time() - begun
            times.append((seconds, clock.seconds / seconds))
    seconds, shares = zip(*times[1:])  # the first one imports
    return statistics.median(seconds), statistics.median(shares)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    clock = Clock()
    header = ["ms a run", *(f"{engine}, {rows} rows" for engine, rows in COLUMNS)]
    print(table(header, []), end="")
    for title, case in CASES.items():
        cells = [f"{milliseconds:.2f}" for milliseconds in time_rows(case, clock)]
        print(table([title, *cells], []).splitlines()[0], flush=True)
    for engine in ("stacked", "stacked_compiled"):
        for title, change in (
            ("quickstart", {}),
            ("with logistic regression", {"model.net": LOGISTIC}),
        ):
            seconds, share = time_cells({"federation.engine": engine, **change}, clock)
            print(
                f"{title}, {engine}: {seconds:.2f} s, {share:.0%} of them local steps", flush=True
            )


if __name__ == "__main__":
    main()
