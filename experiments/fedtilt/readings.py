"""Our runs of "own 10 %", measured as FedTilt's text may be read: which clients and which groups.

The text says neither. A run writes one row for each client with its accuracy and the standard
deviation over its two classes. Its errors are dealt at random to ten groups of its test images, so
that the same run has figures for groups as well.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.evidence import count_draws, draw_cohort
from experiments.fedtilt.noise import IMAGES, Design, measure
from experiments.fedtilt.paper import BAND, GROUP_WORDS, METRICS, Figures
from experiments.fedtilt.run import CIFAR10_SETTINGS, COMMON, OWN_TENTH, SETTINGS
from experiments.grid import Row, group_rows
from pl_fed.functional.fairness import class_std
from pl_fed.random import generator
from pl_fed.samplers import Uniform

ROUNDS = COMMON["trainer"]["max_epochs"]
NUM_CLIENTS = COMMON["data"]["num_clients"]
SAMPLER = Uniform(**COMMON["federation"]["sampler"]["init_args"])
TEN = 10
TESTED_MODELS = {  # rows of the tables → the method and the model
    "FedAvg, global w": ("FedAvg", "global"),
    "FedAvg, w_n after 10 local passes": ("FedAvg", "personal"),
    "FedAvg, w after 3 local steps": ("FedAvg", "stepped"),
    "Ditto": ("Ditto", "personal"),
    "FedTilt": ("FedTilt", "personal"),
}
Values = dict[str, list[float]]  # figure → values in %, one per seed


@dataclass(frozen=True)
class Reading:
    """Reading of the text: the tested clients, and the groups within a client.

    Args:
        last_cohort: Test the clients of the last round instead of all clients.
        groups: Number of test groups: 2 for the two classes, 10 for groups of test images.
    """

    last_cohort: bool
    groups: int

    @property
    def clients(self) -> str:
        """The tested clients in words."""
        return "last cohort" if self.last_cohort else "all clients"

    @property
    def group_words(self) -> str:
        """The test groups in words."""
        return GROUP_WORDS[self.groups]

    @property
    def name(self) -> str:
        """The reading in words."""
        return f"{self.clients}, {self.group_words}"

    def design_for(self, setting: str) -> Design:
        """Return the test of identical clients under this reading."""
        size = SAMPLER.size_of_cohort(NUM_CLIENTS) if self.last_cohort else NUM_CLIENTS
        return Design(size, IMAGES[setting.split("/")[0]], self.groups)


READINGS = (
    Reading(last_cohort=False, groups=2),
    Reading(last_cohort=False, groups=TEN),
    Reading(last_cohort=True, groups=2),
    Reading(last_cohort=True, groups=TEN),
)
TEN_GROUPS = READINGS[1]


def count_never_drawn(seed: int) -> int:
    """Return the number of clients that take part in no round of a run."""
    return int((count_draws(SAMPLER, NUM_CLIENTS, ROUNDS, seed) == 0).sum())


class ClientRun:
    """Clients of one run, as tensors of shape [clients] in the order of their ids.

    Args:
        seed: The seed of the run.
        rows: One row for each client.
    """

    def __init__(self, seed: int, rows: Iterable[Row]) -> None:
        self.seed = seed
        self.rows = sorted(rows, key=lambda row: int(row["client"]))
        self.rounds = self.column("rounds").long()
        self.test_samples = self.column("test_samples").long()

    def column(self, name: str) -> Tensor:
        """Return a column as float64."""
        return torch.tensor([float(row[name]) for row in self.rows], dtype=torch.float64)

    def accuracies(self, model: str) -> Tensor:
        """Return the accuracy of each client, in [0, 1]."""
        return self.column(f"{model}_accuracy")

    def stds(self, model: str, groups: int) -> Tensor:
        """Return the standard deviation over the test groups of each client, in [0, 1]."""
        if groups == 2:
            return self.column(f"{model}_class_std")
        accuracies = self.accuracies(model)
        errors = ((1 - accuracies) * self.test_samples).round().long()
        return deal_errors(errors, self.test_samples, groups, self.seed)

    def figures(self, model: str, reading: Reading) -> Tensor:
        """Return the four figures of a model, in %, shape [4]."""
        accuracies, stds = self.accuracies(model), self.stds(model, reading.groups)
        if reading.last_cohort:
            cohort = draw_cohort(SAMPLER, NUM_CLIENTS, ROUNDS - 1, self.seed)
            accuracies, stds = accuracies[cohort], stds[cohort]
        return measure(accuracies, stds)


def deal_errors(errors: Tensor, test_samples: Tensor, groups: int, seed: int) -> Tensor:
    """Deal each client's errors at random into groups of its test images.

    The draw is keyed by the seed and the client, so that two models with equal errors have equal
    spreads. Sizes of groups differ by at most one image.

    Args:
        errors: Number of errors of each client, int64 [clients].
        test_samples: Number of test images of each client, at least ``groups``, int64 [clients].
        groups: Number of test groups.
        seed: The seed of the run.

    Returns:
        Population standard deviation of the accuracies of a client's groups, float64 [clients].
    """
    correct, count = [], []
    for client, (wrong, size) in enumerate(zip(errors.tolist(), test_samples.tolist())):
        group_of = _shuffle_groups(size, groups, seed, client)
        correct.append(torch.bincount(group_of[wrong:], minlength=groups))
        count.append(torch.bincount(group_of, minlength=groups))
    return class_std(torch.stack(correct), torch.stack(count))


@functools.cache
def _shuffle_groups(size: int, groups: int, seed: int, client: int) -> Tensor:
    """Return the group of each test image in random order; the first images are the errors."""
    order = torch.randperm(size, generator=generator(seed, "test groups", client, size))
    return order.remainder(groups)


class ClientResults:
    """Runs with a row for each client, by setting, method and seed.

    Args:
        rows: The rows of clients.csv.
        split: The data split of the runs.
    """

    def __init__(self, rows: Iterable[Row], split: str = OWN_TENTH) -> None:
        selected = (row for row in rows if row["split"] == split)
        self.runs: dict[tuple[str, str], dict[int, ClientRun]] = {}
        groups = sorted(group_rows(selected, "setting", "method", "seed"), key=_place)
        for (setting, method, seed), clients in groups:
            run = ClientRun(int(seed), clients)
            self.runs.setdefault((setting, method), {})[run.seed] = run

    @property
    def settings(self) -> list[str]:
        """The settings with runs."""
        return list(dict.fromkeys(setting for setting, _ in self.runs))

    @property
    def seeds(self) -> list[int]:
        """The seeds with runs."""
        return sorted({seed for runs in self.runs.values() for seed in runs})

    def select(self, setting: str, method: str) -> list[ClientRun]:
        """Return the runs of a method, one per seed."""
        return list(self.runs.get((setting, method), {}).values())

    def values(self, setting: str, row: str, reading: Reading) -> Values:
        """Return the values over seeds of a row of ``TESTED_MODELS``; empty without runs."""
        method, model = TESTED_MODELS[row]
        runs = self.select(setting, method)
        if not runs:
            return {}
        table = torch.stack([run.figures(model, reading) for run in runs])
        return dict(zip(METRICS, table.T.tolist()))

    def pairs(self, setting: str, first: str, second: str) -> Iterator[tuple[ClientRun, ClientRun]]:
        """Yield the runs of two methods with equal seeds."""
        others = self.runs.get((setting, second), {})
        for seed, run in self.runs.get((setting, first), {}).items():
            if seed in others:
                yield run, others[seed]


def _place(group: tuple[tuple[str, ...], list[Row]]) -> tuple[int, int]:
    """Return the place of a run in the tables: in the order of the settings, then of the seeds."""
    setting, _, seed = group[0]
    return [*SETTINGS, *CIFAR10_SETTINGS].index(setting), int(seed)


def rate_cohorts_in_band(
    run: ClientRun, published: Figures, band: float = BAND, draws: int = 1000
) -> float:
    """Return the share of random cohorts with all four figures in the band, for personal models."""
    drawn = draw_cohort_figures(run, draws)
    paper = torch.tensor([getattr(published, metric) for metric in METRICS], dtype=torch.float64)
    return float(((drawn - paper).abs() <= band).all(1).double().mean())


def draw_cohort_figures(run: ClientRun, draws: int) -> Tensor:
    """Return figures of the personal models of random cohorts, [draws, 4], with ten groups.

    Clients that never took part are not drawn.
    """
    trained = run.rounds.nonzero().flatten()
    draw = generator(run.seed, "cohorts of the report")
    places = torch.rand(draws, len(trained), generator=draw).argsort(1)
    cohorts = trained[places[:, : SAMPLER.size_of_cohort(NUM_CLIENTS)]]
    return measure(run.accuracies("personal")[cohorts], run.stds("personal", TEN)[cohorts])


def measure_cohort_noise(runs: Iterable[ClientRun], draws: int = 1000) -> dict[str, float]:
    """Return the difference of two cohorts of one run that 95 % of pairs stay below, by figure.

    Both cohorts are tested with the same personal models of the same run, so that the difference is
    due to the draw of ten clients alone.
    """
    halves = []
    for run in runs:
        drawn = draw_cohort_figures(run, 2 * draws)
        halves.append((drawn[:draws] - drawn[draws:]).abs())
    quantiles = torch.cat(halves).quantile(0.95, dim=0)
    return dict(zip(METRICS, quantiles.tolist()))
