"""FedTilt: a personal model for each client, fair to its classes, by doubly tilted losses.

B. Zhang, L. Mares De La Cruz and B. Wang. "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning".

The local objective (equation 11, footnote 3)::

    L_n(v_n, w) = R_n(τ, λ; v_n) + μ/2 ‖v_n − w‖²
    R_n  = (1/τ) log( Σ_k |D_k| e^{τ R_nk} / |D_n| )          over the classes k of client n
    R_nk = (1/λ) log( mean over z in D_k of e^{λ l(z; v_n)} )  over the samples of a class

In round t a client takes steps on R_n from w^t, with the result w_n. It also takes steps on
L_n(·; w^t) from its v_n (Algorithm 1). The server moves w by the tilted mean of the squared
distances to the w_n (equation 10): :class:`pl_fed.aggregators.TiltedMean`; q = 0 is the plain mean.

Departs from the paper, where the paper is incomplete or contradicts itself:

- Algorithm 1 (lines 14 and 15) steps from w^t and from the kept v_n at each minibatch, so that only
  the last step would count. Here both models continue from the previous minibatch; the pull is to
  w^t throughout.
- The tilted loss trains w_n without a pull (line 14). The server merges the w_n, as in Algorithm 1
  and equation 10; in section III-D it merges the v_n.
- A minibatch has the classes of its samples, and |D_k| counts its samples. With a large λ and τ and
  small minibatches, one sample drives each step.
- The softmax is part of the loss; in the paper it is part of the nets.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative
from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.data.client_data import ClientData
from pl_fed.functional.tilted import tilted_loss
from pl_fed.trees import leaves
from pl_fed.types import Batch, Population


class FedTilt(Client):
    """FedTilt: a personal and a global model, both trained by a doubly tilted loss.

    Its aggregator is :class:`pl_fed.aggregators.TiltedMean`, or a plain mean for q = 0. With
    τ = λ = 0 it is Ditto; Ditto's λ is μ here.

    Args:
        net: The net that clients train: see :class:`Client`.
        tau: τ, the tilt over a client's classes: 0 weighs classes by their samples, a positive τ
            stresses the worst class, a negative τ the best; ∞ and −∞ select that class alone.
        lam: λ, the tilt over the samples of a class: a positive λ stresses the worst samples, a
            negative λ suppresses outliers.
        mu: μ ≥ 0, the strength of the pull to w^t.
        personal_lr: η₂, the learning rate of v; the optimizer's, η₁, by default.
        optimizer: Builds the local optimizer in each round, with learning rate η₁; SGD with 0.05 by
            default.
        local_steps: Minibatch steps on w and on v in a round; or give ``local_epochs``.
        local_epochs: E, the passes over the client's data in a round; 1 if neither is given.
        criterion: Turns outputs and targets into a mean loss; cross-entropy by default. A class
            weight counts as a number of samples.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If a tilt is NaN, ``mu`` or ``personal_lr`` is negative or infinite, or the
            data has no classes.

    Example:
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
        >>> client = FedTilt(nn.Linear(4, 2), tau=2.0, lam=-0.5, optimizer=sgd, local_epochs=10)
        >>> client.trained, list(client.state_defaults())
        (('global', 'personal'), ['personal', 'personal.statistics'])
    """

    def __init__(
        self,
        net: nn.Module,
        tau: float = 0.0,
        lam: float = 0.0,
        mu: float = 0.01,
        personal_lr: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_nonnegative(mu=mu)
        if personal_lr is not None:
            check_nonnegative(personal_lr=personal_lr)
        models = {"global": Model(), "personal": Model(lr=personal_lr)}
        super().__init__(net, models=models, **kwargs)
        for name, tilt in (("tau", tau), ("lam", lam)):
            if math.isnan(tilt):
                raise ValueError(f"Expected argument `{name}` to be a number but got {tilt}.")
        self.tau = tau
        self.lam = lam
        self.mu = mu

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return R_n(w) + R_n(v) + μ/2 ‖v − w^t‖² on the minibatch."""
        pull = self.mu / 2 * self.squared_distance("personal", to="broadcast")
        return self.tilted_loss("global", batch) + self.tilted_loss("personal", batch) + pull

    def tilted_loss(self, model: str, batch: Batch) -> Tensor:
        """Return R_n(τ, λ) of a model over the samples in a batch's mask."""
        outputs = self.outputs_of(model, batch)
        losses = self.sample_losses(outputs, batch.targets)
        weights = self.sample_weights(batch.targets)
        weights = torch.ones_like(losses) if weights is None else weights.to(losses.dtype)
        losses = losses / torch.where(weights > 0, weights, 1)  # undo the weights in the losses
        if batch.mask is not None:
            weights = torch.where(batch.mask, weights, 0)
        return tilted_loss(losses, batch.targets, outputs.shape[1], self.tau, self.lam, weights)

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse data without a class id for each sample, and tasks without sample losses."""
        self.refuse_batch_criterion("FedTilt tilts sample losses")
        if not self.count_classes(data):
            targets = leaves(data.targets)[0]
            raise ValueError(
                "Expected argument `dataset` to give a class id for each sample, as FedTilt tilts"
                f" over classes, but got targets of {targets.dtype} and shape"
                f" {list(targets.shape)} for the task {type(self.task).__name__}."
            )
