"""FedTilt's toy example: two clients, two classes, three experiments (section IV-A and Table IV).

python experiments/fedtilt_toy/toy.py

Federated logistic regression on points of Gaussian distributions, with both clients in each round
and q = 0. Writes table.md and boundaries.png beside this file in a minute on one CPU core.

The paper gives the distributions, the numbers of samples and some of the tilts. Our choices for the
rest are: 50 rounds of one local epoch, minibatches of 10, learning rate 0.1, mu 0.01, zero initial
weights, tau = 100 in the third experiment and lam = 1 in the second. The paper's 20 to 30 test
samples say little, so accuracies are also measured on 10,000 new points of each class. The third
experiment's outliers have noise of deviation 0.15 on points of deviation 1, and hardly differ from
other points; noise of deviation 5 is also tried. The effect of outliers is the share of a class's
points that they classify otherwise, for the class with the larger share.
"""

import logging
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

import pl_fed
from pl_fed.clients import FedTilt
from pl_fed.data import FederatedData
from pl_fed.data.source import TEST, TRAIN, Arrays, DataSource
from pl_fed.models import LogisticRegression
from pl_fed.samplers import All

HERE = Path(__file__).parent
POINT_COLOURS = ("#56B4E9", "#E69F00")  # of both classes
LINE_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7")  # of the tilts
CENTRES = {  # by experiment, client and class: centre and standard deviation
    1: [[(0.5, 2.0, 0.5), (2.5, 1.0, 0.5)], [(1.0, 2.2, 0.5), (2.2, 0.8, 0.5)]],
    2: [[(0.5, 2.0, 0.35), (2.0, 1.0, 0.25)], [(0.5, 2.0, 0.35), (2.5, 1.8, 0.25)]],
    3: [[(1.0, 2.0, 1.0), (2.5, 1.0, 0.3)], [(1.0, 2.0, 1.0), (2.5, 1.0, 0.3)]],
}
SAMPLES = {1: [(100, 20), (100, 20)], 2: [(150, 30), (50, 10)], 3: [(150, 30), (50, 10)]}
TILTS = {  # tau and lam
    1: [(0.0, 0.0), (1.0, 1.0)],
    2: [(0.0, 0.0), (100.0, 1.0), (-100.0, 1.0)],
    3: [(0.0, 0.0), (100.0, 0.0), (100.0, -1.0), (100.0, -100.0), (100.0, 100.0)],
}
PAPER, FAR = 0.15, 5.0  # standard deviation of the outliers' noise
OUTLIERS = 0.1  # share of the samples of class 1


class Toy(DataSource):
    """The points of one experiment.

    Args:
        experiment: 1, 2 or 3.
        noise: Standard deviation of the noise on a tenth of class 1's training points.
        seed: Seed of the draws.
    """

    def __init__(self, experiment: int, noise: float, seed: int) -> None:
        self.experiment, self.noise, self.seed = experiment, noise, seed

    def load(self) -> Arrays:
        """Draw the points; they differ only in the noise between values of ``noise``."""
        draw = torch.Generator().manual_seed(self.seed)
        pieces, rows = [], []
        for client, distributions in enumerate(CENTRES[self.experiment]):
            for label, distribution in enumerate(distributions):
                for part, n in zip((TRAIN, TEST), SAMPLES[self.experiment][label], strict=True):
                    x, far = points(distribution, n, draw), torch.randn(n, 2, generator=draw)
                    if label == 0 and part == TRAIN:
                        few = int(OUTLIERS * n)
                        x[:few] += self.noise * far[:few]
                    pieces.append(x)
                    rows += [(label, client, part)] * n
        y, owner, split = torch.tensor(rows).T
        return Arrays(torch.cat(pieces), y, owner, split, num_classes=2)


def points(distribution: tuple[float, float, float], n: int, draw: torch.Generator) -> Tensor:
    """Draw n points around a centre."""
    *centre, deviation = distribution
    return torch.tensor(centre) + deviation * torch.randn(n, 2, generator=draw)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        boundaries: For each client (a, b, c) of its boundary a x + b y = c, a² + b² = 1; class 2 is
            where the left side is larger, [clients, 3].
        accuracy: Accuracy on each client's test samples, [clients].
        by_class: Accuracy on the test samples of each class, [clients, classes].
        decisions: Predicted classes of the points of ``many``, [clients, classes, points].
    """

    boundaries: Tensor
    accuracy: Tensor
    by_class: Tensor
    decisions: Tensor

    @property
    def by_class_of_many(self) -> Tensor:
        """Accuracy over the many points of each class, [clients, classes]."""
        return (self.decisions == torch.arange(2)[:, None]).double().mean(-1)

    def share_moved_from(self, other: "Outcome") -> Tensor:
        """Share of points that are classified otherwise, of the class with most, [clients]."""
        return (self.decisions != other.decisions).double().mean(-1).amax(-1)


@cache
def run(
    experiment: int, tau: float, lam: float, noise: float = 0.0, rounds: int = 50, seed: int = 0
) -> Outcome:
    """Train both clients' personal models with FedTilt."""
    net = LogisticRegression(in_features=2, num_classes=2)
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    client = FedTilt(net, tau, lam, mu=0.01, optimizer=partial(torch.optim.SGD, lr=0.1))
    data = FederatedData(
        Toy(experiment, noise, seed), batch_size=10, split="official", val_fraction=0.0,
        test_fraction=0.0, seed=seed,
    )  # fmt: skip
    federation = pl_fed.Federation(All(), engine=pl_fed.EngineOptions("stacked"), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl_fed.Trainer(
            federation, default_root_dir=folder, max_epochs=rounds, accelerator="cpu",
            precision="64-true", enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(client, data)
        trainer.test(client, data, verbose=False)
    metrics = federation.metrics("test")["personal"]
    by_class = metrics.correct / metrics.count
    weights, bias = federation.store.read("personal", torch.arange(2)).split((4, 2), dim=1)
    normal = weights.view(2, 2, 2).diff(dim=1)[:, 0]
    lines = torch.cat([normal, -bias.diff(dim=1)], 1) / normal.norm(dim=1, keepdim=True)
    x = many(experiment).double()
    decisions = (torch.einsum("ckpi,ci->ckp", x, lines[:, :2]) > lines[:, 2, None, None]).long()
    accuracy = metrics.correct.sum(1) / metrics.count.sum(1)
    return Outcome(lines, accuracy, by_class, decisions)


def many(experiment: int) -> Tensor:
    """Draw 10,000 points of each class for each client, [clients, classes, points, 2]."""
    draw = torch.Generator().manual_seed(12345)
    distributions = CENTRES[experiment]
    return torch.stack(
        [torch.stack([points(d, 10_000, draw) for d in own]) for own in distributions]
    )


def table() -> str:
    """Return all runs as a table."""
    lines = [
        "# FedTilt's toy example: all runs",
        "",
        "Written by `python experiments/fedtilt_toy/toy.py`, which describes the setting.",
        "Accuracies of personal models: on the client's test samples (all, class 1, class 2), and",
        "on 10,000 new points of each class.",
        "",
        "| experiment | τ | λ | client | boundary | test | class 1 | class 2 | class 1 of many"
        " | class 2 of many | moved by outliers 0.15 | by outliers 5 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for experiment, tilts in TILTS.items():
        for tilt in tilts:
            noise = PAPER if experiment == 3 else 0.0
            outcome = run(experiment, *tilt, noise)
            for k in range(2):
                a, b, c = outcome.boundaries[k].tolist()
                numbers = [outcome.accuracy[k], *outcome.by_class[k], *outcome.by_class_of_many[k]]
                cells = [f"{float(number):.3f}" for number in numbers]
                clean = run(experiment, *tilt)
                cells += [
                    f"{float(run(experiment, *tilt, distance).share_moved_from(clean)[k]):.3f}"
                    if experiment == 3
                    else ""
                    for distance in (PAPER, FAR)
                ]
                boundary = f"{a:+.2f} x {b:+.2f} y = {c:+.2f}"
                setting = f"| {experiment} | {tilt[0]:g} | {tilt[1]:g} | {k + 1} | {boundary} | "
                lines.append(setting + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(path: Path) -> None:
    """Draw the training samples and the boundaries."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(1, 0.0), (2, 0.0), (3, PAPER), (3, FAR)]
    figure, axes = pyplot.subplots(2, 4, figsize=(15, 8.6), layout="constrained")
    for column, (experiment, noise) in enumerate(columns):
        arrays = Toy(experiment, noise, seed=0).load()
        for k in range(2):
            axis = axes[k, column]
            for label, colour in enumerate(POINT_COLOURS):
                x = arrays.inputs[
                    (arrays.client == k) & (arrays.targets == label) & (arrays.split == TRAIN)
                ]
                few = int(OUTLIERS * len(x)) if experiment == 3 and label == 0 else 0
                axis.scatter(*x[few:].T, s=9, color=colour, alpha=0.6, label=f"class {label + 1}")
                if few:
                    axis.scatter(*x[:few].T, s=22, marker="x", color="black", label="outliers")
            for number, tilt in enumerate(TILTS[experiment]):
                a, b, c = run(experiment, *tilt, noise).boundaries[k].tolist()
                ends = [(c * a - b * t, c * b + a * t) for t in (-60, 60)]
                name = f"τ = {tilt[0]:g}, λ = {tilt[1]:g}"
                axis.plot(*zip(*ends), color=LINE_COLOURS[number], lw=1.8, label=name)
            axis.set(xlim=(-2.5, 4.5), ylim=(-1.5, 5.5), aspect="equal")
            axis.set_title(
                f"experiment {experiment}, client {k + 1}"
                + (f", outliers of {noise:g}" if noise else "")
            )
        axis.legend(
            fontsize=9.5, ncols=2, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.07)
        )
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> None:
    """Run everything, and write the table and the figure."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    text = table()
    (HERE / "table.md").write_text(text)
    draw(HERE / "boundaries.png")
    print(text)


if __name__ == "__main__":
    main()
