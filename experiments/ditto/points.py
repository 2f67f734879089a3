"""Ditto's Figures 1 and 2: federated point estimation, by closed forms and by trained models.

python -m experiments.ditto.points

Device k has v_k ~ N(θ, τ²), a malicious one N(θ, τ_a²), and ŵ_k, the mean of n observations with
noise σ. Ditto's models are v_k(λ) = (ŵ_k + λ w) / (1 + λ), with w the mean of all ŵ_j. Errors are
linear in the random draws, so their covariances and all curves are exact. The markers are models
that :class:`pl_fed.clients.Ditto` trained on 2,000 problems, joined as coordinates of one problem.
"""

import logging
import math
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import pl_fed
from experiments.papers import COLOURS, markdown
from pl_fed.clients import Ditto
from pl_fed.data import Arrays, DataSource, FederatedData
from pl_fed.samplers import All

HERE = Path(__file__).parent / "points"
PROBLEMS, ROUNDS, STEPS, SHARE = 2000, 6, 6, 0.9  # a step leaves a tenth of the way


@dataclass(frozen=True)
class Setting:
    """K devices, K_a of them malicious, of spreads τ and τ_a; noise σ on n observations."""

    devices: int
    malicious: int
    sigma: float
    samples: int
    tau: float
    tau_a: float = 0.0

    @property
    def best(self) -> float:
        """λ* of Theorems 6 and 8."""
        excess = self.malicious / (self.devices - 1) * (self.tau_a**2 - self.tau**2)
        spread = self.devices * self.tau**2 + (excess if self.malicious else 0.0)
        return self.sigma**2 / self.samples * self.devices / spread

    @property
    def benign(self) -> int:
        """Number of benign devices; they come first."""
        return self.devices - self.malicious

    def errors(self, lam: float) -> tuple[float, float]:
        """Return mean and standard deviation over benign devices of (v_k(λ) − v_k)², exactly.

        The second is the root of the mean, over problems, of the variance over devices.
        """
        k, pull = self.devices, 1.0 if math.isinf(lam) else lam / (1 + lam)
        eye, mean = (
            torch.eye(k, dtype=torch.float64),
            torch.full((k, k), 1 / k, dtype=torch.float64),
        )
        of_noise = (1 - pull) * eye + pull * mean  # v_k(λ), of all ŵ_j
        of_truth = of_noise - eye
        spread = torch.full((k,), self.tau**2, dtype=torch.float64)
        spread[self.benign :] = self.tau_a**2
        noise = self.sigma**2 / self.samples
        covariance = of_truth @ spread.diag() @ of_truth.T + noise * of_noise @ of_noise.T
        own = covariance[: self.benign, : self.benign]
        square = own.diagonal()
        variance = 0.0
        if self.benign > 1:  # of squares of normal numbers with covariance c: 2 c²
            others = (own.square().sum() - square.square().sum()) / (len(own) - 1)
            variance = float(2 * (square.square().sum() - others) / len(own))
        return float(square.mean()), variance**0.5


class Points(DataSource):
    """Observations of the devices' parameters, many problems side by side."""

    def __init__(self, setting: Setting, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=draw, dtype=torch.float64)
        spread = torch.full((setting.devices, 1), setting.tau, dtype=torch.float64)
        spread[setting.benign :] = setting.tau_a
        self.truth = 3 * normal(PROBLEMS) + spread * normal(setting.devices, PROBLEMS)
        self.owner = torch.arange(setting.devices).repeat_interleave(setting.samples)
        self.y = self.truth[self.owner] + setting.sigma * normal(len(self.owner), PROBLEMS)

    def load(self) -> Arrays:
        """Return them."""
        return Arrays(torch.zeros(len(self.y), 1, dtype=torch.float64), self.y, self.owner)


class Point(nn.Module):
    """Net that returns its parameter for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(PROBLEMS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the parameter for each sample."""
        return self.value.expand(len(x), -1)


class HalfSquares(nn.Module):
    """½ ‖output − target‖²."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, of each sample or their mean."""
        losses = (outputs - targets).square().flatten(1).sum(1) / 2
        return losses.mean() if self.reduction == "mean" else losses


def measure_errors(setting: Setting, lam: float) -> tuple[float, float]:
    """Return the same errors as :meth:`Setting.errors`, measured on trained models."""
    points = Points(setting)
    client = Ditto(
        Point(),
        lam=lam,
        personal_lr=SHARE / (1 + lam),
        optimizer=partial(torch.optim.SGD, lr=SHARE),
        criterion=HalfSquares(),
        local_steps=STEPS,
    )
    data = FederatedData(
        points, batch_size=setting.samples, val_fraction=0.0, test_fraction=0.0, seed=0
    )
    federation = pl_fed.Federation(All(), engine=pl_fed.EngineOptions("one_by_one"), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        pl_fed.Trainer(
            federation,
            run_dir=folder,
            precision="64-true",
            accelerator="cpu",
            max_epochs=ROUNDS,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(client, data)
    models = federation.store.read("personal", torch.arange(setting.devices))
    errors = (models - points.truth)[: setting.benign].square()
    return float(errors.mean()), float(errors.var(0).mean().sqrt())


FIGURE_1 = {
    "clean": Setting(devices=8, malicious=0, sigma=0.8, samples=30, tau=0.1),
    "attacked": Setting(devices=16, malicious=8, sigma=0.8, samples=30, tau=0.1, tau_a=0.5),
}
FIGURE_2 = {
    "clean": Setting(devices=20, malicious=0, sigma=1.0, samples=20, tau=0.1),
    "attacked": Setting(devices=10, malicious=3, sigma=0.5, samples=10, tau=0.1, tau_a=0.1),
}
PAPER = {"clean": 2.1333, "attacked": 1.1852}  # λ* of Figure 1, from the authors' notebook
FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)  # multiples of λ* for the trained models
RELATED = torch.linspace(1, 30, 59).tolist()  # 1/τ


def draw_figure_1(axes: Axes, setting: Setting) -> list[list[str]]:
    """Draw the error against λ; return the rows of the table."""
    lams = torch.linspace(0, 5 * setting.best, 200).tolist()
    means, stds = zip(*(setting.errors(lam) for lam in lams))
    axes.plot(lams, means, color=COLOURS[4], label="mean error of benign devices")
    axes.plot(lams, stds, "--", color=COLOURS[5], label="standard deviation over them")
    axes.axvline(setting.best, color=COLOURS[0], lw=1, ls=":", label=f"λ* = {setting.best:.4f}")
    rows = []
    for factor in FACTORS:
        lam = factor * setting.best
        exact, found = setting.errors(lam), measure_errors(setting, lam)
        if lam <= lams[-1]:
            axes.plot(lam, found[0], "o", color=COLOURS[4])
            axes.plot(lam, found[1], "s", color=COLOURS[5], mfc="none")
        numbers = [lam, exact[0], found[0], exact[1], found[1]]
        rows.append([f"{factor:g}", *(f"{number:.5f}" for number in numbers)])
    axes.set(xlabel="λ", ylabel="squared error", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    return rows


def draw_figure_2(axes: Axes, setting: Setting) -> None:
    """Draw the error of local, global and Ditto's models against the relatedness."""
    ways = {"local": lambda _: 0.0, "global": lambda _: math.inf, "Ditto, λ*": lambda s: s.best}
    for (name, lam), color, line in zip(ways.items(), COLOURS[4:], ("-.", "--", "-")):
        settings = [replace(setting, tau=1 / distance) for distance in RELATED]
        means, stds = zip(*(setting.errors(lam(setting)) for setting in settings))
        axes.plot(RELATED, means, line, color=color, label=name)
        axes.plot(RELATED, stds, line, color=color, lw=0.8, alpha=0.6)
    axes.set(xlabel="1/τ, how related devices are", ylabel="squared error", yscale="log")
    axes.legend(frameon=False, fontsize="small", title="thick: mean; thin: std over devices")


def main() -> None:
    """Draw both figures, and write the table."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    HERE.mkdir(exist_ok=True)
    figure = Figure(figsize=(11, 8), layout="constrained")
    (first, second) = figure.subplots(2, 2)
    text = "# Ditto, Figures 1 and 2: point estimation\n\n"
    text += f"Exact errors follow from covariances. Trained errors are means over {PROBLEMS:,}\n"
    text += "problems on which Ditto was trained.\n\n"
    text += "```bash\npython -m experiments.ditto.points\n```\n"
    head = ["λ / λ*", "λ", "mean, exact", "mean, trained", "std, exact", "std, trained"]
    for axes, (name, setting) in zip(first, FIGURE_1.items()):
        rows = draw_figure_1(axes, setting)
        axes.set_title(f"Figure 1, {name}")
        text += f"\n## Figure 1, {name}: λ* = {setting.best:.4f} (the authors' {PAPER[name]})\n\n"
        text += markdown(head, rows)
    for axes, (name, setting) in zip(second, FIGURE_2.items()):
        draw_figure_2(axes, setting)
        axes.set_title(f"Figure 2, {name}")
    figure.savefig(HERE / "figures_1_2.png", dpi=130)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
