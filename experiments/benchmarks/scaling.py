"""``python experiments/benchmarks/scaling.py``: growth of a round, and its distance to the limits.

``--rows`` selects groups of rows: ``clients`` (registered), ``cohort``, ``processes`` and ``nets``.
The script prints the median time of a round of ``Trainer(...).fit``, and its shares of two rates of
the machine. The same run measures these rates, on one thread, and multiplies them by the number of
processes:

- Matrix products: floating-point operations of forward and backward, counted by torch.
- Copies: a lower bound of the moved bytes. In each local step the parameters are read once, the
  trained parameters are written once, and the minibatch is read once.

``--save`` writes ``results.md``, ``scaling.csv`` and ``scaling.png``. ``--plot`` measures nothing,
and draws the picture from the CSV file. The rate of products is that of one thread of torch's
matrix product; convolutions may use other instructions, so a share can exceed 100 %.
"""

import argparse
import statistics
import sys
import textwrap
import time
from collections.abc import Callable

import torch
from cases import NETS, Case
from matplotlib import pyplot
from matplotlib.axes import Axes
from race import race
from report import HERE, machine, print_row, read_rows, save, save_rows, table
from settings import Settings
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)
from torch.utils.flop_counter import FlopCounterMode

SMALL = {"net": "LogisticRegression", "shape": (60,), "options": {"in_features": 60}}
MLP = {"net": "MLP", "shape": (784,)}
FEW = {"steps": 5, "samples": 50}

GROUPS: dict[str, list[tuple[Case, int]]] = {
    "clients": [
        (Case(f"{n:,} clients", clients=n, cohort=10, steps=5, samples=10, **SMALL), 1)
        for n in (100, 1_000, 10_000, 100_000)
    ],
    "cohort": [
        (Case(f"cohort of {n:,}", clients=1000, cohort=n, **FEW, **MLP), 1)
        for n in (1, 10, 100, 1000)
    ],
    "processes": [
        (case, processes)
        for case in (
            Case("MLP, cohort of 100", clients=100, **FEW, **MLP),
            Case("pfl's CNN, cohort of 10", "PflCNN", (3, 32, 32), steps=5),
        )
        for processes in (1, 2)
    ],
    "nets": [
        (NETS[name], 1)
        for name in ("LogisticRegression", "MLP", "FlameCNN", "FedTiltCNN", "DittoFashionCNN")
    ],
}
ABOUT = {
    "clients": "Registered clients: logistic regression 60×10, cohort 10, 5 steps of 10.",
    "cohort": "Cohort: MLP 784-128-64-10, 5 steps of 10, 1000 registered clients.",
    "processes": "Processes that share a round.",
    "nets": "Nets: FedAvg, 10 clients × 5 steps of 10.",
}
SHORT = {"LogisticRegression": "logistic", "PflCNN": "pfl's CNN", "DittoFashionCNN": "DittoCNN"}
COLUMNS = {
    "parameters": "{:,}",
    "processes": "{}",
    "round_ms": "{:.2f}",
    "client_step_us": "{:.1f}",
    "gflops": "{:.1f}",
    "share_of_matrix_rate": "{:.1%}",
    "gbytes": "{:.2f}",
    "share_of_copy_rate": "{:.1%}",
}
HEADER = [
    "",
    "parameters",
    "processes",
    "round, ms",
    "µs per client and step",
    "GFLOP/s",
    "of the matrix rate",
    "GB/s",
    "of the copy rate",
]


def best_rate(work: float, run: Callable[[], object], settings: Settings) -> float:
    """Return the work per second of the fastest of many runs, because the machine may be shared."""
    run()
    times: list[float] = []
    until = time.perf_counter() + 1
    while time.perf_counter() < until or len(times) < 5:
        started = settings.now()
        run()
        times.append(settings.now() - started)
    return work / min(times)


def matrix_rate(settings: Settings) -> float:
    """Return GFLOP/s of a product of two matrices."""
    device = settings.device
    n = 8192 if device == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=device)
    out = torch.empty_like(a)
    return best_rate(2e-9 * n**3, lambda: torch.mm(a, b, out=out), settings)


def copy_rate(settings: Settings) -> float:
    """Return GB/s, read and written, of a copy larger than every cache."""
    source = torch.randn(1 << 25, device=settings.device)
    target = torch.empty_like(source)
    return best_rate(2e-9 * source.nbytes, lambda: target.copy_(source), settings)


def work_of_step(case: Case) -> tuple[int, int, int]:
    """Return trained parameters, floating-point operations and bytes of one local step."""
    net = case.build()
    x = torch.randn(case.batch_size, *case.shape)
    with FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.int64))
        loss.backward()
    read = sum(parameter.nbytes for parameter in net.parameters())
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    written = sum(parameter.nbytes for parameter in trained)
    parameters = sum(parameter.numel() for parameter in trained)
    return parameters, counter.get_total_flops(), read + written + x.nbytes


def measure(
    group: str, case: Case, processes: int, settings: Settings, rates: tuple[float, float]
) -> dict[str, object]:
    """Return a row's numbers, without times if the row cannot be run."""
    parameters, flops, moved = work_of_step(case)
    row: dict[str, object] = dict.fromkeys(("group", "row", "net", *COLUMNS), "")
    row |= {"group": group, "row": case.title, "parameters": parameters, "processes": processes}
    row |= {"net": case.net, "clients": case.clients, "cohort": case.in_round}
    times = race(case, settings, processes=processes)
    if "pl_fed" not in times:
        print(f"{case.title}: {times['note']}", file=sys.stderr)
        return row
    seconds = statistics.median(times["pl_fed"])
    steps = case.in_round * case.steps
    gflops, gbytes = (1e-9 * per_step * steps / seconds for per_step in (flops, moved))
    return row | {
        "round_ms": round(1e3 * seconds, 4),
        "client_step_us": round(1e6 * seconds / steps, 4),
        "gflops": round(gflops, 4),
        "share_of_matrix_rate": round(gflops / rates[0] / processes, 6),
        "gbytes": round(gbytes, 4),
        "share_of_copy_rate": round(gbytes / rates[1] / processes, 6),
    }


def format_cells(row: dict[str, object]) -> list[str]:
    cells = ["–" if row[name] == "" else form.format(row[name]) for name, form in COLUMNS.items()]
    return [str(row["row"]), *cells]


def plot(rows: list[dict[str, object]]) -> None:
    """Draw ``scaling.png``."""
    rows = [row for row in rows if row["round_ms"] != ""]
    groups = {name: [row for row in rows if row["group"] == name] for name in GROUPS}
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    _curve(axes[0, 0], groups["clients"], "clients", "round_ms")
    axes[0, 0].set(xlabel="registered clients", ylabel="round, ms")
    _curve(axes[0, 1], groups["cohort"], "cohort", "client_step_us")
    axes[0, 1].set(xlabel="clients in the cohort", ylabel="µs per client and step")
    _processes(axes[1, 0], groups["processes"])
    _shares(axes[1, 1], groups["nets"])
    for axis, about in zip(axes.flat, ABOUT.values()):
        axis.set_title("\n".join(textwrap.wrap(about, 56)), fontsize="medium")
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(HERE / "scaling.png", dpi=110)
    pyplot.close(figure)


def parse_numbers(row: dict[str, str]) -> dict[str, object]:
    """Return a row of ``scaling.csv`` with numbers as numbers."""
    integers = ("parameters", "processes", "clients", "cohort")
    return {
        name: text
        if name in ("group", "row", "net") or not text
        else (int if name in integers else float)(text)
        for name, text in row.items()
    }


def _processes(axis: Axes, rows: list[dict[str, object]]) -> None:
    """Draw each round as a share of the same round in one process."""
    alone = {row["row"]: row["round_ms"] for row in rows if row["processes"] == 1}
    names = [f"{_short(row)}\n{row['processes']} proc." for row in rows]
    bars = axis.bar(names, [row["round_ms"] / alone[row["row"]] for row in rows])
    axis.bar_label(bars, [f"{row['round_ms']:,.0f} ms" for row in rows])
    axis.set(ylabel="of the time of one process", ylim=(0, 1.15))


def _shares(axis: Axes, rows: list[dict[str, object]]) -> None:
    """Draw each net's shares of the machine's rates."""
    places = range(len(rows))
    for shift, name in ((-0.2, "matrix"), (0.2, "copy")):
        shares = [100 * row[f"share_of_{name}_rate"] for row in rows]
        bars = axis.bar([place + shift for place in places], shares, 0.4, label=f"{name} rate")
        axis.bar_label(bars, fmt="%.0f")
    axis.set_xticks(places, [f"{_short(row)}\n{row['parameters']:,}" for row in rows])
    axis.tick_params(axis="x", labelsize="small")
    axis.set(ylabel="% of the rate of one thread of torch")
    axis.axhline(100, color="0.4", lw=1, ls="--")
    axis.margins(y=0.1)
    axis.legend()


def _curve(axis: Axes, rows: list[dict[str, object]], x: str, y: str) -> None:
    axis.plot([row[x] for row in rows], [row[y] for row in rows], "o-")
    axis.set_xscale("log")
    axis.set_ylim(0, 1.15 * max(row[y] for row in rows))


def _short(row: dict[str, object]) -> str:
    """Return the net's name."""
    return SHORT.get(str(row["net"]), str(row["net"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--plot", action="store_true", help="only draw scaling.png from the .csv")
    parser.add_argument("--save", action="store_true", help="write results.md, .csv and .png")
    Settings.add_to(parser)
    parser.set_defaults(seconds=3.0, turns=5)
    arguments = parser.parse_args()
    if arguments.plot:
        plot([parse_numbers(row) for row in read_rows(HERE / "scaling.csv")])
        return
    settings = Settings.from_arguments(arguments)
    torch.set_num_threads(1)
    rates = matrix_rate(settings), copy_rate(settings)
    text = (
        f"{machine(settings.device)} One thread multiplies matrices at {rates[0]:.0f} GFLOP/s and"
        f" copies {rates[1]:.0f} GB/s, read and written.\n"
    )
    print(text, flush=True)
    rows = []
    for group in arguments.rows:
        text += f"\n{ABOUT[group]}\n\n"
        print(f"{ABOUT[group]}\n\n{table(HEADER, [])}", end="", flush=True)
        lines = []
        for case, processes in GROUPS[group]:
            rows.append(measure(group, case, processes, settings, rates))
            lines.append(format_cells(rows[-1]))
            print_row(lines[-1])
        text += table(HEADER, lines)
        print(flush=True)
    if arguments.save:
        save("scaling", f"## Scaling\n\n{text}\n![Scaling](scaling.png)")
        save_rows("scaling.csv", rows)
        plot(rows)


if __name__ == "__main__":
    main()
