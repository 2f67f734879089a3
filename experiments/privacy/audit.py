"""Audit of privacy by canaries: the right mechanisms and broken ones.

python -m experiments.privacy.audit

60 clients hold scikit-learn's handwritten digits, and 100 canaries send a random direction in each
of their rounds. The empirical ε of the released models (Andrew et al., ICLR 2024) has to be below
the claimed ε of the right mechanisms, one noisy sum and the median of eight, and above it for
mechanisms without noise, and for one that weighs uploads by samples. It takes four minutes, and
writes audit.md.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback
from torch import Tensor

import pl_fed
from experiments.grid import build_trainer
from pl_fed.aggregators import Mean, Median
from pl_fed.attacks import Canaries
from pl_fed.clients import FedAvg
from pl_fed.data import Digits, FederatedData
from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.auditing import canary_direction, empirical_epsilon
from pl_fed.models import MLP
from pl_fed.partitioners import IID
from pl_fed.rounds.privacy import RoundPrivacy
from pl_fed.samplers import Poisson

HERE = Path(__file__).parent
CLIENTS, CANARIES, ROUNDS, CLIP_NORM, DELTA = 160, 100, 20, 0.5, 1e-3


def keep(privacy: RoundPrivacy) -> None:
    """Change nothing."""


def leave_out_noise(privacy: RoundPrivacy) -> None:
    """Add no noise, and claim the same ε."""
    privacy._draw_noise = lambda numel, _: torch.zeros(  # type: ignore[method-assign]
        numel, dtype=torch.float64
    )


def weigh_by_samples(privacy: RoundPrivacy) -> None:
    """Weigh canaries as clients with 20 times the samples, after clipping."""
    protect = privacy.protect

    def protect_weighted(
        uploads: Tensor, share: WorkShare, note: Callable[[str, float], None]
    ) -> Tensor:
        """Return the noisy mean, in which the canaries count 20 times."""
        factors = (CLIP_NORM / uploads.norm(dim=1)).clamp(max=1)[:, None]
        excess = 19 * (uploads * factors)[share.cohort < CANARIES].sum(0)
        return protect(uploads, share, note) + excess / privacy.denominator

    privacy.protect = protect_weighted  # type: ignore[method-assign]


MECHANISMS = {  # the change of the mechanism, and the number of buckets
    "clipping and noise": (keep, None),
    "median of 8 noisy sums": (keep, 8),
    "noise left out": (leave_out_noise, None),
    "noise left out of 8 sums": (leave_out_noise, 8),
    "weights by samples": (weigh_by_samples, None),
}


def run(
    change: Callable[[RoundPrivacy], None], buckets: int | None, noise: float, seed: int
) -> tuple[float, float]:
    """Return the claimed and the empirical ε of a run."""
    torch.manual_seed(seed)
    client = FedAvg(
        MLP(64, [32], 10), local_epochs=1, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    federation = pl_fed.Federation(
        Poisson(0.2),
        Mean() if buckets is None else Median(),
        adversary=pl_fed.Adversary(Canaries(), ids=list(range(CANARIES)), knowledge="own"),
        privacy=pl_fed.DifferentialPrivacy(
            clip_norm=CLIP_NORM,
            noise_multiplier=noise,
            delta=DELTA,
            buckets=buckets,
            noise_seed=seed,
        ),
        engine=pl_fed.EngineOptions("stacked"),
        seed=seed,
    )
    data = FederatedData(Digits(), IID(), num_clients=CLIENTS, batch_size=10, seed=seed)
    start = client.row("global").data.clone()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(federation, folder, ROUNDS, [ChangeMechanism(change)])
        trainer.fit(client, data)
    released = client.row("global").data - start
    rows = torch.stack([canary_direction(seed, k, len(start)) for k in range(CANARIES)])
    privacy = federation.session.rounds.privacy
    claimed = 0.0 if privacy is None else privacy.epsilon()
    return claimed, empirical_epsilon(released, rows, DELTA)


class ChangeMechanism(Callback):
    """Changes the mechanism of a federation before the first round."""

    def __init__(self, change: Callable[[RoundPrivacy], None]) -> None:
        self.change = change

    def on_train_start(self, trainer: pl_fed.Trainer, pl_module: FedAvg) -> None:
        """Change the mechanism."""
        privacy = trainer.federation.session.rounds.privacy
        if privacy is not None:
            self.change(privacy)


def main() -> None:
    """Run all mechanisms, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--noises", type=float, nargs="+", default=[0.7, 1.5, 4.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS, metavar="NAME"
    )
    parser.add_argument("--folder", type=Path, default=HERE, help="where to write")
    options = parser.parse_args()
    lines = [
        f"Claimed and empirical ε at δ = {DELTA:g} after {ROUNDS} rounds, with {CANARIES} canaries"
        f" among {CLIENTS} clients; the largest empirical ε of {len(options.seeds)} seeds.",
        "",
        "| mechanism | noise multiplier | claimed ε | empirical ε | audit |",
        "|---|---|---|---|---|",
    ]
    for name in options.mechanisms:
        change, buckets = MECHANISMS[name]
        for noise in options.noises:
            results = [run(change, buckets, noise, seed) for seed in options.seeds]
            claimed, empirical = results[0][0], max(result[1] for result in results)
            verdict = "broken" if empirical > claimed else "passed"
            lines.append(f"| {name} | {noise:g} | {claimed:.2f} | {empirical:.2f} | {verdict} |")
            print(lines[-1], flush=True)
    (options.folder / "audit.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
