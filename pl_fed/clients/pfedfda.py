"""pFedFDA: a shared body, and heads that are linear discriminants of the clients' own features.

C. McLaughlin and L. Su. "Personalized federated learning via feature distribution adaptation".
NeurIPS 2024. arXiv 2411.00329.

The features z of class c are taken as normal, with mean μ_c and one covariance Σ for all classes.
The head is their linear discriminant, with the client's shares π_c of the classes as priors::

    W_c = Σ⁻¹ μ_c,    b_c = −½ μ_cᵀ Σ⁻¹ μ_c + ln π_c,    Σ ← (1 − ε) Σ + ε tr(Σ) / d I

1. The server sends the body, μ and Σ. Client k takes local steps on the body, under their head.
2. It measures the means and the covariance of its features, and mixes them::

    μ_k = β₁ own + (1 − β₁) μ,    Σ_k = β₂ own + (1 − β₂) Σ

   β minimises the cross entropy of 2-fold cross-validation on its samples.
3. It sends the body, μ_k and Σ_k. The server takes their means, weighted by samples in the paper.

Before an evaluation, step 2 with the broadcast body gives the client's head.

Departs from the paper and from the authors' code (cj-mclaughlin/pFedFDA):

- β is the best point of a grid over [0, 1]², of 11 × 11 by default. The code takes 10 iterations of
  L-BFGS on β clipped to [0, 1], from 0.5. The grid has no local minima; its error is at most 0.05.
  Of equal losses, the first one counts, by β₂ and then β₁: without evidence, β is 0.
- Of each class, every second sample is in the second fold. The code draws the folds. As there, a
  class with one sample is in no fold, and β is 0 without folds.
- The features are those of the body after the local steps. The code collects them during the steps.
- The first μ_c is the row c of the head's initial weights, with Σ = I: W is the initial head. The
  code draws μ from [0, 1).
- The aggregator determines the weights of bodies and statistics, uniform by default.
- The code also adds I to a client's own covariance, as the default ``ridge`` does, and 1e-4 to all
  its entries. In one run of five rounds (Fashion-MNIST, 20 clients with two classes each, a ReLU
  MLP, learning rate 0.05), accuracy was 0.92 with I, and 0.48 without.

As in the code, a class with fewer than 3 samples of the client has the server's mean, and the
priors are shares plus 1e-4, divided by their sum.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative, check_shares
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.fedper import belongs, own_parts
from pl_fed.clients.heads import find_head, require_body, require_linear_head
from pl_fed.devices import to_device
from pl_fed.functional.discriminants import (
    class_moments,
    clip_eigenvalues,
    factor_covariance,
    linear_discriminant,
)
from pl_fed.nets.rows import RowLayout
from pl_fed.types import Batch

_MIN_SAMPLES = 3  # of a class, for a mean of its own
_PRIOR = 1e-4  # is added to the share of each class
_TIE = 1e-9  # the relative difference of equal losses, above rounding


class PFedFDA(Client):
    """pFedFDA: a shared body, and for each client a head from the distribution of its features.

    A client sends the body, the means of C classes and the covariance of d features: C · d + d · d
    numbers beside the body. The evaluated model is the broadcast body with the client's own head,
    fitted to all its training samples; clients keep nothing between rounds.

    Args:
        net: The classifier that clients train: see :class:`Client`. Its outputs must be those of
            its head, a ``torch.nn.Linear`` with a bias and an output for each class of the data.
        head: The name of the head, such as ``"layers.5"``. ``None`` is the last module with
            trainable parameters.
        shrinkage: ε in [0, 1], the share of tr(Σ) / d I in the covariance of each head.
        ridge: Is added to the variances of a client's own covariance, ≥ 0; 1 in the authors' code,
            0 in the formulas. With 0, the weights of heads grow large where features hardly vary.
        single_beta: Whether β₁ = β₂.
        candidates: The number of values from 0 to 1 of each β, at least 2.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If ``candidates`` is no integer, or the head is not linear with a bias.
        ValueError: If a number is out of range, or the net has no module ``head`` or no body
            below it. Before training, if the data have no class ids.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = PFedFDA(net)
        >>> client.head, client.trained, client.evaluated
        ('2', ('global',), ('personal',))
        >>> client.upload_numbers  # 25 of the body, 3 * 5 of the means, 5 * 5 of the covariance
        65
    """

    reads_class_counts = True
    weighted_states = ("means", "covariance")

    head_positions: Tensor

    def __init__(
        self,
        net: nn.Module,
        head: str | None = None,
        shrinkage: float = 1e-4,
        ridge: float = 1.0,
        single_beta: bool = False,
        candidates: int = 11,
        **kwargs: Any,
    ) -> None:
        models = {
            "global": Model(evaluated=False),
            "personal": Model(trained=False, kept=False),
        }
        super().__init__(net, models=models, **kwargs)
        check_shares(shrinkage=shrinkage)
        check_nonnegative(ridge=ridge)
        check_integers(2, candidates=candidates)
        self.shrinkage, self.ridge = shrinkage, ridge
        self.single_beta, self.candidates = single_beta, candidates
        layout = self.row("global").layout
        self.head = find_head(layout.names, head)
        require_body(net, self.head)
        own_parts(net, [self.head], argument="head")  # refuses tied parameters
        linear = require_linear_head(self.global_model, self.head)
        names = [f"{self.head}.weight", f"{self.head}.bias"]
        self.num_classes, self.num_features = linear.out_features, linear.in_features
        self.register_buffer("head_positions", layout.positions(*names), persistent=False)
        self.add_server_state("means", self._initial_means)
        self.add_server_state("covariance", self._initial_covariance)

    def _initial_means(self) -> Tensor:
        return self.initial_row()[self.head_positions[: self.num_classes * self.num_features]]

    def _initial_covariance(self) -> Tensor:
        return torch.eye(self.num_features).to(self.initial_row()).flatten()

    @property
    def shared_numbers(self) -> int:
        """The number of values of the model that are exchanged: all but the head's parameters."""
        return super().shared_numbers - len(self.head_positions)

    @property
    def sent_layout(self) -> RowLayout:
        """The layout of an upload without the head."""
        tensors = self.row("global").tensors.items()
        body = [(name, tensor) for name, tensor in tensors if not belongs(name, [self._head])]
        return RowLayout.from_tensors(body)

    @property
    def frozen_parameters(self) -> tuple[str, ...]:
        """The names of the head's parameters: local steps move the body alone."""
        return f"{self._head}.weight", f"{self._head}.bias"

    def frozen_values(
        self, server_states: Mapping[str, Tensor], class_counts: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the head of local steps: the server's moments, and the shares of own classes."""
        counts = cast(Tensor, class_counts)  # by reads_class_counts
        means, covariance = self._server_moments(server_states)
        factor = factor_covariance(covariance, self.shrinkage)
        row = self._head_row(means, factor, _log_priors(counts[None])[0])
        return self._split_head(row.to(server_states["means"]))

    @property
    def _head(self) -> str:
        return self._head_name("global")

    def _split_head(self, row: Tensor) -> dict[str, Tensor]:
        """Return the parameters of a head by name, from one row."""
        weight, bias = row.tensor_split([self.num_classes * self.num_features])
        names = self.frozen_parameters
        return dict(zip(names, (weight.view(self.num_classes, self.num_features), bias)))

    def begin(self, client: ClientRound) -> None:
        """Give local steps the server's head; give an evaluation the head of each client."""
        if client.steps:
            means, covariance = self._server_moments(client.server_states)
            factor = factor_covariance(covariance, self.shrinkage)
            rows = [self._head_row(means, factor, prior) for prior in _client_priors(client)]
            client.extra["head"] = torch.stack(rows).to(client.broadcast.parameters)
        else:
            for place, (means, covariance) in enumerate(self._mix_moments(client)):
                factor = factor_covariance(covariance, self.shrinkage)
                row = self._head_row(means, factor, _client_priors(client)[place])
                personal = client.models["personal"].parameters
                personal[place, self.head_positions] = row.to(personal)

    def _server_moments(self, server_states: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the server's means [classes, d] and covariance [d, d], in float64."""
        means = server_states["means"].double().view(-1, self.num_features)
        covariance = server_states["covariance"].double().view(-1, self.num_features)
        return means, clip_eigenvalues(covariance)

    def _head_row(self, means: Tensor, factor: Tensor, log_priors: Tensor) -> Tensor:
        """Return the parameters of a head as one row."""
        weight, bias = linear_discriminant(means, factor, log_priors)
        return torch.cat([weight.flatten(), bias])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of the body under the server's head."""
        head = self._split_head(self.read("head"))
        return self.loss_at("global", {**self.parameters_of("global"), **head}, batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Propose the mixed means and covariance, and send the change of the body."""
        moments = self._mix_moments(client)
        broadcast = client.broadcast.parameters
        for name, rows in zip(("means", "covariance"), zip(*moments)):
            client.proposals[name] = torch.stack(rows).flatten(1).to(broadcast)
        upload = client.models["global"].parameters - broadcast
        upload[:, self.head_positions] = 0
        return upload

    def _mix_moments(self, client: ClientRound) -> list[tuple[Tensor, Tensor]]:
        """Return μ_k and Σ_k of each client, of the features of its global model."""

        def mark(batch: Batch) -> Tensor:
            """Return the features and the class of each sample, [batch, d + classes]."""
            features = self.features_of("global", batch)
            classes = batch.targets[:, None] == torch.arange(self.num_classes, device=batch.device)
            return torch.cat([features, classes.to(features)], 1)

        samples = self.own_values(client, mark).double()
        server, log_priors = self._server_moments(client.server_states), _client_priors(client)
        moments = []
        for rows, log_prior in zip(samples, log_priors):
            features, classes = rows[:, : self.num_features], rows[:, self.num_features :]
            beta = self._choose_beta(features, classes, server, log_prior)
            own = self._measure(features, classes, server[0])
            mixed = [b * o + (1 - b) * s for b, o, s in zip(beta, own, server)]
            moments.append((mixed[0], mixed[1]))
        return moments

    def _measure(
        self, features: Tensor, classes: Tensor, server_means: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the means and the covariance of samples."""
        means, covariance = class_moments(features, classes, server_means, _MIN_SAMPLES)
        identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
        return means, covariance + self.ridge * identity

    def _choose_beta(
        self, features: Tensor, classes: Tensor, server: tuple[Tensor, Tensor], log_priors: Tensor
    ) -> Tensor:
        """Return β₁ and β₂ with the smallest cross entropy on the held-out folds, [2]."""
        shares = to_device(torch.linspace(0, 1, self.candidates, dtype=features.dtype), features)
        folded = classes * (classes.sum(0) >= 2)  # a class with one sample is in no fold
        ranks = (folded.cumsum(0) * folded).sum(1, keepdim=True)  # 1, 2, … in each class
        is_first = (ranks % 2).to(folded)
        losses = features.new_zeros(self.candidates, self.candidates)
        for held_out in (folded * is_first, folded * (1 - is_first)):
            own = self._measure(features, folded - held_out, server[0])
            losses = losses + self._held_out_losses(
                features, held_out, own, server, log_priors, shares
            )
        losses = losses.nan_to_num(nan=torch.inf)  # a covariance that has no inverse
        pairs = torch.cartesian_prod(shares, shares).flip(1)  # β₁ and β₂, as the losses in a row
        if self.single_beta:
            losses, pairs = losses.diagonal(), torch.stack([shares, shares], 1)
        is_best = losses.flatten() <= (1 + _TIE) * losses.min()
        return pairs[is_best.to(shares).argmax(0, keepdim=True)][0]  # the first one

    def _held_out_losses(
        self,
        features: Tensor,
        held_out: Tensor,
        own: tuple[Tensor, Tensor],
        server: tuple[Tensor, Tensor],
        log_priors: Tensor,
        shares: Tensor,
    ) -> Tensor:
        """Return the mean cross entropy on a fold for each β₂ and each β₁, [candidates] * 2."""
        means, covariances = (
            torch.stack([share * o + (1 - share) * s for share in shares])
            for o, s in zip(own, server)
        )
        factors = factor_covariance(covariances, self.shrinkage)
        weights, biases = linear_discriminant(  # each β₁ has classes of its own
            means.flatten(0, 1), factors, log_priors.repeat(len(shares))
        )
        scores = features @ weights.mT + biases[:, None]  # [β₂, samples, β₁ · classes]
        scores = scores.unflatten(-1, (len(shares), -1)).log_softmax(-1)
        sums: Tensor = (scores * held_out[:, None]).sum((1, 3))
        return -sums / held_out.sum().clamp(min=1)


def _client_priors(client: ClientRound) -> Tensor:
    """Return ln π of each client, float64 [clients, classes]."""
    return _log_priors(cast(Tensor, client.class_counts))  # by reads_class_counts


def _log_priors(counts: Tensor) -> Tensor:
    """Return ln π from counts of samples [clients, classes], float64."""
    counts = counts.double()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1) + _PRIOR
    return (shares / shares.sum(1, keepdim=True)).log()
