"""FedTilt's published figures: accuracy and three spreads of a row of Tables II, III and VII."""

from dataclasses import dataclass
from pathlib import Path

from experiments.grid import Row, read
from experiments.tables import DATA_NAMES

FILE = Path(__file__).parent / "paper.csv"
BAND = 2.0  # points: largest difference that counts as agreement, for all four figures
METRICS = {
    "accuracy": "accuracy, %",
    "accuracy_std": "σ over clients",
    "class_std_mean": "μ_σ over classes",
    "class_std_std": "σ_σ over classes",
}
SPREADS = [metric for metric in METRICS if metric != "accuracy"]
GROUP_WORDS = {2: "two classes", 10: "ten groups"}  # test groups of a client
CONDITION_WORDS = {
    "clean": "clean",
    "corruption": "random corruptions",
    "gaussian": "Gaussian noise",
}


@dataclass(frozen=True)
class Figures:
    """Figures of a federation's test, in %.

    Args:
        accuracy: Mean of the clients' accuracies.
        accuracy_std: σ, the standard deviation of the clients' accuracies.
        class_std_mean: μ_σ. A client's standard deviation is over its test groups, for example its
            classes; this is the mean over clients.
        class_std_std: σ_σ, the standard deviation over clients of that standard deviation.
    """

    accuracy: float
    accuracy_std: float
    class_std_mean: float
    class_std_std: float

    @classmethod
    def from_row(cls, row: Row) -> "Figures":
        """Return the figures of a row of the paper."""
        return cls(**{metric: float(row[metric]) for metric in METRICS})


def read_all_rows() -> list[Row]:
    """Return the paper's 27 rows, also those of settings that are not run."""
    return read(FILE)


def describe(setting: str) -> str:
    """Return a setting in words."""
    data, condition = setting.split("/")
    return f"{DATA_NAMES[data]}, {CONDITION_WORDS[condition]}"
