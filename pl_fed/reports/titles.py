"""Titles of metrics in the summary of a fit and in reports."""

from collections.abc import Collection

from pl_fed.functional.client_figures import split_figure
from pl_fed.reports.group import task_metrics

RESULTS = {  # titles of the metrics in a fit's summary and in a report
    "accuracy": "mean over clients",
    "accuracy_std": "spread over clients (std)",
    "accuracy_worst10": "worst 10 % of clients",
    "accuracy_best10": "best 10 % of clients",
    "accuracy_weighted": "over all samples",
    "accuracy_trained": "mean over trained clients",
    "accuracy_trained_std": "std over trained clients",
    "accuracy_trained_worst10": "worst 10 % of trained clients",
    "loss": "loss",
    "backdoor_success": "backdoor success rate",
    "backdoor_success_worst10": "backdoor success rate, worst 10 % of clients",
    "backdoor_success_max": "backdoor success rate, worst client",
}

GROUP_RESULTS = {
    "group/demographic_parity": "demographic parity gap of groups",
    "group/equalized_odds": "equalized odds gap of groups",
    "group/accuracy_gap": "accuracy gap of groups",
    "group/accuracy_worst": "accuracy of the worst group",
}
"""Titles of the gaps between groups over the samples of all clients."""

_KNOWN = (*RESULTS, "class_std_mean", "class_std_std")
_ENDINGS = (
    *("_weighted", "_std", "_var", "_worst10", "_best10", "_jain"),
    *("_trained", "_trained_std", "_trained_worst10", "_undefined"),
)


def result_titles(names: Collection[str], first: str | None = None) -> dict[str, str]:
    """Return the metrics of a summary or a report, with their titles.

    Args:
        names: The available metrics, without the part of the data and the model.
        first: Without accuracy, the metric to show with its spread, worst and best clients;
            ``None`` takes the alphabetically first metric of the task.

    Example:
        >>> list(result_titles(["mae", "mae_std", "mae_worst10", "loss"]))
        ['mae', 'mae_std', 'mae_worst10', 'loss']
        >>> result_titles(["f1", "f1_weighted", "f1_worst10"])["f1_weighted"]
        'f1, mean over clients weighted by samples'
    """
    metrics = task_metrics(names)
    main = first if first in metrics else next(iter(metrics), "loss")
    accuracies = {name: title for name, title in RESULTS.items() if name.startswith("accuracy")}
    remaining = {name: title for name, title in RESULTS.items() if not name.startswith("accuracy")}
    statistics = {}
    if "accuracy" not in names and f"{main}_worst10" in names:
        statistics = {
            name.replace("accuracy", main): f"{main}, {title}" for name, title in accuracies.items()
        }
        # The F1 score over all samples, for example, is no mean over clients.
        statistics[f"{main}_weighted"] = f"{main}, mean over clients weighted by samples"
    means = {}
    for name in metrics:
        means[name] = f"{name}, mean over clients"
        if "accuracy" in names:
            means[f"{name}_worst10"] = f"{name}, worst 10 % of clients"
    own = {name: name for name in find_own_statistics(names)}
    figures = _find_figures(names, "accuracy" if "accuracy" in names else main)
    gaps = {**GROUP_RESULTS, **remaining}
    titles = {**accuracies, **statistics, **figures, **means, **gaps, **statistics, **own}
    return {name: title for name, title in titles.items() if name in names}


def _find_figures(names: Collection[str], main: str) -> dict[str, str]:
    """Return the titles of the further statistics of the main metric and of the loss."""
    titles = {}
    for metric in dict.fromkeys((main, "loss")):
        for name in sorted(names):
            parts = split_figure(name)
            if parts is not None and parts[0] == metric and name not in RESULTS:
                prefix = "" if metric == main == "accuracy" else f"{metric}, "
                titles[name] = prefix + parts[1].title
    return titles


def find_own_statistics(names: Collection[str]) -> list[str]:
    """Return the numbers that a user logs for a model, as ``test/personal/gini``, in order.

    Args:
        names: The available metrics, without the part of the data and the model.

    Example:
        >>> find_own_statistics(["mae", "mae_std", "mae_worst10", "gini", "loss", "loss_var"])
        ['gini']
    """
    return sorted(name for name in names if not _is_statistic(name, names))


def _is_statistic(name: str, names: Collection[str]) -> bool:
    """Return whether pl_fed itself computes a number: a metric, or its statistic over clients."""
    if name.startswith("group/"):
        return True
    bases = [name, *(name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending))]
    if (parts := split_figure(name)) is not None:
        bases.append(parts[0])
    metrics = {*_KNOWN, *(base for base in bases if any(base + e in names for e in _ENDINGS))}
    return any(base in metrics for base in bases)
