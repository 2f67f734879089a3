"""FedTilt's tables for the summary of all experiments."""

from experiments.experiment import read_csv
from experiments.fedtilt.figures import HERE, Compared, compare_own, compare_whole
from experiments.papers import DATA_NAMES, PaperTable

KINDS = {
    "accuracies": {"accuracy"},
    "spreads": {"accuracy_std", "class_std_mean", "class_std_std"},
}
MAIN = {
    (f"{data}/clean / FedTilt", metric): f"FedTilt, {DATA_NAMES[data]}, clean: {unit}"
    for metric, unit in (("accuracy", "accuracy, %"), ("accuracy_std", "σ"))
    for data in ("mnist", "fmnist")
}


def make_table(name: str, study: str, compared: Compared, is_cifar: bool) -> PaperTable:
    """Return a table of the summary; CIFAR-10 has one of its own.

    Args:
        name: The paper's tables, and the reading of the test.
        study: The study, ``whole`` or ``own``.
        compared: The comparisons of the study.
        is_cifar: Whether to take CIFAR-10, and nothing else.
    """
    figures = {
        (" / ".join(key), metric): figure
        for key, row in compared.items()
        for metric, figure in row.items()
        if key[0].startswith("cifar10/") == is_cifar
    }
    rows = [  # "FedAvg, 3 steps" is another test of FedAvg's runs
        row
        for row in read_csv(HERE / f"{study}.csv")
        if row["method"] != "FedAvg, 3 steps" and row["setting"].startswith("cifar10/") == is_cifar
    ]
    main = MAIN if study == "whole" and not is_cifar else {}
    command = f"experiments fedtilt/{study}"
    return PaperTable(name, "fedtilt/figures.md", command, figures, rows, main, KINDS, digits=2)


def summarize() -> list[PaperTable]:
    """Return the tables for the summary of all experiments."""
    official, own = compare_whole(), compare_own()
    tenth = "tested on 10 % of the own samples in ten groups"
    tables, cifar = "FedTilt, the same tables", "FedTilt, Table II: CIFAR-10, a tenth of the rounds"
    first = "FedTilt, Tables II, III and VII, tested on whole classes, FedAvg in two readings"
    return [
        make_table(first, "whole", official, is_cifar=False),
        make_table(f"{tables}, {tenth}, FedAvg in three readings", "own", own, is_cifar=False),
        make_table(cifar, "whole", official, is_cifar=True),
        make_table(f"{cifar}, {tenth}", "own", own, is_cifar=True),
    ]
