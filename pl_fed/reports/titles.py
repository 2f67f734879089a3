"""Titles of metrics in the summary of a fit and in reports."""

from collections.abc import Collection

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
}


def result_titles(names: Collection[str], first: str | None = None) -> dict[str, str]:
    """Return the metrics of a summary or a report, with their titles.

    Args:
        names: The available metrics, without the part of the data and the model.
        first: Without accuracy, the metric to show with its spread, worst and best clients;
            ``None`` takes the alphabetically first metric of the task.

    Example:
        >>> list(result_titles(["mae", "mae_std", "mae_worst10", "loss"]))
        ['mae', 'mae_std', 'mae_worst10', 'loss']
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
    means = {}
    for name in metrics:
        means[name] = f"{name}, mean over clients"
        if "accuracy" in names:
            means[f"{name}_worst10"] = f"{name}, worst 10 % of clients"
    titles = {**accuracies, **statistics, **means, **remaining, **statistics}
    return {name: title for name, title in titles.items() if name in names}
