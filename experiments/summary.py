"""How many of the papers' figures agree with ours, and the main ones, for README.

python -m experiments.summary
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.ditto import report as ditto
from experiments.fedtilt import report as fedtilt
from experiments.flame import report as flame
from experiments.grid import ROOT, Row, finished
from experiments.tables import Comparison, markdown

HERE = Path(__file__).parent
DATA = {"mnist": "MNIST", "fmnist": "Fashion-MNIST"}
BLOCK = re.compile(r"(?<=<!-- papers -->\n).*?(?=<!-- /papers -->)", re.DOTALL)
Figures = Mapping[tuple[str, str], Comparison]


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Args:
        name: The paper and the table.
        folder: Of ours.
        file: Ours, in it.
        command: What makes it, after ``python -m experiments.``.
        figures: What is compared.
        main: Those of the figures that README shows, by name.
    """

    name: str
    folder: str
    file: str
    command: str
    figures: Figures
    main: Mapping[tuple[str, str], str]

    @property
    def rows(self) -> list[Row]:
        """The runs that it is made of."""
        return finished(HERE / self.folder / "results.csv")

    def counts(self) -> list[str]:
        """Return how many figures agree, seeds, runs, hours and the command."""
        agree = sum(one.agrees for one in self.figures.values())
        hours = sum(float(row["seconds"]) for row in self.rows) / 3600
        return [
            f"[{self.name}](experiments/{self.folder}/{self.file})",
            f"{agree} of {len(self.figures)}",
            str(len({row["seed"] for row in self.rows})),
            str(len(self.rows)),
            f"{hours:.1f}",
            f"`{self.command}`",
        ]


def _flat(nested: Mapping[tuple[str, str] | str, Mapping[str, Comparison]]) -> Figures:
    return {
        (" / ".join(key) if isinstance(key, tuple) else key, name): one
        for key, each in nested.items()
        for name, one in each.items()
    }


def tables() -> list[Table]:
    """Return all tables of which there are runs."""
    label, hybrid = "2 classes a client", "half labels, half sizes"
    tilted = _flat(fedtilt.figures())
    found = [
        Table(
            "FLAME, Table III",
            "flame",
            "table3.md",
            "flame.run",
            _flat(flame.figures()),
            {
                (f"{data}/{split}", f"FLAME {model}"): f"FLAME, {name}, {said}: {model}"
                for data, name in DATA.items()
                for split, said in (("label_q2", label), ("hybrid_q2_dir0.5", hybrid))
                for model in ("PM", "GM")
            },
        ),
        Table(
            "Ditto, Tables 1, 5 and 9: Fashion-MNIST",
            "ditto/fashion",
            "table.md",
            "ditto.run fashion",
            ditto.figures("fashion"),
            {
                (condition, row): f"Fashion-MNIST, 500 clients, {condition}: {name}"
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
                (condition, row): f"Vehicle, {condition}: {name}"
                for condition in ("clean", "A2_50")
                for row, name in (("global", "FedAvg"), ("Ditto, lambda=1", "Ditto, λ = 1"))
            },
        ),
        *(
            Table(
                f"FedTilt, Tables II, III and VII, FedAvg in two readings: {said}",
                "fedtilt",
                "tables.md",
                "fedtilt.run",
                {key: one for key, one in tilted.items() if key[1] in metrics},
                {
                    (f"{data}/clean / FedTilt", metrics[0]): f"FedTilt, {name}, clean: {unit}"
                    for data, name in DATA.items()
                },
            )
            for said, unit, *metrics in (
                ("accuracy", "accuracy, %", "accuracy"),
                ("spreads", "σ", "accuracy_std", "class_std_mean", "class_std_std"),
            )
        ),
    ]
    return [table for table in found if table.rows]


def text() -> str:
    """Return what stands in README."""
    made = tables()
    head = ["", "figures in the band", "seeds", "runs", "hours of one core", "command"]
    counts = markdown(head, [table.counts() for table in made])
    main = [
        [name, *table.figures[key].cells(2 if "%" in name or "σ" in name else 4)]
        for table in made
        for key, name in table.main.items()
        if key in table.figures
    ]
    return f"\n{counts}\n{markdown(['', 'the paper', 'pl_fed', 'difference'], main)}\n"


def main() -> None:
    """Put the tables into README."""
    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(lambda _: text(), readme.read_text()))


if __name__ == "__main__":
    main()
