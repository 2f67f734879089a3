"""Simple-Tuning: each client trains a new head on the body of the global model.

Z. Qin, L. Yao, D. Chen, Y. Li, B. Ding and M. Cheng. "Revisiting personalized federated learning:
Robustness against backdoor attacks". KDD 2023. arXiv 2302.01677.

Clients train as in FedAvg. Before each evaluation, a client takes the global model and gives it a
new head with the initial values of a linear layer with fan-in f::

    weight and bias ~ U(−1/√f, 1/√f)

It then trains the head alone on its own data. Finetuning keeps the head of the global model, and
with it the backdoor of an attacker; the new head is the difference.

Departs from the paper and its code (FederatedScope, branch ``backdoor-bench``):

- The code tunes after the training of the federation. Here, every evaluation tunes the current
  global model; clients keep no personal model.
- The code draws a new head for each client. Here, all clients begin with the same new head in every
  evaluation, so that a client's model does not depend on its id.
- The optimizer of the head is SGD without weight decay, so that the body does not move.
- f is the number of inputs of an output, as in PyTorch; the code takes the last dimension of the
  weight. Both agree for linear layers. Normalisation layers in the head keep their values.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative
from pl_fed.clients.argument_checks import check_work
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, Objective
from pl_fed.clients.fedper import belongs, own_parts
from pl_fed.data.batches import LocalWork
from pl_fed.nets.rows import RowLayout
from pl_fed.random import key, uniforms
from pl_fed.types import Batch


class SimpleTuning(Client):
    """Simple-Tuning: FedAvg, and before each evaluation a new head trained on each client's data.

    Args:
        net: The net that clients train: see :class:`Client`.
        own: Names of the parts of the head; ``None`` is the last module with trainable parameters.
        tuning_epochs: Passes over the client's training data; 0 leaves the new head untrained. By
            default 10 as in the paper's code, unless ``tuning_steps`` is given.
        tuning_steps: Minibatch steps of the tuning, instead of ``tuning_epochs``.
        tuning_lr: Learning rate of the tuning, by SGD; 0.005 in the paper's code.
        head_seed: Seed of the new head, at least 0.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If ``head_seed`` is not an integer.
        ValueError: If ``tuning_lr`` is negative or infinite, ``tuning_steps`` or ``tuning_epochs``
            is negative or both are given, or ``head_seed`` is negative. If the net lacks a part in
            ``own``, the head has no weight of two or more dimensions, or ``own`` is ``None`` and
            the net has only one module with trainable parameters.

    Example:
        >>> client = SimpleTuning(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
        >>> client.own, client.trained, client.adaptation.trained
        (('2',), ('global',), ('personal',))
    """

    def __init__(
        self,
        net: nn.Module,
        own: Sequence[str] | None = None,
        tuning_epochs: int | None = None,
        tuning_steps: int | None = None,
        tuning_lr: float = 0.005,
        head_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(), "personal": Model(trained=False, kept=False)}
        super().__init__(net, models=models, **kwargs)
        check_nonnegative(tuning_lr=tuning_lr)
        check_integers(0, head_seed=head_seed)
        self.head_seed = head_seed
        self.own = own_parts(net, own)
        self.default_parts = {"own": self.own} if own is None else {}
        self._bounds = find_head_bounds(RowLayout.from_parameters(net), self.own)
        if {tuning_epochs, tuning_steps} != {0, None}:
            check_work(tuning_steps, tuning_epochs, prefix="tuning")
            default = 10 if tuning_epochs is None else tuning_epochs
            personal = Model(work=LocalWork(tuning_steps, default))
            sgd = partial(torch.optim.SGD, lr=tuning_lr)
            self.adaptation = Objective(self.adaptation_step, {"personal": personal}, sgd)

    def begin(self, client: ClientRound) -> None:
        """Give the global model a new head."""
        super().begin(client)
        rows = client.models["personal"].parameters
        redrawn = self._bounds.nonzero().flatten()
        draws = uniforms(key(self.head_seed, "simple-tuning"), redrawn)
        rows[:, redrawn.to(rows.device)] = ((2 * draws - 1) * self._bounds[redrawn]).to(rows)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) on the minibatch."""
        return self.loss("global", batch)

    def adaptation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v) on the minibatch; only the head moves."""
        parameters = self.parameters_of("personal")
        at = {
            name: tensor if belongs(name, self.own) else tensor.detach()
            for name, tensor in parameters.items()
        }
        return self.loss_at("personal", at, batch)


def find_head_bounds(layout: RowLayout, parts: Sequence[str]) -> Tensor:
    """Return the bounds of a new head's numbers, float32 [numel]; 0 for numbers to keep.

    Args:
        layout: The layout of the net's parameters.
        parts: The names of the parts of the head.

    Raises:
        ValueError: If the head has no weight of two or more dimensions.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.LayerNorm(1))
        >>> find_head_bounds(RowLayout.from_parameters(net), ["1", "2"])
        tensor([0., 0., 1., 1., 0., 0.])
    """
    shapes = dict(zip(layout.names, layout.shapes))
    bounds = torch.zeros(layout.numel)
    matrices = [name for name in shapes if belongs(name, parts) and len(shapes[name]) > 1]
    if not matrices:
        raise ValueError(
            "Expected argument `own` to name a head with a weight of two or more dimensions but"
            f" got {', '.join(parts) or 'no part'}: name a linear layer."
        )
    for matrix in matrices:
        module = matrix.rpartition(".")[0]
        fan_in = shapes[matrix][1:].numel()
        biases = [
            name
            for name, shape in shapes.items()
            if name.rpartition(".")[0] == module and belongs(name, parts) and len(shape) == 1
        ]
        bounds[layout.positions(matrix, *biases)] = fan_in**-0.5
    return bounds
