"""Operators of a local step, by engine, and of the same step written by hand.

An operator on a device is about one kernel launch; views launch nothing and are left out. Torch's
SGD updates each tensor on a CPU, and all at once on a GPU. The count needs no device. A local step
is the difference of rounds of many and of few steps, and the rest of a round is what remains. The
step by hand is forward pass, backward pass and SGD alone: for one client, and for a stack by
``torch.vmap``. ``tests/engine/test_launches.py`` bounds the counts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import LAM, LR, Case
from fit import client_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from pl_fed import EngineOptions, Federation
from pl_fed.samplers import All

SMALL = {"hidden": [8, 4]}
CASES = {
    "FedAvg, MLP": Case("", "MLP", (784,), options=SMALL),
    "Ditto, MLP": Case("", "MLP", (784,), options=SMALL, ditto=True),
    "FedAvg, logistic regression": Case("", "LogisticRegression", (784,)),
    "FedAvg, FlameCNN": Case("", "FlameCNN", (3, 32, 32), clients=2, options={"dropout": 0.0}),
}
_FREE = (  # views, and marks for profilers
    *("_record_function_enter_new", "_record_function_exit"),
    *("view", "_unsafe_view", "reshape", "as_strided", "t", "transpose", "permute", "expand"),
    *("slice", "select", "unbind", "split", "squeeze", "unsqueeze", "detach", "alias", "movedim"),
    *("split_with_sizes", "diagonal", "unflatten", "_reshape_alias", "lift_fresh", "view_as"),
)


class Operators(TorchDispatchMode):
    """Operators: counts the operators that run within the context, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operator, and run it."""
        name = function.overloadpacket.__name__
        if name not in _FREE:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@dataclass
class Launches:
    """Launches: the operators of a local step, and those of the rest of a round.

    Attributes:
        step: The operators of a local step, by name.
        others: The operators of a round without its local steps, by name.
    """

    step: dict[str, float]
    others: dict[str, float]

    @property
    def per_step(self) -> float:
        """The number of operators of a local step."""
        return sum(self.step.values())


def count_engine(case: Case, engine: str, few: int = 10, many: int = 20) -> Launches:
    """Count the operators of an engine in the third round, of few and of many local steps."""
    counts = {}
    for steps in (few, many):
        long = replace(case, steps=steps, samples=case.batch_size * many)
        client, data = client_of(long), long.data()
        federation = Federation(All(), engine=EngineOptions(engine), seed=0)  # type: ignore[arg-type]
        federation.setup(client, data, "fit")
        client.train()
        optimizer = client.configure_optimizers()
        for round in range(2):
            federation.run_round(round, optimizer)
        with Operators() as operators:
            federation.run_round(2, optimizer)
        counts[steps] = operators.counts
    clients = case.clients if engine == "one_by_one" else 1
    runs = (many - few) * clients
    step = {name: (counts[many][name] - counts[few][name]) / runs for name in counts[many]}
    others = {name: counts[few][name] - few * clients * number for name, number in step.items()}
    return Launches(step, others)


def count_by_hand(case: Case, stacked: bool) -> int:
    """Count forward pass, backward pass and SGD of one step, for one client or for a stack."""
    net = case.build()
    x = torch.randn(case.clients, case.batch_size, *case.shape)
    y = torch.zeros(case.clients, case.batch_size, dtype=torch.int64)
    names = 2 if case.ditto else 1
    parameters = {name: tensor.detach() for name, tensor in net.named_parameters()}
    if stacked:
        parameters = {n: t.expand(case.clients, *t.shape).clone() for n, t in parameters.items()}
    models = [{n: t.clone().requires_grad_() for n, t in parameters.items()} for _ in range(names)]
    center = {name: tensor.clone() for name, tensor in parameters.items()}

    def loss(*models: dict[str, Tensor], x: Tensor, y: Tensor, center: dict[str, Tensor]) -> Tensor:
        """Return FedAvg's loss, or Ditto's."""
        losses = [nn.functional.cross_entropy(functional_call(net, m, (x,)), y) for m in models]
        if not case.ditto:
            return losses[0]
        distances = [(models[1][n] - center[n]).square().sum() for n in center]
        return losses[0] + losses[1] + LAM / 2 * torch.stack(distances).sum()

    def stack(*models: dict[str, Tensor]) -> Tensor:
        """Return the sum of the losses of all clients."""
        run: Callable[..., Tensor] = lambda m, x, y, c: loss(*m, x=x, y=y, center=c)  # noqa: E731
        return torch.vmap(run)(models, x, y, center).sum()

    def single(*models: dict[str, Tensor]) -> Tensor:
        """Return the loss of the first client."""
        return loss(*models, x=x[0], y=y[0], center=center)

    with Operators() as operators:
        leaves = [tensor for model in models for tensor in model.values()]
        gradients = torch.autograd.grad((stack if stacked else single)(*models), leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, gradients, alpha=-LR)
    return sum(operators.counts.values())
