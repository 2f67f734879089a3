"""How samples are shared out: numbers, a table and a picture."""

import csv
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from pl_fed.data.client_data import ClientData
from pl_fed.text import csv_cell, printable

_PARTS = ("train", "val", "test")
_MOST_ROWS = 30  # of the printed table
_LONGEST = 20  # text in a cell of it
_MOST_BUBBLES = 60  # clients that are drawn one by one
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"  # Okabe and Ito's: told apart by all


class Split:
    """Who has how many samples, of which classes.

    Args:
        data: The data of a federation.

    Attributes:
        sizes: Samples of each client by part, each int64 [clients].
        counts: Training samples of each client and class, int64 [clients, classes]; no classes
            where targets are real values.
        distances: Total variation distance of each client's mix of classes from that of all
            training samples, ½ Σ_c |p_kc − p_c|, in [0, 1], [clients].
        owners: Whose samples each client has, one or more; empty if labels were shared out.
    """

    def __init__(self, data: ClientData) -> None:
        self.sizes: dict[str, Tensor] = {part: data.part(part).sizes for part in _PARTS}
        classes = data.num_classes
        cells = data.train.owners() * classes
        if classes:
            cells = cells + data.targets[data.train.index].cpu()
        counts = cells.bincount(minlength=data.num_clients * classes) if classes else cells[:0]
        self.counts = counts.view(data.num_clients, classes)
        shares = self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)
        overall = self.counts.sum(0) / self.counts.sum().clamp(min=1)
        self.owners = data.owners
        self.distances = (shares - overall).abs().sum(1) / 2

    @property
    def held(self) -> Tensor:
        """How many classes each client holds, int64 [clients]."""
        return (self.counts > 0).sum(1)

    def rows(self) -> list[dict[str, int | float | str]]:
        """Return one row for each client; nothing of classes where targets are real values."""
        table: list[dict[str, int | float | str]] = []
        held = self.held.tolist()
        for client in range(len(self.counts)):
            row: dict[str, int | float | str] = {"client": client}
            row |= {"owner": ", ".join(self.owners[client])} if self.owners else {}
            row |= {part: int(sizes[client]) for part, sizes in self.sizes.items()}
            if self.counts.shape[1]:
                row |= {"classes": held[client]}
                row |= {"distance": round(float(self.distances[client]), 6)}
                row |= {f"class_{c}": int(n) for c, n in enumerate(self.counts[client])}
            table.append(row)
        return table

    def write(self, path: Path) -> None:
        """Write the rows as CSV."""
        rows = self.rows()
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {k: csv_cell(v) if isinstance(v, str) else v for k, v in row.items()}
                for row in rows
            )

    def show(self, console: Console | None = None) -> None:
        """Print what clients have in all, and each by itself if they are few."""
        console = console or Console()
        console.print(self._overview())
        if len(self.counts) <= _MOST_ROWS:
            console.print(self._each(console.encoding))

    def _overview(self) -> Table:
        clients = len(self.counts)
        title = f"{clients} client{'s' if clients > 1 else ''}"
        table = Table(title=title, title_justify="left")
        for name in ("", "in all", "fewest", "median", "most"):
            table.add_column(name, justify="left" if not name else "right")
        for part, sizes in self.sizes.items():
            table.add_row(f"{part} samples", str(int(sizes.sum())), *map(_plain, _spanned(sizes)))
        if self.counts.shape[1]:
            table.add_row("classes", str(self.counts.shape[1]), *map(_plain, _spanned(self.held)))
            spread = [f"{distance:.3f}" for distance in _spanned(self.distances)]
            table.add_row("distance from the mix of all", "", *spread)
        return table

    def _each(self, encoding: str) -> Table:
        table = Table()
        of_classes = ("distance", "training samples by class") if self.counts.shape[1] else ()
        of_owners = ("owner",) if self.owners else ()
        for name in ("client", *of_owners, *_PARTS, *of_classes):
            table.add_column(name, justify="left" if " " in name else "right")
        for row, counts in zip(self.rows(), self.counts.tolist()):
            names = ("client", *of_owners, *_PARTS)
            cells = [escape(_shortened(printable(str(row[name]), encoding))) for name in names]
            if of_classes:
                held = " ".join(f"{c}:{n}" for c, n in enumerate(counts) if n)
                cells += [f"{row['distance']:.3f}", held]
            table.add_row(*cells)
        return table

    def draw(self, path: Path) -> None:
        """Draw classes by client, sizes, and distances from the mix of all, as PNG."""
        classes = self.counts.shape[1]
        figure = Figure(figsize=(9, 8.5 if classes else 3.5), layout="constrained")
        if classes:
            top, middle, bottom = figure.subplots(3, 1, height_ratios=[3, 1.3, 1])
            self._draw_classes(top)
            self._draw_distances(bottom)
        else:
            middle = figure.subplots()
        self._draw_sizes(middle)
        figure.savefig(path, dpi=150)

    def _draw_classes(self, axes: Axes) -> None:
        clients, classes = self.counts.shape
        if clients > _MOST_BUBBLES:
            image = axes.imshow(
                self.counts.T.log1p(), aspect="auto", cmap="cividis", origin="lower",
                interpolation="nearest",
            )  # fmt: skip
            most = int(self.counts.max())
            ticks = [0, *(10**n for n in range(9) if 10**n < most), most]
            bar = axes.figure.colorbar(image, ax=axes, ticks=torch.tensor(ticks).log1p().tolist())
            bar.set_ticklabels([str(tick) for tick in ticks])
            bar.set_label("training samples")
        else:
            who, what = self.counts.nonzero(as_tuple=True)
            area = self.counts[who, what] / self.counts.max() * (2500 / max(10, clients, classes))
            axes.scatter(who, what, s=area * 6, color=_BLUE, alpha=0.8, linewidths=0)
            axes.set_xlim(-0.8, clients - 0.2)
            axes.set_ylim(-0.8, classes - 0.2)
            axes.set_title("area: training samples", loc="right", fontsize="small")
        if classes <= 20:
            axes.set_yticks(range(classes))
        _over_clients(axes, "class")

    def _draw_sizes(self, axes: Axes) -> None:
        begin = np.zeros(len(self.counts))
        edges = np.arange(len(begin) + 1) - 0.5
        for (part, sizes), color in zip(self.sizes.items(), (_BLUE, _ORANGE, _GREEN)):
            end = begin + sizes.numpy()
            axes.stairs(end, edges, baseline=begin, fill=True, color=color, label=part)
            begin = end
        _over_clients(axes, "samples")
        axes.margins(x=0.01)
        axes.legend(ncols=3, frameon=False, fontsize="small", loc="upper right")
        axes.set_ylim(top=float(begin.max()) * 1.25)

    def _draw_distances(self, axes: Axes) -> None:
        edges = np.arange(len(self.distances) + 1) - 0.5
        axes.stairs(self.distances.numpy(), edges, fill=True, color=_BLUE)
        _over_clients(axes, "distance from\nthe mix of all")
        axes.set_ylim(0, 1)
        axes.margins(x=0.01)


def _over_clients(axes: Axes, what: str) -> None:
    axes.set(ylabel=what, xlabel="client")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _spanned(values: Tensor) -> tuple[float, float, float]:
    """Return the smallest value, the median, and the largest."""
    return float(values.min()), float(np.median(values)), float(values.max())


def _plain(number: float) -> str:
    """Return a count, or what lies halfway between two."""
    return f"{number:.1f}".removesuffix(".0")


def _shortened(text: str) -> str:
    """Return a cell as it is printed: of many owners the first ones."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
