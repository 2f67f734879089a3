"""Tables that compare a paper's figures with ours, and the formats of all pages."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pl_fed.statistics import t_interval

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DATA_NAMES = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
MARKERS = "osD^vPX"  # distinguish the lines as well as the colours of Okabe and Ito above
Show = Callable[[Sequence[float], int], str]  # formats the values of several seeds


def format_mean_and_std(values: Sequence[float], digits: int = 4) -> str:
    """Format the mean over seeds and its sample standard deviation; a dash without values."""
    if not values:
        return "–"
    std = statistics.stdev(values) if len(values) > 1 else None
    return spread(statistics.mean(values), std, digits)


def spread(mean: float, std: float | None, digits: int = 4) -> str:
    """Format a mean and its standard deviation."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def format_interval(values: Sequence[float], digits: int = 4) -> str:
    """Format the mean over seeds with its interval; a dash without values."""
    return t_interval(values).text(digits) if values else "–"


@dataclass(frozen=True)
class Comparison:
    """Comparison of one figure of a paper with ours.

    Args:
        paper: The paper's mean.
        std: The paper's standard deviation over runs, if it reports one.
        ours: Our figures, one per seed.
        band: Largest difference of the means that counts as agreement.
    """

    paper: float
    std: float | None
    ours: Sequence[float]
    band: float

    @property
    def difference(self) -> float:
        """Our mean minus the paper's."""
        return statistics.mean(self.ours) - self.paper

    @property
    def agrees(self) -> bool:
        """Whether the difference lies in the band."""
        return abs(self.difference) <= self.band

    def cells(self, digits: int = 4, show: Show = format_mean_and_std) -> list[str]:
        """Return three table cells: the paper's figure, ours and the difference.

        Args:
            digits: Decimals.
            show: Formats our figures.
        """
        sign = "✓" if self.agrees else "✗"
        difference = f"{self.difference:+.{digits}f}".replace("-", "−")
        paper = spread(self.paper, self.std, digits)
        return [paper, show(self.ours, digits), f"{difference} {sign}"]


Figures = Mapping[tuple[str, str], Comparison]  # setting and column → the compared figure


@dataclass(frozen=True)
class PaperTable:
    """Paper table: a table of a paper, for the summary of all experiments.

    Args:
        name: The paper and its table.
        page: Our page, relative to ``experiments/``.
        command: The command that makes it, after ``python -m``.
        figures: The compared figures.
        rows: The runs, as rows of their table of results.
        main: The figures that experiments/README.md shows → their names.
        kinds: Names of kinds of figures that are counted separately → the figures' columns.
        digits: Decimals of the figures in experiments/README.md.
    """

    name: str
    page: str
    command: str
    figures: Figures
    rows: Sequence[Mapping[str, str]]
    main: Mapping[tuple[str, str], str] = field(default_factory=dict)
    kinds: Mapping[str, Collection[str]] = field(default_factory=dict)
    digits: int = 4

    def cells(self) -> list[str]:
        """Return the number of agreeing figures, seeds, runs and hours, and the command."""
        kinds = self.kinds or {"": {name for _, name in self.figures}}
        counts = [
            f"{count_agreements(f for (_, n), f in self.figures.items() if n in names)} {kind}"
            for kind, names in kinds.items()
        ]
        seconds = sum(float(row.get("seconds/total") or row["seconds"]) for row in self.rows)
        return [
            f"[{self.name}]({self.page})",
            ", ".join(map(str.strip, counts)),
            str(len({row["seed"] for row in self.rows})),
            str(len(self.rows)),
            f"{seconds / 3600:.1f}",
            f"`{self.command}`",
        ]


def count_agreements(comparisons: Iterable[Comparison]) -> str:
    """Return the number of comparisons within their bands, such as ``9 of 10``."""
    agreements = [comparison.agrees for comparison in comparisons]
    return f"{sum(agreements)} of {len(agreements)}"


def tabulate_misses(
    comparisons: Mapping[str, Comparison], digits: int = 4, show: Show = format_mean_and_std
) -> str:
    """Return the table of the comparisons outside their bands, by name."""
    rows = [
        [name, *comparison.cells(digits, show)]
        for name, comparison in comparisons.items()
        if not comparison.agrees
    ]
    return markdown(["", "the paper", "ours", "difference"], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """Format a Markdown table.

    Args:
        head: The titles of the columns.
        rows: The cells.
        align: The rule below the titles of all columns but the first one.
    """
    lines = [list(head), ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with numbers to the right."""
    return markdown(head, rows, align="---:")


def number(value: float | None, sign: str = "") -> str:
    """Format a number with three digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.3f}".replace("-", "−")


def interval(values: Sequence[float], sign: str = "") -> str:
    """Format the mean over seeds, with half of its 95 % interval if there are several."""
    if not values:
        return "–"
    result = t_interval(values)
    mean = number(result.estimate, sign)
    return mean if len(values) == 1 else f"{mean} ± {(result.high - result.low) / 2:.3f}"


def fold(title: str, text: str) -> str:
    """Return Markdown that a page shows when the reader opens its title."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n</details>\n"


def notes(folder: Path) -> str:
    """Return the hand-written notes on a folder's table, about figures that do not agree."""
    file = folder / "notes.md"
    return f"\n{file.read_text()}" if file.exists() else ""
