"""FedTilt's tables for the summary of all experiments."""

from collections.abc import Callable

from experiments.experiment import Row, read_csv
from experiments.fedtilt.report import HERE, figures, own_figures, short_table
from experiments.fedtilt.run import CIFAR10_SETTINGS, NAMES, OWN_TENTH, SEEDS, SETTINGS, table_jobs
from experiments.papers import DATA_NAMES, Comparison, PaperTable

__all__ = ["short_table", "summarize"]
KINDS = {
    "accuracies": {"accuracy"},
    "spreads": {"accuracy_std", "class_std_mean", "class_std_std"},
}
MAIN = {
    (f"{data}/clean / FedTilt", metric): f"FedTilt, {DATA_NAMES[data]}, clean: {unit}"
    for metric, unit in (("accuracy", "accuracy, %"), ("accuracy_std", "σ"))
    for data in ("mnist", "fmnist")
}


def summarize() -> list[PaperTable]:
    """Return the tables for the summary of all experiments."""
    tilts = {job.key for job in table_jobs(SEEDS, SETTINGS + CIFAR10_SETTINGS)}
    whole, own = (
        {
            (" / ".join(key), name): figure
            for key, row in compared.items()
            for name, figure in row.items()
        }
        for compared in (figures(), own_figures())
    )
    rows = [row for row in read_csv(HERE / "results.csv") if not row["failed"]]

    def make(
        name: str,
        command: str,
        compared: dict[tuple[str, str], Comparison],
        uses: Callable[[Row], bool],
        is_cifar: bool,
    ) -> PaperTable:
        return PaperTable(
            name,
            "fedtilt/tables.md",
            f"experiments.fedtilt.{command}",
            {k: f for k, f in compared.items() if k[0].startswith("cifar10/") == is_cifar},
            [
                row
                for row in rows
                if uses(row) and row["setting"].startswith("cifar10/") == is_cifar
            ],
            MAIN if compared is whole and not is_cifar else {},
            KINDS,
            digits=2,
        )

    def is_whole(row: Row) -> bool:
        return tuple(row[name] for name in NAMES) in tilts

    def is_own(row: Row) -> bool:
        return row["split"] == OWN_TENTH

    tenth = "tested on 10 % of the own samples in ten groups"
    tables, cifar = "FedTilt, the same tables", "FedTilt, Table II: CIFAR-10, a tenth of the rounds"
    first = "FedTilt, Tables II, III and VII, tested on whole classes, FedAvg in two readings"
    second = f"{tables}, {tenth}, FedAvg in three readings"
    return [
        make(first, "run", whole, is_whole, False),
        make(second, "run own", own, is_own, False),
        make(cifar, "run cifar10", whole, is_whole, True),
        make(f"{cifar}, {tenth}", "run own_cifar10", own, is_own, True),
    ]
