"""Tables of three pages: the papers' figures that agree with ours, and all algorithms.

python -m experiments.summary
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.ditto import report as ditto
from experiments.fashion_mnist import run as fashion_mnist
from experiments.fedtilt import report as fedtilt
from experiments.fedtilt.run import (
    CIFAR10_SETTINGS,
    NAMES,
    OWN_TENTH,
    SEEDS,
    SETTINGS,
    table_jobs,
)
from experiments.flame import report as flame
from experiments.grid import Row, finished_rows, key_of
from experiments.tables import Comparison, markdown

HERE = Path(__file__).parent
DATA = {"mnist": "MNIST", "fmnist": "Fashion-MNIST"}
BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
Figures = Mapping[tuple[str, str], Comparison]


@dataclass(frozen=True)
class Table:
    """Table of a paper.

    Args:
        name: The paper and its table.
        folder: Folder of our table.
        file: File of our table in the folder.
        command: The command that makes the table, after ``python -m experiments.``.
        figures: The compared figures.
        main: The figures that experiments/README.md shows → their names.
        uses: Whether the table uses a run, a row of the folder's results.
        kinds: Names of kinds of figures that are counted separately → the figures' names.
    """

    name: str
    folder: str
    file: str
    command: str
    figures: Figures
    main: Mapping[tuple[str, str], str]
    uses: Callable[[Row], bool] = bool
    kinds: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The runs of the table."""
        return [row for row in finished_rows(HERE / self.folder / "results.csv") if self.uses(row)]

    def counts(self) -> list[str]:
        """Return the number of agreeing figures, seeds, runs and hours, and the command."""
        kinds = self.kinds or {"": {name for _, name in self.figures}}
        counts = []
        for kind, names in kinds.items():
            agrees = [figure.agrees for (_, n), figure in self.figures.items() if n in names]
            counts.append(f"{sum(agrees)} of {len(agrees)} {kind}".strip())
        hours = sum(float(row["seconds"]) for row in self.rows) / 3600
        return [
            f"[{self.name}]({self.folder}/{self.file})",
            ", ".join(counts),
            str(len({row["seed"] for row in self.rows})),
            str(len(self.rows)),
            f"{hours:.1f}",
            f"`{self.command}`",
        ]


def _flat(nested: Mapping[tuple[str, str] | str, Mapping[str, Comparison]]) -> Figures:
    return {
        (" / ".join(key) if isinstance(key, tuple) else key, name): figure
        for key, figures in nested.items()
        for name, figure in figures.items()
    }


def _is_cifar(setting: str) -> bool:
    return setting.startswith("cifar10/")


def tables() -> list[Table]:
    """Return all tables with runs."""
    label, hybrid = "2 classes per client", "half by label, half by size"
    models = {"PM": "personal models", "GM": "global model"}
    flames, tilted = _flat(flame.figures()), _flat(fedtilt.figures())
    own = _flat(fedtilt.own_figures())
    tilts = {job.key for job in table_jobs(SEEDS, SETTINGS + CIFAR10_SETTINGS)}
    kinds = {
        "accuracies": {"accuracy"},
        "spreads": {"accuracy_std", "class_std_mean", "class_std_std"},
    }
    candidates = [
        Table(
            "FLAME, Table III: MNIST and Fashion-MNIST",
            "flame",
            "table3.md",
            "flame.run",
            {key: comparison for key, comparison in flames.items() if not _is_cifar(key[0])},
            {
                (f"{data}/{split}", f"FLAME {model}"): f"FLAME, {name}, {words}: {models[model]}"
                for data, name in DATA.items()
                for split, words in (("label_q2", label), ("hybrid_q2_dir0.5", hybrid))
                for model in models
            },
            lambda row: not _is_cifar(row["setting"]),
        ),
        Table(
            "FLAME, Table III: CIFAR-10, two of its settings",
            "flame",
            "table3.md",
            "flame.run --cifar10 --seeds 1",
            {key: comparison for key, comparison in flames.items() if _is_cifar(key[0])},
            {},
            lambda row: _is_cifar(row["setting"]),
        ),
        Table(
            "Ditto, Tables 1, 5 and 9: Fashion-MNIST",
            "ditto/fashion",
            "table.md",
            "ditto.run fashion",
            ditto.figures("fashion"),
            {
                (condition, row): f"Fashion-MNIST, 500 clients, {ditto.describe(condition)}: {name}"
                for condition in ("clean", "A1_50", "A2_50", "A3_20")
                for row, name in (("global", "FedAvg"), ("dynamic_lambda", "Ditto"))
            },
        ),
        Table(
            "Ditto, Tables 5 and 7: Vehicle",
            "ditto/vehicle",
            "table.md",
            "ditto.run vehicle",
            ditto.figures("vehicle"),
            {
                (condition, row): f"Vehicle, {ditto.describe(condition)}: {name}"
                for condition in ("clean", "A2_50")
                for row, name in (("global", "FedAvg"), ("Ditto, lambda=1", "Ditto, λ = 1"))
            },
        ),
        Table(
            "FedTilt, Tables II, III and VII, tested on whole classes, FedAvg in two readings",
            "fedtilt",
            "tables.md",
            "fedtilt.run",
            {key: comparison for key, comparison in tilted.items() if not _is_cifar(key[0])},
            {
                (f"{data}/clean / FedTilt", metric): f"FedTilt, {name}, clean: {unit}"
                for metric, unit in (("accuracy", "accuracy, %"), ("accuracy_std", "σ"))
                for data, name in DATA.items()
            },
            lambda row: key_of(row, NAMES) in tilts and not _is_cifar(row["setting"]),
            kinds,
        ),
        Table(
            "FedTilt, the same tables, tested on 10 % of the own samples in ten groups, FedAvg in"
            " three readings",
            "fedtilt",
            "tables.md",
            "fedtilt.run own",
            {key: comparison for key, comparison in own.items() if not _is_cifar(key[0])},
            {},
            lambda row: row["split"] == OWN_TENTH and not _is_cifar(row["setting"]),
            kinds,
        ),
        Table(
            "FedTilt, Table II: CIFAR-10, a tenth of the rounds",
            "fedtilt",
            "tables.md",
            "fedtilt.run cifar10",
            {key: comparison for key, comparison in tilted.items() if _is_cifar(key[0])},
            {},
            lambda row: key_of(row, NAMES) in tilts and _is_cifar(row["setting"]),
            kinds,
        ),
        Table(
            "FedTilt, Table II: CIFAR-10, a tenth of the rounds, tested on 10 % of the own samples"
            " in ten groups",
            "fedtilt",
            "tables.md",
            "fedtilt.run own_cifar10",
            {key: comparison for key, comparison in own.items() if _is_cifar(key[0])},
            {},
            lambda row: row["split"] == OWN_TENTH and _is_cifar(row["setting"]),
            kinds,
        ),
    ]
    return [table for table in candidates if table.rows]


def papers() -> str:
    """Return the table of the numbers of agreeing figures, and the table of the main figures."""
    paper_tables = tables()
    head = ["", "figures in the band", "seeds", "runs", "hours of one core", "command"]
    counts = markdown(head, [table.counts() for table in paper_tables])
    main = [
        [name, *table.figures[key].cells(2 if name.startswith("FedTilt") else 4)]
        for table in paper_tables
        for key, name in table.main.items()
        if key in table.figures
    ]
    return f"\n{counts}\n{markdown(['', 'the paper', 'pl_fed', 'difference'], main)}\n"


def algorithms() -> str:
    """Return the table of all algorithms on Fashion-MNIST."""
    return f"\n{fashion_mnist.short_table(finished_rows(HERE / 'fashion_mnist' / 'results.csv'))}\n"


def texts() -> dict[Path, dict[str, str]]:
    """Return the texts between ``<!-- name -->`` and ``<!-- /name -->``, by page and name."""
    return {
        HERE / "README.md": {"papers": papers()},
        HERE / "fashion_mnist" / "README.md": {"algorithms": algorithms()},
        HERE / "fedtilt" / "README.md": {"agreement": f"\n{fedtilt.short_table()}\n"},
    }


def main() -> None:
    """Write the tables into the pages."""
    for page, blocks in texts().items():
        parts = BLOCK.split(page.read_text())  # text, name, block, text, ...
        for place in range(1, len(parts), 3):
            name = parts[place]
            parts[place : place + 2] = [f"<!-- {name} -->\n{blocks[name]}<!-- /{name} -->", ""]
        page.write_text("".join(parts))


if __name__ == "__main__":
    main()
