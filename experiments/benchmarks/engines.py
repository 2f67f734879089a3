"""``OMP_NUM_THREADS=1 python experiments/benchmarks/engines.py``: engines, and the rule of auto.

Measures a local step of a client by each engine: processor time of a round without the Trainer. The
engines take turns, and the median of the rounds counts. The script writes ``engines.csv``, and
``engines.md`` with the engines of the rule and their regret: the time by this engine over the time
by the fastest one that was measured. ``--report`` measures nothing.
"""

import argparse
import csv
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cases import Case
from fit import client_of
from report import table

from pl_fed import EngineOptions, Federation
from pl_fed.data import FederatedData
from pl_fed.engine.rule import WorkFacts, choose_engine
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All

ENGINES = ("one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled")
IMAGE = (3, 32, 32)
HERE = Path(__file__).parent
NETS = {
    "logistic regression": Case("", "LogisticRegression", (784,)),
    "MLP 32": Case("", "MLP", (784,), options={"hidden": [32]}),
    "MLP 128-64": Case("", "MLP", (784,)),
    "MLP 512-512": Case("", "MLP", (784,), options={"hidden": [512, 512]}),
    "FlameCNN": Case("", "FlameCNN", IMAGE, steps=5),
    "PflCNN": Case("", "PflCNN", IMAGE, steps=3),
    "Residual": Case("", "Residual", IMAGE, steps=3),
    "adapters": Case("", "Adapters", (32, 384), steps=2),
}
COHORTS = (2, 10, 50)
LONG_NETS = ("PflCNN", "Residual", "adapters")
STACK_BYTES = 5 << 20  # of a stack on a CPU: see pl_fed/engine/choice.py
SHORT, LONG = 1e4, 1e6  # local steps of clients in a run
COLUMNS = (
    *("net", "ditto", "parameters", "layers", "convolves", "clients", "engine"),
    *("microseconds", "setup"),
)
INTRODUCTION = """# The engines, and the rule of `auto`

Microseconds of processor time for a local step of a client, on one CPU thread (batches of 10). The
last columns have the engine that `auto` takes, and its regret: its time divided by that of the
fastest engine that was measured. Compilation is not in the times. A run of 10,000 steps compares
the eager engines, because compiling takes 1 to 27 s here. `engines.csv` has the numbers and the
seconds of the set-up; `OMP_NUM_THREADS=1 python experiments/benchmarks/engines.py` measures them
(a shared machine: differences of 10 % mean nothing). On a GPU the rule takes `stacked` wherever
clients can be stacked: a stacked step has as many kernel launches for 1,000 clients as for one.

"""


class Engine:
    """Engine: a federation whose rounds are run by one engine.

    Attributes:
        setup: Processor seconds of the first round less those of a later one: mostly compilation.
    """

    def __init__(self, name: str, case: Case, data: FederatedData) -> None:
        self.name, self.case = name, case
        self.client = client_of(case)
        self.federation = Federation(All(), engine=EngineOptions(name), seed=0)
        self.federation.setup(self.client, data, "fit", settings=RunSettings(rounds=10))
        self.client.train()
        self.optimizer = self.client.configure_optimizers()
        self.seconds: list[float] = []
        first = self.round()
        self.seconds.clear()
        self.setup = first - self.round()

    def round(self) -> float:
        """Run a round, and return its processor time."""
        begun = time.process_time()
        self.federation.run_round(0, self.optimizer)
        self.seconds.append(time.process_time() - begun)
        return self.seconds[-1]

    @property
    def runs_as_named(self) -> bool:
        """Whether no other engine replaced this one."""
        return self.federation.engine_choice.current == self.name

    @property
    def microseconds(self) -> float:
        """The median time of a local step of a client."""
        return 1e6 * statistics.median(self.seconds) / (self.case.clients * self.case.steps)


def measure(
    net: str, case: Case, engines: Sequence[str], seconds: float
) -> Iterator[dict[str, str]]:
    """Yield a row for each engine."""
    data = case.data()
    running = [Engine(name, case, data) for name in engines]
    running = [engine for engine in running if engine.runs_as_named]
    spent = 0.0
    while spent < seconds or len(running[0].seconds) < 3:
        spent += sum(engine.round() for engine in running)
    for engine in running:
        client = engine.client
        facts = WorkFacts.collect(client, client.objective, case.clients, 0.0)
        yield {
            "net": net,
            "ditto": str(int(case.ditto)),
            "parameters": str(client.row("global").layout.numel),
            "layers": str(facts.layers),
            "convolves": str(int(facts.convolves)),
            "clients": str(case.clients),
            "engine": engine.name,
            "microseconds": f"{engine.microseconds:.0f}",
            "setup": f"{max(0.0, engine.setup):.1f}",
        }


def apply_rule(row: Mapping[str, str], steps: float) -> str:
    """Return the engine of ``auto`` for the net and the clients of a row."""
    models = 1 + int(row["ditto"])
    numbers, clients = models * int(row["parameters"]), int(row["clients"])
    return choose_engine(
        WorkFacts(
            device="cpu",
            stack=min(clients, max(1, STACK_BYTES // (4 * numbers))),
            numbers=numbers,
            layers=int(row["layers"]),
            convolves=row["convolves"] == "1",
            steps=steps,
        )
    )


def report(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table of all engines, with the rule's engine of a short and of a long run."""
    groups: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        key = (row["net"], row["ditto"], row["clients"])
        groups.setdefault(key, {})[row["engine"]] = row
    lines = []
    for (net, ditto, clients), engines in groups.items():
        times = {name: float(row["microseconds"]) for name, row in engines.items()}
        cells = [f"{'Ditto' if ditto == '1' else 'FedAvg'}, {net}", clients]
        cells += [f"{times[name]:.0f}" if name in times else "-" for name in ENGINES]
        first = next(iter(engines.values()))
        for steps, compared in ((SHORT, ENGINES[:2]), (LONG, ENGINES)):
            name = apply_rule(first, steps)
            best = min(times[engine] for engine in compared if engine in times)
            cells.append(f"{name}, {times[name] / best:.2f}" if name in times else f"{name}, -")
        lines.append(cells)
    header = ["algorithm, net", "clients", *ENGINES, "rule, 10,000 steps", "rule, 1,000,000 steps"]
    return table(header, lines)


def main() -> None:
    """Measure the nets, write ``engines.csv``, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--clients", nargs="+", type=int, default=list(COHORTS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row of the table")
    parser.add_argument("--out", type=Path, default=HERE / "engines.csv")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.report:
        save_rows(options.out, list(measure_all(options)))
    with options.out.open(newline="") as file:
        page = INTRODUCTION + report(list(csv.DictReader(file)))
    options.out.with_suffix(".md").write_text(page)
    print(page)


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield the rows of all nets and numbers of clients."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for net in options.nets:
        for clients in options.clients:
            if clients > 10 and net in LONG_NETS:
                continue
            for ditto in (False, True) if net == "MLP 128-64" else (False,):
                case = replace(NETS[net], clients=clients, ditto=ditto)
                for row in measure(net, case, options.engines, options.seconds):
                    print(*row.values(), flush=True)
                    yield row


def save_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write the rows of all engines."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
