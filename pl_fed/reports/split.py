"""The data split: numbers, a table and a picture."""

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
from pl_fed.files import replace_file
from pl_fed.text import csv_cell, escape_controls

_PARTS = ("train", "val", "test")
_MAX_ROWS = 30  # of the printed table of clients
_MAX_TEXT = 20  # characters in a cell of it
_MAX_BUBBLES = 60  # clients drawn as bubbles; more are drawn as an image
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"  # Okabe and Ito: colour-blind safe


class Split:
    """Data split: the samples of each client by part, class and owner.

    Args:
        data: The data of a federation.

    Attributes:
        sizes: The samples of each client by part (train, val, test), each int64 [clients].
        counts: The training samples of each client and class, int64 [clients, classes]; with
            real-valued targets, there are no classes.
        distances: The total variation distance of each client's class distribution from the
            overall distribution of training samples, ½ Σ_c |p_kc − p_c|, in [0, 1], [clients].
        official: The parts that the data set itself gives.
        owners: The owners of each client's samples, one or more; empty if a partitioner
            distributed the samples by their labels.
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
        self.official = data.official
        self.distances = (shares - overall).abs().sum(1) / 2

    @property
    def classes_per_client(self) -> Tensor:
        """The number of classes in each client's training samples, int64 [clients]."""
        return (self.counts > 0).sum(1)

    def rows(self) -> list[dict[str, int | float | str]]:
        """Return one row for each client; with real-valued targets, without columns of classes."""
        table: list[dict[str, int | float | str]] = []
        classes_per_client = self.classes_per_client.tolist()
        for client in range(len(self.counts)):
            row: dict[str, int | float | str] = {"client": client}
            row |= {"owner": ", ".join(self.owners[client])} if self.owners else {}
            row |= {part: int(sizes[client]) for part, sizes in self.sizes.items()}
            if self.counts.shape[1]:
                row |= {"classes": classes_per_client[client]}
                row |= {"distance": round(float(self.distances[client]), 6)}
                row |= {f"class_{c}": int(n) for c, n in enumerate(self.counts[client])}
            table.append(row)
        return table

    def write(self, path: Path) -> None:
        """Write the rows as a CSV file, completely or not at all."""
        rows = self.rows()
        with (
            replace_file(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {k: csv_cell(v) if isinstance(v, str) else v for k, v in row.items()}
                for row in rows
            )

    def show(self, console: Console | None = None) -> None:
        """Print a summary of all clients, and a table with one row per client if there are few."""
        console = console or Console()
        console.print(self._overview())
        if len(self.counts) <= _MAX_ROWS:
            console.print(self._client_table(console.encoding))

    def _overview(self) -> Table:
        clients = len(self.counts)
        title = f"{clients} client{'s' if clients > 1 else ''}"
        table = Table(title=title, title_justify="left")
        for name in ("", "total", "fewest", "median", "most"):
            table.add_column(name, justify="left" if not name else "right")
        for part, sizes in self.sizes.items():
            spread = map(_format_count, _min_median_max(sizes))
            kind = " (official)" if part in self.official else ""
            table.add_row(f"{part} samples{kind}", str(int(sizes.sum())), *spread)
        if self.counts.shape[1]:
            spread = map(_format_count, _min_median_max(self.classes_per_client))
            table.add_row("classes", str(self.counts.shape[1]), *spread)
            distances = [f"{distance:.3f}" for distance in _min_median_max(self.distances)]
            table.add_row("distance from overall distribution", "", *distances)
        return table

    def _client_table(self, encoding: str) -> Table:
        table = Table()
        class_columns = ("distance", "training samples by class") if self.counts.shape[1] else ()
        owner_columns = ("owner",) if self.owners else ()
        for name in ("client", *owner_columns, *_PARTS, *class_columns):
            table.add_column(name, justify="left" if " " in name else "right")
        for row, counts in zip(self.rows(), self.counts.tolist()):
            names = ("client", *owner_columns, *_PARTS)
            cells = [escape(_shorten(escape_controls(str(row[name]), encoding))) for name in names]
            if class_columns:
                samples = " ".join(f"{c}:{n}" for c, n in enumerate(counts) if n)
                cells += [f"{row['distance']:.3f}", samples]
            table.add_row(*cells)
        return table

    def draw(self, path: Path) -> None:
        """Draw classes, sizes and distances from the overall distribution by client, as PNG."""
        classes = self.counts.shape[1]
        figure = Figure(figsize=(9, 8.5 if classes else 3.5), layout="constrained")
        if classes:
            top, middle, bottom = figure.subplots(3, 1, height_ratios=[3, 1.3, 1])
            self._draw_classes(top)
            self._draw_distances(bottom)
        else:
            middle = figure.subplots()
        self._draw_sizes(middle)
        with replace_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")

    def _draw_classes(self, axes: Axes) -> None:
        clients, classes = self.counts.shape
        if clients > _MAX_BUBBLES:
            image = axes.imshow(
                self.counts.T.log1p(), aspect="auto", cmap="cividis", origin="lower",
                interpolation="nearest",
            )  # fmt: skip
            largest = int(self.counts.max())
            ticks = [0, *(10**n for n in range(9) if 10**n < largest), largest]
            bar = axes.figure.colorbar(image, ax=axes, ticks=torch.tensor(ticks).log1p().tolist())
            bar.set_ticklabels([str(tick) for tick in ticks])
            bar.set_label("training samples")
        else:
            x, y = self.counts.nonzero(as_tuple=True)
            area = self.counts[x, y] / self.counts.max() * (2500 / max(10, clients, classes))
            axes.scatter(x, y, s=area * 6, color=_BLUE, alpha=0.8, linewidths=0)
            axes.set_xlim(-0.8, clients - 0.2)
            axes.set_ylim(-0.8, classes - 0.2)
            axes.set_title("area: training samples", loc="right", fontsize="small")
        if classes <= 20:
            axes.set_yticks(range(classes))
        _label_axes(axes, "class")

    def _draw_sizes(self, axes: Axes) -> None:
        bottom = np.zeros(len(self.counts))
        edges = np.arange(len(bottom) + 1) - 0.5
        for (part, sizes), color in zip(self.sizes.items(), (_BLUE, _ORANGE, _GREEN)):
            top = bottom + sizes.numpy()
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=part)
            bottom = top
        _label_axes(axes, "samples")
        axes.margins(x=0.01)
        axes.legend(ncols=3, frameon=False, fontsize="small", loc="upper right")
        axes.set_ylim(top=float(bottom.max()) * 1.25)

    def _draw_distances(self, axes: Axes) -> None:
        edges = np.arange(len(self.distances) + 1) - 0.5
        axes.stairs(self.distances.numpy(), edges, fill=True, color=_BLUE)
        _label_axes(axes, "distance from\noverall distribution")
        axes.set_ylim(0, 1)
        axes.margins(x=0.01)


def _label_axes(axes: Axes, quantity: str) -> None:
    axes.set(ylabel=quantity, xlabel="client")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _min_median_max(values: Tensor) -> tuple[float, float, float]:
    """Return the smallest value, the median and the largest value."""
    return float(values.min()), float(np.median(values)), float(values.max())


def _format_count(number: float) -> str:
    """Return a count as text; a median may lie halfway between two counts."""
    return f"{number:.1f}".removesuffix(".0")


def _shorten(text: str) -> str:
    """Return a text, cut and ended with an ellipsis if it is too long for a cell."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
