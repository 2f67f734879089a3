"""Duration of rounds."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pl_fed.reports.group import Group
from pl_fed.reports.picture import (
    WIDTH,
    Picture,
    apply_style,
    label_logarithmic,
    line_style,
    round_numbers,
)

_QUARTILES = (0, 25, 50, 75, 100)
_NAMES = ("shortest", "lower_quartile", "median", "upper_quartile", "longest")


def draw_round_times(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of the time per round, with a row for each group with times."""
    times = [(group, seconds) for group in groups if len(seconds := _seconds(group))]
    if not times:
        return
    boxes = [(group, np.percentile(seconds, _QUARTILES)) for group, seconds in times]
    caption = (
        "Median (dot), quartiles (thick) and range (thin) over all rounds, without evaluation. The"
        " first rounds may include compilation and the timing of engines."
    )
    alt = "; ".join(f"{group.title}: median {box[2]:.3g} s" for group, box in boxes)
    rows = [
        round_numbers(
            {"group": group.number, "label": group.label, **dict(zip(_NAMES, box.tolist()))}
        )
        for group, box in boxes
    ]
    figure = _draw(boxes)
    yield Picture("time", "Time per round", caption, f"Time per round. {alt}.", rows, figure)


def _seconds(group: Group) -> NDArray[np.float64]:
    times = [value for run in group.runs for value in run.curve("time/round").values()]
    return np.array([seconds for seconds in times if seconds > 0])


@apply_style
def _draw(boxes: Sequence[tuple[Group, NDArray[np.float64]]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 0.7 + 0.36 * len(boxes)), layout="constrained")
    axes = figure.subplots()
    for place, (group, (low, first, median, third, high)) in enumerate(boxes):
        color = line_style(group.number - 1)["color"]
        axes.plot([low, high], [place, place], color=color, lw=0.8)
        axes.plot([first, third], [place, place], color=color, lw=4, alpha=0.5)
        axes.plot([median], [place], "o", color=color, ms=5)
    axes.set_yticks(range(len(boxes)), [str(group.number) for group, _ in boxes])
    axes.set_ylim(len(boxes) - 0.5, -0.5)
    axes.set_xscale("log")
    label_logarithmic(axes.xaxis, [seconds for _, box in boxes for seconds in box.tolist()])
    axes.set(xlabel="seconds per round", ylabel="run" if len(boxes) > 1 else "")
    return figure
