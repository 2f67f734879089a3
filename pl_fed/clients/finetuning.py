"""Finetuning: a global model, and personal models that start from it before each evaluation.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221. Section 3.2 and Appendix D.1 describe this solver of
Ditto's objective: it first obtains w*, and then minimises h_k(·; w*) = F_k(v) + λ/2 ‖v − w*‖² from
w* for each client.

With λ = 0 it is the baseline "finetuning" of Tables 2 and 8. With ``regularizer`` ``"fisher"`` and
``"kl"`` it is the baselines EWC and SKL (Appendix C.2). EWC is that of T. Yu, E. Bagdasaryan and
V. Shmatikov, "Salvaging federated learning by local adaptation", arXiv 2002.04758.

Every evaluation finetunes the current global model; clients keep no personal model.

Departs from the paper:

- The Fisher information is estimated on each minibatch; the reference code estimates it once,
  before the finetuning.
- The reference code takes max(⌊i n_k / b⌋, i) steps of minibatches of b. Here ``finetune_epochs``
  of i takes i ⌈n_k / b⌉ steps, or i max(⌊n_k / b⌋, 1) with ``drop_last``. The numbers agree if b
  divides n_k or exceeds it; otherwise they differ by at most i.
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
    """Finetuning: FedAvg, and before each evaluation a personal model trained from the global one.

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ ≥ 0, the strength of the pull to the global model; 0 is plain finetuning.
        finetune_epochs: Passes over the client's training data; 0 leaves the personal model equal
            to the global one. By default 1, unless ``finetune_steps`` is given; the paper takes 50.
        finetune_steps: Minibatch steps of the finetuning, instead of ``finetune_epochs``.
        finetune_lr: Learning rate of the finetuning; the optimizer's before any schedule by
            default.
        regularizer: The distance of the pull: ``"l2"``, ``"fisher"`` or ``"kl"``; see
            :class:`Pulled`.
        local_steps: Minibatch steps on w in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lam`` or ``finetune_lr`` is negative or infinite, ``finetune_steps`` or
            ``finetune_epochs`` is negative or both are given, or ``regularizer`` is unknown.

    Example:
        >>> client = Finetuning(nn.Linear(4, 2), finetune_epochs=5)
        >>> client.trained, client.adaptation.trained
        (('global',), ('personal',))
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
        if finetune_lr is not None:
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
