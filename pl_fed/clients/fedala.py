"""FedALA: each client learns how much of the global model enters its own, number by number.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma and H. Guan. "FedALA: Adaptive local aggregation
for personalized federated learning". AAAI 2023. arXiv 2212.01197.

Client k keeps its model θ of its last round, and weights W ∈ [0, 1] of the highest layers, 1 at
first. At the start of a round it takes the lower layers of w^t, and mixes the highest ones::

    θ̂ = θ + (w^t − θ) ⊙ W
    W ← clip(W − η ∇_θ̂ F_k(θ̂) ⊙ (w^t − θ), 0, 1)

in steps on a part of its own data: in its second round for several epochs, later for one. It then
takes local steps on all of θ̂, which is its next θ, and sends it.

Departs from the paper and the authors' code:

- In the second round the code trains W until the last 10 losses have a standard deviation below
  0.1, without a bound, but for 11 epochs at least. Here ``first_epochs`` is the number; 11 by
  default.
- The code draws a contiguous part of the client's samples, and stays on it in a round. Here the
  weights take as many steps, on one minibatch after the other: in a client's second round, its
  ``first_epochs`` visit all its samples.
- A client starts its first round at w^t. The code recognizes a first round by equal sums of the
  models' first tensors, so that a client that joins later mixes its initial model.
- Running statistics (BatchNorm's) are a client's own, as in the code, but a client starts its first
  round with those of w^t.
- The code tests θ̂ before the local steps. Here the model θ after a client's last round is tested.
- The code names the highest layers by a number of tensors, 2 by default: the weight and the bias
  of the last layer. Here they are named.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative, check_positive, check_shares
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, Objective
from pl_fed.clients.fedper import belongs, find_positions, own_parts
from pl_fed.data.batches import LocalWork
from pl_fed.nets.rows import RowLayout
from pl_fed.optimizers import BoxSGD
from pl_fed.types import Batch


class FedALA(Client):
    """FedALA: personal models that start each round at a learned mixture with the global model.

    The preparation of a round trains the weights W, the model ``mixing``. An upload is the change
    of the whole personal model from w^t.

    Args:
        net: The net that clients train: see :class:`Client`.
        mixed: Names of submodules or parameters of ``net`` with weights; the other parts start each
            round at the global model. ``None`` is the last module with trainable parameters.
        mixing_lr: η ≥ 0, the learning rate of W.
        mixing_share: The steps on W in place of one pass over the client's data, as a share of its
            minibatches, in (0, 1].
        first_epochs: Passes that train W in a client's second round, ≥ 1; later rounds have one.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If ``first_epochs`` is no integer.
        ValueError: If a number is out of range. If ``mixed`` is empty, the net lacks a part in it,
            or it is ``None`` and the net has only one module with trainable parameters.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = FedALA(net, mixing_share=0.5)
        >>> client.mixed, client.trained, client.preparation.trained
        (('2',), ('personal',), ('mixing',))
    """

    mixed_positions: Tensor

    def __init__(
        self,
        net: nn.Module,
        mixed: Sequence[str] | None = None,
        mixing_lr: float = 1.0,
        mixing_share: float = 0.8,
        first_epochs: int = 11,
        **kwargs: Any,
    ) -> None:
        models = {
            "global": Model(trained=False),
            "personal": Model(),
            "mixing": Model(trained=False, kept=False, evaluated=False),
        }
        super().__init__(net, models=models, **kwargs)
        check_nonnegative(mixing_lr=mixing_lr)
        check_positive(mixing_share=mixing_share)
        check_shares(mixing_share=mixing_share)
        check_integers(1, first_epochs=first_epochs)
        self.mixing_share = mixing_share
        self.first_epochs = first_epochs
        self.mixed = own_parts(net, mixed, argument="mixed")
        self.default_parts = {"mixed": self.mixed} if mixed is None else {}
        mixed_positions = find_positions(RowLayout.from_parameters(net), self.mixed)
        self.register_buffer("mixed_positions", mixed_positions, persistent=False)
        self.add_state("weights", self._initial_weights)
        self.add_state("rounds", 0.0)
        if not self.mixed:
            raise ValueError(
                "Expected argument `mixed` to name at least one part of the net but got an empty"
                " list: name its last layer, or use Finetuning without weights."
            )
        mixing = Model(work=LocalWork(epochs=1))
        step, box_sgd = self.preparation_step, partial(BoxSGD, lr=mixing_lr)
        self.preparation = Objective(step, {"mixing": mixing}, box_sgd, accumulates=False)

    def _initial_weights(self) -> Tensor:
        return torch.ones_like(self.initial_row()[self.mixed_positions])

    def begin(self, client: ClientRound) -> None:
        """Set out the weights W and the numbers of steps on them; an evaluation needs neither."""
        if not client.steps:
            return
        client.extra["previous"] = client.models["personal"].parameters
        weights = torch.ones_like(client.models["mixing"].parameters)
        weights[:, self.mixed_positions] = client.states["weights"]
        client.models["mixing"].parameters = weights
        rounds = client.states["rounds"]
        epochs = torch.where(rounds == 1, self.first_epochs, (rounds > 1).to(torch.int64))
        batches = self.mixing_share * client.preparation_steps["mixing"].double() - 1e-9
        client.preparation_steps["mixing"] = epochs * batches.ceil().to(torch.int64)

    def preparation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(θ̂) on the minibatch, as a function of W."""
        return self.loss_at("mixing", self._mix(self.parameters_of("mixing")), batch)

    def _mix(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return θ̂ of ONE client by parameter."""
        previous, broadcast = self.tensors("previous"), self.tensors("broadcast")
        return {
            name: torch.lerp(previous[name], broadcast[name], weight)
            if belongs(name, self.mixed)
            else broadcast[name]
            for name, weight in weights.items()
        }

    def end_preparation(self, client: ClientRound) -> None:
        """Start the local steps at θ̂, and keep W."""
        mixed, previous = self.mixed_positions, client.extra.pop("previous")
        weights = client.models["mixing"].parameters[:, mixed]
        start = client.broadcast.expand(len(client)).parameters.clone()
        start[:, mixed] = torch.lerp(previous[:, mixed], start[:, mixed], weights)
        personal = client.models["personal"]
        personal.parameters = start
        is_first = client.states["rounds"] == 0
        personal.statistics = torch.where(
            is_first, client.broadcast.statistics, personal.statistics
        )
        client.states["weights"] = weights

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(θ) on the minibatch."""
        return self.loss("personal", batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Count the round, and send the change of θ from w^t; 0 without a local step."""
        client.states["rounds"] = client.states["rounds"] + 1
        upload = client.models["personal"].parameters - client.broadcast.parameters
        return torch.where(client.steps["personal"] > 0, upload, 0)
