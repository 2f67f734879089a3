"""Finetuning: a global model first, and from it a personal one for each client.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221. Section 3.2 and Appendix D.1: the solver of Ditto's
objective that first obtains w*, and then minimises h_k(·; w*) = F_k(v) + λ/2 ‖v − w*‖² from w* for
each client. With λ = 0 it is the baseline "finetuning" of Tables 2 and 8; with ``regularizer``
``"fisher"`` and ``"kl"`` the baselines EWC and SKL (Appendix C.2). The former is that of T. Yu,
E. Bagdasaryan and V. Shmatikov, "Salvaging federated learning by local adaptation", arXiv
2002.04758.

Every evaluation finetunes the global model of the moment; nothing personal is kept.

Departs from the paper: the Fisher information is estimated anew by each minibatch, and once before
the finetuning in the reference code. This also takes max(⌊i n_k / b⌋, i) steps of minibatches of b;
``finetune_epochs`` of i takes i ⌈n_k / b⌉, or i max(⌊n_k / b⌋, 1) with ``drop_last``: as many where
b divides n_k or exceeds it, else up to i more, or up to i fewer.
"""

from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative
from pl_fed.clients.argument_checks import check_work
from pl_fed.clients.contract import Model, Objective
from pl_fed.clients.pulled import Pulled, Regularizer
from pl_fed.data.batches import LocalWork
from pl_fed.types import Batch


class Finetuning(Pulled):
    """FedAvg, and before each evaluation every client's own model, trained from the global one.

    Args:
        net: See :class:`Client`, as for all that is not named here.
        lam: λ ≥ 0, the strength of the pull to the global model; 0 is plain finetuning.
        finetune_epochs: Passes over the client's training data; 0 leaves the global model as it
            is. 1 if ``finetune_steps`` are not given either; the paper takes 50.
        finetune_steps: The same, counted in minibatch steps.
        finetune_lr: Learning rate of the finetuning; the optimizer's own by default, as it is
            before any schedule.
        regularizer: What v is pulled by: ``"l2"``, ``"fisher"`` or ``"kl"``; see :class:`Pulled`.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps``, ``local_epochs``, ``criterion``.

    Raises:
        ValueError: If ``lam`` or ``finetune_lr`` is negative or infinite, the finetuning is
            negative or counted twice, or ``regularizer`` unknown.
    """

    def __init__(
        self,
        net: nn.Module,
        lam: float = 0.0,
        finetune_epochs: int | None = None,
        finetune_steps: int | None = None,
        finetune_lr: float | None = None,
        regularizer: Regularizer = "l2",
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(), "personal": Model(trained=False, kept=False)}
        super().__init__(net, models=models, lam=lam, regularizer=regularizer, **kwargs)
        check_nonnegative(finetune_lr=finetune_lr)
        if {finetune_epochs, finetune_steps} != {0, None}:
            check_work(finetune_steps, finetune_epochs, prefix="finetune")
            work = LocalWork(finetune_steps, finetune_epochs or 1)
            personal = Model(work=work, lr=finetune_lr)
            self.adaptation = Objective(
                self.adaptation_step, {"personal": personal}, self.optimizer
            )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) on the minibatch."""
        return self.loss("global", batch)

    def adaptation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v) + λ/2 ‖v − w‖² on the minibatch."""
        return self.pulled_loss(batch, {"personal": self.lam})
