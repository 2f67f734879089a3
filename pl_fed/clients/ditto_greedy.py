"""DittoGreedy: Ditto with a choice of λ by each client's validation data, at each local step.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221. Appendix D.2 lets each device choose λ by its own
validation data, at a time that the paper does not state.

As in the reference code, a client tries a step with each λ, v − η (∇F_k(v) + λ (v − w^t)). It takes
the step with the lowest loss on its validation data. As in the paper, but not in the reference
code, a client with fewer than 4 validation samples has a fixed λ.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.clients.contract import ClientRound
from pl_fed.clients.ditto import Ditto
from pl_fed.clients.ditto_choice import check_lams
from pl_fed.data.client_data import ClientData
from pl_fed.nets.modes import evaluation_mode
from pl_fed.types import Batch, Population


class DittoGreedy(Ditto):
    """DittoGreedy: Ditto with, at each local step, the λ that gives the lowest validation loss.

    Args:
        net: The net that clients train: see :class:`Client`. It must not have running statistics
            (BatchNorm). Dropout drops different units in candidate steps and in the actual step.
        lams: The candidates of λ, each ≥ 0; the reference code's are {0.1, 1, 2}.
        lam: λ ≥ 0 of clients with too few validation samples; 1 in the paper, and 0.1 under
            strong attacks.
        min_validation: Validation samples that a client needs to choose λ, ≥ 1; 4 in the paper.
        personal_lr: Learning rate of v; the optimizer's by default.
        personal_steps: s, the minibatch steps on v in a round; as many as on w by default.
        personal_epochs: The work on v in passes over the client's data, instead of
            ``personal_steps``.
        regularizer: The distance of the pull; only ``"l2"`` is accepted.
        global_mu: μ ≥ 0 of FedProx for the global model: adds μ/2 ‖w − w^t‖² to w's own loss.
            A candidate step is one of SGD without momentum and weight decay, at the learning rate
            of v; the optimizer should be the same.
        local_steps: r, the minibatch steps on w in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lams`` is empty, or has a repeated, negative or infinite λ; if
            ``min_validation`` is below 1, ``regularizer`` is not ``"l2"``, or the net has running
            statistics.

    Example:
        >>> client = DittoGreedy(nn.Linear(4, 2), lams=[0.1, 1.0])
        >>> client.trained, client.reads_validation
        (('global', 'personal'), True)
    """

    reads_validation = True
    reads_rates = True
    single_batch_reason = "it tries the optimizer's step on each minibatch"

    def __init__(
        self,
        net: nn.Module,
        lams: Sequence[float] = (0.1, 1.0, 2.0),
        lam: float = 1.0,
        min_validation: int = 4,
        **kwargs: Any,
    ) -> None:
        check_integers(1, min_validation=min_validation)
        check_lams(lams)
        super().__init__(net, lam, **kwargs)
        if self.regularizer != "l2":
            raise ValueError(
                f"Expected argument `regularizer` to be l2 but got {self.regularizer!r}:"
                " DittoGreedy tries steps with the gradient of the squared distance."
            )
        self.refuse_running_statistics("DittoGreedy tries several steps and takes one of them")
        self.candidate_lams = tuple(lams)
        self.min_validation = min_validation

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a local optimizer with several learning rates."""
        super().check(data, population)
        self.refuse_mixed_options("it tries steps with the learning rate of v", "lr")

    def begin(self, client: ClientRound) -> None:
        """Add the candidates of λ to the rows that the local steps read."""
        client.extra["lams"] = client.samples.new_tensor(self.candidate_lams)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return F_k(w) + F_k(v) + λ/2 ‖v − w^t‖² on the minibatch, and the chosen λ."""
        lam = self._best_lam(batch)
        pull = lam / 2 * self.squared_distance("personal")
        loss = self.global_loss(batch) + self.loss("personal", batch) + pull
        return {"loss": loss, "lam": lam}

    def _best_lam(self, batch: Batch) -> Tensor:
        """Return the λ of the step with the lowest loss on the client's validation data."""
        v = {name: tensor.detach() for name, tensor in self.parameters_of("personal").items()}
        gradient = self.gradient_at("personal", v, batch)
        centre, rate = self.tensors("broadcast"), self.read("personal.lr")[0]
        validation, losses = self.validation_batch(batch), []
        if not validation.size:
            return torch.full_like(rate, self.lam)
        with evaluation_mode(self.personal_model):
            for lam in self.candidate_lams:
                moved = {
                    name: v[name] - rate * (gradient[name] + lam * (v[name] - centre[name]))
                    for name in v
                }
                losses.append(self.loss_at("personal", moved, validation))
        lams = self.read("lams")
        lowest = torch.stack(losses).nan_to_num(torch.inf).argmin()
        best = torch.arange(len(lams), device=lams.device) == lowest
        enough = self.read("validation_samples")[0] >= self.min_validation
        return torch.where(enough, torch.where(best, lams, 0).sum(), self.lam)
