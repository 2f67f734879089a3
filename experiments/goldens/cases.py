"""Cases to record: small federations in float64, of every kind of algorithm."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed import Adversary, clients
from pl_fed.aggregators import CenteredClipping, FLTrust, Krum, Mean, Median, TiltedMean
from pl_fed.attacks import ALittleIsEnough, Outliers, RandomLabels
from pl_fed.compressors import QSGD, PowerSGD, TopK
from pl_fed.data.source import Arrays, DataSource

SIZES = [9, 30, 12, 24, 15, 21, 10, 18]  # samples of each client: partial and single batches of 5
CLASSES = 3


class RandomSamples(DataSource):
    """Normal samples with random classes; the clients have ``SIZES`` samples."""

    def load(self) -> Arrays:
        """Return the samples; they are the same in every process."""
        draw = torch.Generator().manual_seed(0)
        owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
        x = torch.randn(len(owner), 4, generator=draw)
        y = torch.randint(CLASSES, (len(owner),), generator=draw)
        return Arrays(x, y, owner, num_classes=CLASSES)


def make_mlp() -> nn.Module:
    """Return a net without running statistics and dropout."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def make_dropout_net() -> nn.Module:
    """Return a net with dropout."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, CLASSES))


def make_batch_norm_net() -> nn.Module:
    """Return a net with running statistics."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
    )


class FrozenBodyNet(nn.Module):
    """Linear head on a frozen body; the body's features are computed once."""

    keep_features = True

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(6, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        """Return the body's outputs; inputs that are features already stay unchanged."""
        return x if x.shape[-1] == 6 else self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of inputs or of features."""
        return self.head(self.features(x))


@dataclass(frozen=True)
class Case:
    """Case: a federation to record.

    Attributes:
        client: Builds the algorithm from a net and the options of its local work.
        net: Builds the net.
        cohort: How many of the eight clients take part in a round.
        momentum: Momentum of local SGD.
        schedule: Whether the local learning rate decays from round to round.
        clip: The trainer's ``gradient_clip_val``.
        drop_last: Whether partial batches are left out, as BatchNorm takes no single sample.
        root_samples: Training samples of the server's own.
        federation: Further arguments of the federation, built anew for every run.
    """

    client: Callable[..., clients.Client]
    net: Callable[[], nn.Module] = make_mlp
    cohort: int = 5
    momentum: float = 0.5
    schedule: bool = False
    clip: float | None = None
    drop_last: bool = False
    root_samples: int = 0
    federation: Callable[[], dict[str, Any]] = field(default=dict)


def _clip_forged_uploads() -> dict[str, Any]:
    return {
        "adversary": Adversary(ALittleIsEnough(), fraction=0.3),
        "aggregator": CenteredClipping(tau=0.1),
    }


def _poison_labels() -> dict[str, Any]:
    return {
        "adversary": Adversary(RandomLabels(redraw=True), fraction=0.3),
        "aggregator": Krum(),
    }


def _use_adam() -> dict[str, Any]:
    return {"server_optimizer": partial(torch.optim.Adam, lr=0.01)}


CASES = {
    "FedAvg": Case(clients.FedAvg),
    "FedAvg, weighted by samples": Case(
        clients.FedAvg, schedule=True, clip=0.5, federation=lambda: {"aggregator": Mean("samples")}
    ),
    "FedProx": Case(partial(clients.FedProx, mu=0.1)),
    "Local": Case(clients.Local),
    "Ditto": Case(partial(clients.Ditto, lam=0.5), federation=_use_adam),
    "Ditto, other personal work": Case(
        partial(clients.Ditto, lam=0.5, personal_steps=3, personal_lr=0.05, global_mu=0.1)
    ),
    "Ditto, Fisher": Case(partial(clients.Ditto, lam=0.5, regularizer="fisher")),
    "Ditto, KL": Case(partial(clients.Ditto, lam=0.5, regularizer="kl")),
    "Ditto, dropout": Case(partial(clients.Ditto, lam=0.5), make_dropout_net),
    "Ditto, BatchNorm": Case(partial(clients.Ditto, lam=0.5), make_batch_norm_net, drop_last=True),
    "Ditto, frozen body": Case(partial(clients.Ditto, lam=0.5), FrozenBodyNet),
    "DittoChoice": Case(clients.DittoChoice),
    "DittoGreedy": Case(clients.DittoGreedy, momentum=0.0),
    "Finetuning": Case(partial(clients.Finetuning, finetune_steps=3, lam=0.3)),
    "FLAME": Case(partial(clients.FLAME, weights="samples", lagged_global=True)),
    "FLAME, all clients": Case(
        partial(clients.FLAME, rho=0.2, pull_to="broadcast"),
        make_batch_norm_net,
        cohort=8,
        drop_last=True,
    ),
    "FLAME, tolerance": Case(partial(clients.FLAME, tolerance=0.01), momentum=0.0),
    "FedADMM": Case(clients.FedADMM),
    "LpProj": Case(partial(clients.LpProj, dimensions=9)),
    "SCAFFOLD": Case(clients.Scaffold, momentum=0.0),
    "FedTilt": Case(
        partial(clients.FedTilt, tau=0.5, lam=-0.3, mu=0.05),
        federation=lambda: {"aggregator": TiltedMean(2.0)},
    ),
    "Per-FedAvg": Case(clients.PerFedAvg, momentum=0.0),
    "Per-FedAvg, exact": Case(partial(clients.PerFedAvg, hessian="exact"), momentum=0.0),
    "pFedMe": Case(clients.PFedMe, momentum=0.0),
    "pFedMe, epochs": Case(clients.PFedMeEpochs, momentum=0.0),
    "APFL": Case(partial(clients.APFL, alpha_lr=0.05), momentum=0.0),
    "L2SGD": Case(clients.L2SGD, momentum=0.0),
    "MAPPER": Case(clients.Mapper, make_batch_norm_net, momentum=0.0, drop_last=True),
    "MeanRegularized": Case(clients.MeanRegularized),
    "MOCHA": Case(clients.Mocha, cohort=8),
    "FedPer": Case(clients.FedPer),
    "FedRep": Case(clients.FedRep, make_batch_norm_net, drop_last=True),
    "FedBN": Case(clients.FedBN, make_batch_norm_net, drop_last=True),
    "forged uploads, CenteredClipping": Case(
        partial(clients.Ditto, lam=0.5), federation=_clip_forged_uploads
    ),
    "poisoned labels, Krum": Case(partial(clients.Ditto, lam=0.5), federation=_poison_labels),
    "outliers, Median": Case(
        clients.FedAvg,
        federation=lambda: {
            "adversary": Adversary(corruption=Outliers()),
            "aggregator": Median(),
        },
    ),
    "compressed, TopK": Case(
        partial(clients.Ditto, lam=0.5), federation=lambda: {"compression": TopK(9)}
    ),
    "compressed, QSGD, FedPer": Case(
        clients.FedPer, federation=lambda: {"compression": QSGD(3, bucket_size=8)}
    ),
    "compressed, PowerSGD, forged": Case(
        clients.FedAvg, federation=lambda: {"compression": PowerSGD(1), **_clip_forged_uploads()}
    ),
    "FLTrust": Case(clients.FedAvg, root_samples=20, federation=lambda: {"aggregator": FLTrust()}),
}
