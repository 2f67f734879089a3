"""Names of figures over clients that runs report on demand: ``gini``, ``gap``, ``worst5``, ``q25``.

``federation.statistics`` names them. Each is a number of all clients' values of a metric, and its
name in a run's files is that of the metric with this ending: ``test/personal/accuracy_gini``.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pl_fed.functional.inequality import (
    Values,
    equality_angle,
    gini_coefficient,
    largest_gap,
    pielou_evenness,
    quantile,
    share_entropy,
    tail_mean,
    uniform_divergence,
    variation_coefficient,
)

_INEQUALITIES: dict[str, tuple[Callable[[Values], float], str, bool]] = {
    # name: function, title, whether larger numbers are better
    "gini": (gini_coefficient, "Gini coefficient", False),
    "cv": (variation_coefficient, "coefficient of variation", False),
    "entropy": (share_entropy, "entropy of clients' shares", True),
    "normalized_entropy": (pielou_evenness, "entropy of clients' shares / ln n", True),
    "kl": (uniform_divergence, "divergence of clients' shares from 1/n", False),
    "angle": (equality_angle, "angle to equal clients (degrees)", False),
    "gap": (largest_gap, "largest minus smallest", False),
}
_TAILS = {"worst": "worst {} % of clients", "best": "best {} % of clients"}
_QUANTILE = "q"
_PERCENTAGE = r"(?:worst|best|q)(?:0|[1-9]\d*)"
_ENDING = re.compile(rf"(.+?)_({'|'.join(_INEQUALITIES)}|{_PERCENTAGE})")
FIGURE_NAMES = f"{', '.join(_INEQUALITIES)}, worst<k>, best<k> or q<k>"
"""The names of all figures, for messages; k is a percentage."""


@dataclass(frozen=True)
class ClientFigure:
    """Client figure: a number of all clients' values of a metric.

    Attributes:
        name: Its name, the ending of a metric's name behind an underscore.
        title: A title for tables.
        higher_is_better: Whether larger numbers are better; ``None`` if that depends on the metric.
        is_ranked: Whether it needs the direction of the metric, to find the worst clients.

    Example:
        >>> import numpy as np
        >>> figure = find_figure("worst50")
        >>> figure.title, figure.compute(np.array([0.5, 1.0]), higher_is_better=True)
        ('worst 50 % of clients', 0.5)
    """

    name: str
    title: str
    higher_is_better: bool | None
    is_ranked: bool = False

    def compute(self, values: Values, higher_is_better: bool | None) -> float:
        """Return the figure; NaN if it is undefined.

        Args:
            values: One value for each client, [clients].
            higher_is_better: Whether larger values of the metric are better. A ranked figure needs
                it; others ignore it.
        """
        if self.name in _INEQUALITIES:
            return _INEQUALITIES[self.name][0](values)
        kind, percent = _split_percent(self.name)
        if kind == _QUANTILE:
            return quantile(values, percent)
        return tail_mean(values, percent, largest=(kind == "best") == higher_is_better)


def find_figure(name: str) -> ClientFigure | None:
    """Return the figure of a name; ``None`` if there is none.

    Example:
        >>> find_figure("q5").title, find_figure("q101"), find_figure("worst0")
        ('5 % quantile', None, None)
    """
    if name in _INEQUALITIES:
        _, title, higher_is_better = _INEQUALITIES[name]
        return ClientFigure(name, title, higher_is_better)
    if not re.fullmatch(_PERCENTAGE, name):
        return None
    kind, percent = _split_percent(name)
    if percent > 100 or (percent == 0 and kind != _QUANTILE):
        return None
    if kind == _QUANTILE:
        return ClientFigure(name, f"{percent} % quantile", None)
    return ClientFigure(name, _TAILS[kind].format(percent), None, is_ranked=True)


def split_figure(name: str) -> tuple[str, ClientFigure] | None:
    """Return the metric and the figure in the name of a number; ``None`` if it is no figure.

    Args:
        name: The name of a number without the part of the data and the model.

    Example:
        >>> base, figure = split_figure("accuracy_normalized_entropy")
        >>> base, figure.name
        ('accuracy', 'normalized_entropy')
    """
    match = _ENDING.fullmatch(name)
    if match is None:
        return None
    figure = find_figure(match[2])
    return None if figure is None else (match[1], figure)


def read_figures(names: Sequence[str] | None) -> tuple[ClientFigure, ...]:
    """Return the figures that ``federation.statistics`` names, without repetition.

    Raises:
        TypeError: If the argument is no list of texts.
        ValueError: If a name is that of no figure.
    """
    is_list = names is None or isinstance(names, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in names or ()):
        raise TypeError(
            "Expected argument `federation.statistics` to be a list of names but got"
            f" {names!r}: write, for example, [gini, worst5]."
        )
    figures = []
    for name in dict.fromkeys(names or ()):
        figure = find_figure(name)
        if figure is None:
            raise ValueError(
                f"Expected argument `federation.statistics` to hold {FIGURE_NAMES}, with a"
                f" percentage k, but got {name!r}: write, for example, [gini, worst5]."
            )
        figures.append(figure)
    return tuple(figures)


def _split_percent(name: str) -> tuple[str, int]:
    """Return the letters and the number of a name such as ``worst5``."""
    kind = name.rstrip("0123456789")
    return kind, int(name[len(kind) :])
