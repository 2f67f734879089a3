"""Comparison of a paper's figures with ours, as Markdown tables and for pictures."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DATA_NAMES = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
MARKERS = "osD^vPX"  # distinguish the lines as well as the colours of Okabe and Ito above
Show = Callable[[Sequence[float], int], str]  # formats the values of several seeds


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

    def cells(self, digits: int = 4, show: Show | None = None) -> list[str]:
        """Return three table cells: the paper's figure, ours and the difference.

        Args:
            digits: Decimals.
            show: Formats our figures; by default their mean ± standard deviation.
        """
        sign = "✓" if self.agrees else "✗"
        difference = f"{self.difference:+.{digits}f}".replace("-", "−")
        return [
            spread(self.paper, self.std, digits),
            (show or format_mean_and_std)(self.ours, digits),
            f"{difference} {sign}",
        ]


def spread(mean: float, std: float | None, digits: int = 4) -> str:
    """Format a mean and its standard deviation."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def format_mean_and_std(values: Sequence[float], digits: int = 4) -> str:
    """Format the mean over seeds and its sample standard deviation; a dash without values."""
    if not values:
        return "–"
    std = statistics.stdev(values) if len(values) > 1 else None
    return spread(statistics.mean(values), std, digits)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def fold(title: str, text: str) -> str:
    """Return Markdown that a page shows when the reader opens its title."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n</details>\n"


def tabulate_misses(
    comparisons: Mapping[str, Comparison], digits: int = 4, show: Show | None = None
) -> str:
    """Return the table of the comparisons outside their bands, by name."""
    rows = [
        [name, *comparison.cells(digits, show)]
        for name, comparison in comparisons.items()
        if not comparison.agrees
    ]
    return markdown(["", "the paper", "ours", "difference"], rows)


def notes(folder: Path) -> str:
    """Return the hand-written notes on a folder's table, about figures that do not agree."""
    file = folder / "notes.md"
    return f"\n{file.read_text()}" if file.exists() else ""
