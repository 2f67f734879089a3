"""``python experiments/benchmarks/defences.py``: what does each defence cost?

Every aggregator and pre-aggregator of the package merges random uploads, in a process of its own
with one thread. By default, there are 100 uploads of 3,274,634 float32 numbers, the size of Ditto's
CNN for Fashion-MNIST; the server expects 10 Byzantine uploads. The script prints the median time in
seconds and as a multiple of the mean's; both take turns in the same process. It prints the most
memory above the uploads in the first call, as a multiple of the uploads'. The last column holds the
error of a defence that refuses so many uploads. ``--rows`` selects defences, and ``--save`` writes
``defences.csv``. Small sizes say nothing about memory, because imports take more.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from race import ROOT, environment
from report import machine, print_row, save_rows, table
from settings import Settings

from pl_fed import aggregators
from pl_fed.aggregators import Aggregator, Clipping, Mean, PreAggregator
from pl_fed.nets.rows import RowLayout
from pl_fed.types import RoundContext

Defence = Aggregator | PreAggregator

HEADER = ["", "time, s", "of the mean's time", "memory above the uploads", ""]
ARGUMENTS = {"Chain": {"first": [Clipping()], "then": Mean()}}


def found() -> dict[str, type[Defence]]:
    """Return the concrete classes by name."""
    classes = {}
    for entry in pkgutil.walk_packages(aggregators.__path__, "pl_fed.aggregators."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            if own and issubclass(member, Defence) and not inspect.isabstract(member):
                classes[name] = member
    return dict(sorted(classes.items()))


def context_of(clients: int, parameters: int, byzantine: int) -> RoundContext:
    """Return the context of a round for the defences."""
    draw = torch.Generator().manual_seed(1)
    return RoundContext(
        num_byzantine=byzantine,
        clients=torch.arange(clients),
        losses=torch.rand(clients, generator=draw),
        start_losses=torch.rand(clients, generator=draw),
        group_counts=torch.ones(clients, 3, 2, 2, dtype=torch.int64),
        broadcast=torch.randn(parameters, generator=draw),
        root=torch.randn(parameters, generator=draw),
        layout=split_row(parameters),
    )


def split_row(parameters: int) -> RowLayout:
    """Return a layout of four weights and biases, with shares as in a small CNN."""
    weights = [parameters * share // 100 for share in (1, 4, 20)]
    weights.append(parameters - sum(weights) - 4 * 10)
    tensors = [
        (f"{layer}.{name}", torch.empty(shape, device="meta"))
        for layer, number in enumerate(weights)
        for name, shape in (("weight", (1, number)), ("bias", (10,)))
    ]
    return RowLayout.from_tensors(tensors)


def most_memory() -> int:
    """Return the largest memory of this process so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def measure(
    name: str, clock: str, clients: int, parameters: int, byzantine: int, repeats: int
) -> dict[str, object]:
    """Return the seconds of a defence and of the mean, and bytes; or the defence's error."""
    torch.set_num_threads(1)
    defence, mean = found()[name](**ARGUMENTS.get(name, {})), Mean()
    weights = torch.ones(clients)
    mean(torch.randn(clients, 64), weights, RoundContext())
    settings = Settings(clock=clock)

    def seconds(call: Callable[[], object]) -> float:
        started = settings.now()
        call()
        return settings.now() - started

    draw = torch.Generator().manual_seed(0)
    uploads = torch.empty(clients, parameters).normal_(generator=draw)
    context = context_of(clients, parameters, byzantine)
    before = most_memory()
    try:
        defence(uploads, weights, context)
    except ValueError as error:
        return {"note": str(error)}
    more = most_memory() - before
    own, means = [], []
    for _ in range(repeats):
        means.append(seconds(lambda: mean(uploads, weights, context)))
        own.append(seconds(lambda: defence(uploads, weights, context)))
    return {"own": own, "means": means, "bytes": more}


def row_of(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure a defence in a process of its own."""
    sizes = (arguments.clients, arguments.parameters, arguments.byzantine)
    row: dict[str, object] = {"defence": name}
    row |= dict(zip(("clients", "parameters", "byzantine"), sizes))
    row |= dict.fromkeys(("seconds", "times_the_mean", "memory_above_uploads", "note"), "")
    words = [name, arguments.clock, *map(str, (*sizes, arguments.repeats))]
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, env=environment(ROOT, "cpu"), capture_output=True, text=True)
    if done.returncode:
        return {**row, "note": done.stderr.strip().splitlines()[-1]}
    numbers = json.loads(done.stdout.splitlines()[-1])
    if "note" in numbers:
        return {**row, "note": numbers["note"]}
    seconds, mean = statistics.median(numbers["own"]), statistics.median(numbers["means"])
    return {
        **row,
        "seconds": round(seconds, 4),
        "times_the_mean": round(seconds / mean, 2),
        "memory_above_uploads": round(numbers["bytes"] / (4 * sizes[0] * sizes[1]), 3),
    }


def format_cells(row: dict[str, object]) -> list[str]:
    """Return the cells of a row of the table."""
    numbers = [row[name] for name in ("seconds", "times_the_mean", "memory_above_uploads")]
    cells = ["–" if number == "" else f"{number:.2f}" for number in numbers]
    return [str(row["defence"]), *cells, str(row["note"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=found(), default=list(found()))
    parser.add_argument("--clients", type=int, default=100, help="n")
    parser.add_argument("--parameters", type=int, default=3_274_634, help="d")
    parser.add_argument("--byzantine", type=int, default=10, help="that the server expects")
    parser.add_argument("--repeats", type=int, default=5, help="calls that are timed")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--save", action="store_true", help="write defences.csv")
    arguments = parser.parse_args()
    print(f"{machine('cpu')}\n\n{table(HEADER, [])}", end="", flush=True)
    rows = []
    for name in arguments.rows:
        rows.append(row_of(name, arguments))
        print_row(format_cells(rows[-1]))
    if arguments.save:
        save_rows("defences.csv", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(*sys.argv[2:4], *map(int, sys.argv[4:]))))
    else:
        main()
