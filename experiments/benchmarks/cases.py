"""Cases to time: federations on random data, as plain values that can be sent to processes.

``TARGETS`` are the cases in the table of targets, ``NETS`` the shipped nets that take no argument.
"""

import inspect
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed import models
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.nets.rows import frozen_modules

LR, LAM = 0.01, 1.0


class PflCNN(nn.Module):
    """The CNN of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters.

    Shape:
        [batch, 3, 32, 32] → logits [batch, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.layers(x)


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two matrices of rank 8 beside it (LoRA)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 8, bias=False)
        self.up = nn.Linear(8, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs."""
        return self.frozen(x) + self.up(self.down(x))


class Adapters(nn.Module):
    """Six transformer layers of width 384 on 32 positions; only adapters and the head are trained.

    Shape:
        [batch, 32, 384] → logits [batch, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(LowRank(384, 3 * 384) for _ in range(6))
        self.hidden = nn.ModuleList(LowRank(384, 1536) for _ in range(6))
        self.out = nn.ModuleList(LowRank(1536, 384) for _ in range(6))
        self.head = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        for queries, hidden, out in zip(self.queries, self.hidden, self.out):
            heads = queries(x).unflatten(-1, (3, 12, 32)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*heads)
            x = x + mixed.transpose(1, 2).flatten(2)
            x = x + out(nn.functional.gelu(hidden(x)))
        return self.head(x.mean(1))


class Normalized(nn.Sequential):
    """An MLP with BatchNorm, which cannot be stacked."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
        )


_NETS = (PflCNN, Adapters, Normalized)
_OWN: dict[str, type[nn.Module]] = {net.__name__: net for net in _NETS}


@dataclass(frozen=True)
class Case:
    """Case: a federation to time.

    Attributes:
        title: Title in a table.
        net: Name of a class of ``pl_fed.models``, or of this module.
        shape: Shape of one input.
        clients: Number of registered clients.
        cohort: Number of clients in a round; 0 uses all.
        steps: Minibatch steps of a client in a round.
        batch_size: Samples in a minibatch.
        samples: Samples of each client; 0 uses a few more than the steps need.
        ditto: Whether to run Ditto instead of FedAvg.
        options: Arguments of the net.
    """

    title: str
    net: str
    shape: tuple[int, ...]
    clients: int = 10
    cohort: int = 0
    steps: int = 10
    batch_size: int = 10
    samples: int = 0
    ditto: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def in_round(self) -> int:
        """Number of clients in a round."""
        return self.cohort or self.clients

    def build(self) -> nn.Module:
        """Return a new net in training mode, with completely frozen parts in evaluation mode."""
        kind = _OWN.get(self.net) or getattr(models, self.net)
        net = kind(**self.options).train()
        for frozen in frozen_modules(net):
            frozen.eval()
        return net

    def data(self) -> FederatedData:
        """Return the clients' data."""
        return FederatedData(
            Noise(self), batch_size=self.batch_size, val_fraction=0, test_fraction=0
        )

    def as_text(self) -> str:
        """Return the case as JSON, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Case":
        """Return the case of a text by :meth:`as_text`."""
        values = json.loads(text)
        return cls(**{**values, "shape": tuple(values["shape"])})


class Noise(DataSource):
    """Random inputs and classes."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def load(self) -> Arrays:
        """Return the samples."""
        case = self.case
        draw = torch.Generator().manual_seed(0)
        samples = case.samples or case.batch_size * case.steps + 7
        x = torch.randn(case.clients * samples, *case.shape, generator=draw)
        with torch.no_grad():
            classes = case.build().eval()(x[:1]).shape[1]
        y = torch.randint(classes, (len(x),), generator=draw)
        return Arrays(
            x, y, torch.arange(case.clients).repeat_interleave(samples), num_classes=classes
        )


def build_shipped_nets() -> dict[str, Case]:
    """Return a case for each net of ``pl_fed.models`` for images, with inputs for its defaults.

    Nets that need an argument, such as adapters, have no case.
    """
    cases = {}
    for name, kind in inspect.getmembers(models, inspect.isclass):
        defaults = {
            parameter.name: parameter.default
            for parameter in inspect.signature(kind).parameters.values()
        }
        if inspect.Parameter.empty in defaults.values() or kind is models.HuggingFaceModel:
            continue
        size, channels = defaults.get("image_size", 32), defaults.get("in_channels", 3)
        features = defaults.get("in_features")
        shape = (features,) if features else (channels, size, size)
        cases[name] = Case(f"FedAvg, {name}, 10 × 5 steps of 10", name, shape, steps=5)
    return cases


_LOGISTIC = {"net": "LogisticRegression", "shape": (784,), "steps": 5}
_MLP = {"net": "MLP", "shape": (784,)}
_IMAGES = {"in_channels": 1, "image_size": 28}
_FEW = {"steps": 5, "samples": 20}  # 1,000 clients: 1 GB of inputs instead of 3
_CNN = Case("FedAvg, pfl's CNN, 50 × 5 steps of 10", "PflCNN", (3, 32, 32), clients=50, steps=5)

TARGETS = {
    "logistic-10": Case("FedAvg, logistic regression 784×10, 10 × 5 steps of 10", **_LOGISTIC),
    "logistic-100": Case("the same, 100 × 5 steps of 10", **_LOGISTIC, clients=100),
    "mlp": Case("FedAvg, MLP 784-128-64-10, 10 × 10 steps of 10", **_MLP),
    "ditto": Case("Ditto, the same", **_MLP, ditto=True),
    "cnn": _CNN,
}
NETS = build_shipped_nets()
STACKED = {
    f"stacked-{n}": Case(f"FedAvg, MLP 784-128-64-10, {n} × 10 steps of 10", **_MLP, clients=n)
    for n in (100, 1000)
}
SCALED = {  # name: a federation whose number of clients grows
    "logistic regression": TARGETS["logistic-10"],
    "MLP": TARGETS["mlp"],
    "small CNN": Case("FedAvg, FLAME's CNN", "FlameCNN", (1, 28, 28), steps=5, options=_IMAGES),
    "CNN": _CNN,
    "adapters on a frozen body": Case("FedAvg, adapters", "Adapters", (32, 384), **_FEW),
}
CASES = {**TARGETS, **NETS, **STACKED}
