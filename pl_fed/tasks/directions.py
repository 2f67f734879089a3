"""Directions of metrics: whether larger or smaller values are better, or nobody knows."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

_LOWER = {"loss", "error", "nll", "mse", "rmse", "mae", "mape", "perplexity"}
_HIGHER = {"acc", "accuracy", "f1", "auroc"}
_DOUBTS = {
    *("neg", "negative", "minus", "inv", "inverse", "no", "non", "without", "reciprocal"),
    *("attack", "attacker", "adversary", "adversarial", "backdoor", "poison", "trigger"),
    *("mia", "membership", "leak", "leakage", "discriminator", "disc", "critic"),
    *("drop", "gap", "diff", "difference", "delta", "change", "std", "var", "variance", "spread"),
    *("forget", "forgetting", "unlearn", "unlearning", "fool", "fooling", "miss", "win"),
    *("random", "chance", "d", "g", "generator", "gen", "real", "fake"),
}
_TOKEN = re.compile(r"[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*(?![a-z])|[0-9]+")


@dataclass(frozen=True)
class Directions:
    """Directions: the metrics with declared directions, as names or patterns such as ``*_kl``.

    Attributes:
        lower_is_better: Metrics with small values for good models.
        higher_is_better: Metrics with large values for good models.

    Example:
        >>> directions = Directions(lower_is_better=("s*e", "crps"))
        >>> directions.find("smape"), directions.find("val_crps"), directions.find("fid")
        (False, None, None)
    """

    lower_is_better: Sequence[str] = ()
    higher_is_better: Sequence[str] = ()

    def find(self, *names: str) -> bool | None:
        """Return whether larger values are better, for one of the names; ``None`` if undeclared.

        Args:
            names: The names of one metric: without its stage, and as logged.

        Raises:
            ValueError: If the metric has both directions.
        """
        lower = _matches(self.lower_is_better, names)
        higher = _matches(self.higher_is_better, names)
        if lower and higher:
            raise ValueError(
                "Expected arguments `federation.lower_is_better` and"
                f" `federation.higher_is_better` to name different metrics but got {names[0]!r} in"
                " both: remove it from one."
            )
        return higher if lower or higher else None

    def check(self, names: Collection[str]) -> None:
        """Refuse a name or pattern that fits no metric.

        Args:
            names: The names of all metrics, without their stage and as logged.

        Raises:
            ValueError: If a name or pattern fits none of them.
        """
        for argument in ("lower_is_better", "higher_is_better"):
            for pattern in getattr(self, argument):
                if not _matches([pattern], names):
                    raise ValueError(
                        f"Expected argument `federation.{argument}` to have names or patterns of"
                        f" metrics ({', '.join(sorted(names)) or 'none'}) but got {pattern!r}."
                    )


def guess_direction(name: str) -> bool | None:
    """Return whether larger values are better, if the last word of a name leaves no doubt.

    Smaller is better for loss, error, nll, mse, rmse, mae, mape and perplexity. Larger is better
    for acc, accuracy, f1 and auroc. A word such as negative or attack makes any name doubtful.

    Example:
        >>> guess_direction("recon_error"), guess_direction("valMAE"), guess_direction("acc")
        (False, False, True)
        >>> guess_direction("smape"), guess_direction("neg_mse"), guess_direction("mse_skill")
        (None, None, None)
    """
    words = [word.lower() for word in _TOKEN.findall(name)]
    if not words or _DOUBTS & set(words) or words[0] == "1":  # as in 1-acc
        return None
    if words[-1] in _LOWER:
        return False
    return True if words[-1] in _HIGHER else None


def metric_direction(metric: Any) -> bool | None:
    """Return whether larger values of a metric of torchmetrics are better; ``None`` if unknown.

    A wrapper without a direction has that of the metric that it wraps.

    Args:
        metric: The metric.

    Example:
        >>> from torchmetrics import MeanMetric, MeanSquaredError, MinMaxMetric
        >>> metric_direction(MeanSquaredError()), metric_direction(MeanMetric())
        (False, None)
    """
    if metric.higher_is_better is not None:
        return bool(metric.higher_is_better)
    if isinstance(metric, WrapperMetric):
        for name in ("_base_metric", "base_metric", "metric"):
            if isinstance(inner := getattr(metric, name, None), Metric):
                return metric_direction(inner)
    return None


def describe_directions(directions: Mapping[str, bool | None]) -> str:
    """Return a sentence with each metric and its direction.

    Example:
        >>> describe_directions({"mae": False, "acc": True})
        'Metrics: mae (lower is better), acc (higher is better).'
    """
    words = {True: "higher is better", False: "lower is better", None: "direction unknown"}
    text = ", ".join(f"{name} ({words[higher]})" for name, higher in directions.items())
    unknown = [name for name, higher in directions.items() if higher is None]
    remedy = ""
    if unknown:
        remedy = (
            " A metric of unknown direction has no worst and best clients, and chooses no model:"
            " declare it by `federation.lower_is_better` or `federation.higher_is_better`."
        )
    return f"Metrics: {text}.{remedy}"


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    names = tuple(names)
    return any(name == p or fnmatchcase(name, p) for p in patterns for name in names)
