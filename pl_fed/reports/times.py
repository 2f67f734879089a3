"""Duration of rounds."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pl_fed.reports.group import Group
from pl_fed.reports.picture import (
    BLACK,
    BLUE,
    VERMILLION,
    Picture,
    apply_style,
    fit_scale,
    make_panels,
    name_groups,
    round_numbers,
)

_QUARTILES = (0, 25, 50, 75, 100)
_NAMES = ("shortest", "lower_quartile", "median", "upper_quartile", "longest")


def draw_round_times(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield the picture of the time per round: a box for each group with times."""
    times = [(group, seconds) for group in groups if len(seconds := _seconds(group))]
    if not times:
        return
    boxes = [(group, np.percentile(seconds, _QUARTILES)) for group, seconds in times]
    caption = (
        "Median, quartiles and range over all rounds, without evaluation. The first rounds may"
        " include compilation and the timing of engines."
    )
    alt = "; ".join(f"{group.title}: median {box[2]:.3g} s" for group, box in boxes)
    rows = [
        round_numbers(
            {"group": group.number, "label": group.label, **dict(zip(_NAMES, box.tolist()))}
        )
        for group, box in boxes
    ]
    named = [group for group, _ in boxes] if len(groups) > 1 else []
    figure = _draw(boxes, named)
    yield Picture("time", "Time per round", caption, f"Time per round. {alt}.", rows, figure)


def _seconds(group: Group) -> NDArray[np.float64]:
    return np.array([value for run in group.runs for value in run.curve("time/round").values()])


@apply_style
def _draw(boxes: Sequence[tuple[Group, NDArray[np.float64]]], named: Sequence[Group]) -> Figure:
    figure, (axes,) = make_panels(1, 2.6, named)
    statistics: list[dict[str, Any]] = [
        dict(zip(("whislo", "q1", "med", "q3", "whishi"), box.tolist())) for _, box in boxes
    ]
    axes.bxp(
        statistics, showfliers=False, widths=0.6, patch_artist=True,
        boxprops={"facecolor": BLUE, "alpha": 0.5, "lw": 0.8},
        medianprops={"color": VERMILLION, "lw": 1.6}, whiskerprops={"color": BLACK, "lw": 0.8},
    )  # fmt: skip
    axes.set_xticks(range(1, len(boxes) + 1), [str(group.number) for group, _ in boxes])
    axes.set(ylabel="seconds per round", xlabel="run" if named else "")
    fit_scale(axes, (value for _, box in boxes for value in box.tolist()))
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    name_groups(figure, named)
    return figure
