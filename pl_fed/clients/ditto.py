"""Ditto: a global model, and a personal model of each client with a pull to the global one.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221.

The objective (section 3.1): min over v_k of h_k(v_k; w*) = F_k(v_k) + λ/2 ‖v_k − w*‖², where w*
minimises the global objective. The joint solver (Algorithms 1 and 2): in round t each client of the
cohort takes r steps on F_k from w^t and sends the change. It also takes s steps on h_k(·; w^t) from
its v_k.

Any solver may find the global model (section 3.2, "Modularity"), because it does not depend on the
personal models. Aggregators and server optimizers are settings of the federation, and ``global_mu``
selects FedProx's local problems. :class:`pl_fed.clients.Finetuning` is the other solver: it trains
the personal models after the global one.

Departs from the paper: as in the reference code, both models take a step on each minibatch, in
turn. The pull is to w^t, the model at the start of the round. The updates are independent of each
other, so the order of the steps does not matter.
"""

from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative
from pl_fed.clients.argument_checks import check_work
from pl_fed.clients.contract import Model
from pl_fed.clients.pulled import Pulled, Regularizer
from pl_fed.data.batches import LocalWork
from pl_fed.types import Batch


class Ditto(Pulled):
    """Ditto with the joint solver: Algorithm 1, and with FedAvg as global solver Algorithm 2.

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ ≥ 0, the strength of the pull: 0 trains local models, a large λ copies w.
        personal_lr: Learning rate of v; the optimizer's by default.
        personal_steps: s, the minibatch steps on v in a round; as many as on w by default.
        personal_epochs: The work on v in passes over the client's data, instead of
            ``personal_steps``.
        regularizer: The distance of the pull: ``"l2"``, ``"fisher"`` or ``"kl"``; see
            :class:`Pulled`.
        global_mu: μ ≥ 0 of FedProx for the global model: adds μ/2 ‖w − w^t‖² to w's own loss.
        local_steps: r, the minibatch steps on w in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lam``, ``personal_lr`` or ``global_mu`` is negative or infinite, the work
            is below 1, or ``regularizer`` is unknown.

    Example:
        >>> from torch.optim import SGD
        >>> sgd = lambda parameters: SGD(parameters, lr=0.1)
        >>> client = Ditto(nn.Linear(4, 2), lam=0.5, optimizer=sgd, local_epochs=2)
        >>> client.trained, list(client.state_defaults())  # v_k is kept
        (('global', 'personal'), ['personal', 'personal.statistics'])
    """

    def __init__(
        self,
        net: nn.Module,
        lam: float = 1.0,
        personal_lr: float | None = None,
        personal_steps: int | None = None,
        personal_epochs: int | None = None,
        regularizer: Regularizer = "l2",
        global_mu: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_nonnegative(global_mu=global_mu)
        if personal_lr is not None:
            check_nonnegative(personal_lr=personal_lr)
        check_work(personal_steps, personal_epochs, prefix="personal")
        work = None
        if personal_steps is not None or personal_epochs is not None:
            work = LocalWork(personal_steps, personal_epochs or 1)
        models = {"global": Model(), "personal": Model(work=work, lr=personal_lr)}
        super().__init__(net, models=models, lam=lam, regularizer=regularizer, **kwargs)
        self.global_mu = global_mu

    def lams(self) -> dict[str, float]:
        """Return the λ of each trained personal model, by the model's name."""
        return {"personal": self.lam}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return F_k(w) + F_k(v) + λ/2 ‖v − w^t‖² on the minibatch."""
        return self.global_loss(batch) + self.pulled_loss(batch, self.lams())

    def global_loss(self, batch: Batch) -> Tensor:
        """Return F_k(w) on the minibatch, plus FedProx's term if μ > 0."""
        loss = self.loss("global", batch)
        if self.global_mu:
            loss = loss + self.global_mu / 2 * self.squared_distance("global")
        return loss
