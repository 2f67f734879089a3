"""FedRep: each client trains its head first, and then the shared body.

L. Collins, H. Hassani, A. Mokhtari and S. Shakkottai. "Exploiting shared representations for
personalized federated learning". ICML 2021. arXiv 2102.07078.

Algorithm 1: in a round each client of the cohort takes τ steps on its head h_i under the broadcast
body φ^t. Then it takes steps on the body under its new head, and sends the body.

Departs from the paper: body and heads begin at the initial global model. The body may take several
steps, as in the paper's experiments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.argument_checks import check_work
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.fedper import FedPer, belongs
from pl_fed.data.batches import LocalWork
from pl_fed.data.client_data import ClientData
from pl_fed.types import Batch, Population


class FedRep(FedPer):
    """FedRep: local work in two phases, first on the client's own head, then on the shared body.

    Head and body are two models of the same net. Local steps train only the own parts of the first
    and only the shared parts of the second. In either phase, the local optimizer (its momentum, for
    example) does not move the other part, with these exceptions:

    - Weight decay acts on the body in all steps.
    - An optimizer that counts its steps counts the head's, too. Adam's bias correction makes its
      first steps large.

    Therefore clients keep no states of local optimizers between rounds
    (``federation.engine.keep_optimizer_state``): a kept momentum of the body would move it while
    the head trains.

    A limit on local steps (``limit_train_batches``) limits both phases together, the head's first.

    Args:
        net: The net that clients train: see :class:`Client`.
        own: Names of the parts of the head; ``None`` is the last module with trainable parameters.
            An empty list makes it FedAvg.
        head_steps: τ, minibatch steps on the head in a round; or give ``head_epochs``. By default
            as much work as on the body.
        head_epochs: The work on the head in passes over the client's data.
        local_steps: Minibatch steps on the body in a round, if the head's work is in steps.
        local_epochs: Passes over the client's data for the body, if the head's work is in epochs; 1
            if neither is given.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If the work is below 1, or one part's is in steps and the other's in epochs. If
            the net lacks a part in ``own``, or ``own`` is ``None`` and the net has only one module
            with trainable parameters. Before training, if clients keep the states of their local
            optimizers.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = FedRep(net, head_steps=3, local_steps=1)
        >>> client.own, client.trained  # "personal" is the body under the head
        (('2',), ('head', 'personal'))
    """

    def __init__(
        self,
        net: nn.Module,
        own: Sequence[str] | None = None,
        head_steps: int | None = None,
        head_epochs: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_work(head_steps, head_epochs, prefix="head")
        super().__init__(net, own, **kwargs)
        body = self.local_work
        if head_steps is None and head_epochs is None:
            head_steps, head_epochs = body.steps, body.epochs
        if (head_steps is None) != (body.steps is None):
            raise ValueError(
                "Expected arguments `head_steps` and `local_steps`, or `head_epochs` and"
                f" `local_epochs`, in the same unit but got {head_steps or head_epochs}"
                f" {'epochs' if head_steps is None else 'steps'} on the head and"
                f" {body.steps or body.epochs} {'epochs' if body.steps is None else 'steps'} on"
                " the body."
            )
        if self.own:
            head = LocalWork(head_steps, head_epochs or 1)
            self.set_models(
                {
                    "head": Model(kept=False, evaluated=False, work=head),
                    "personal": Model(kept=False, work=_add_work(head, body)),
                }
            )

    @property
    def root_work(self) -> tuple[str, LocalWork]:
        """The body's optimizer and local work: the root's length is that of a body's change."""
        return ("personal", self.local_work) if self.own else super().root_work

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse states of local optimizers that clients keep: they move the body too early."""
        super().check(data, population)
        if self.own and self.keeps_optimizer_state:
            raise ValueError(
                "Expected `federation.engine.keep_optimizer_state` to be false for FedRep but got"
                " true: the kept state of the body's optimizer would move the body while the head"
                " trains."
            )

    def begin(self, client: ClientRound) -> None:
        """Begin with the broadcast body and the client's own head."""
        super().begin(client)
        if self.own:
            client.models["head"].parameters[:, self.own_positions] = client.states["own"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(φ, h_k); it moves the head in the first τ steps, and then the body."""
        if not self.own:
            return self.loss("personal", batch)
        is_head_phase = batch_idx < self.read("head.steps")[0]
        head, body = self.parameters_of("head"), self.parameters_of("personal")
        at = {
            name: head[name]  # its optimizer group takes no steps after its phase
            if belongs(name, self.own)
            else torch.where(is_head_phase, body[name].detach(), body[name])
            for name in body
        }
        return self.loss_at("personal", at, batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Keep the head, and send the change of the body."""
        if self.own:
            head = client.models["head"].parameters[:, self.own_positions]
            client.models["personal"].parameters[:, self.own_positions] = head
        return super().end_round(client)


def _add_work(head: LocalWork, body: LocalWork) -> LocalWork:
    """Return the work of both phases together."""
    if head.steps is None or body.steps is None:
        return LocalWork(None, head.epochs + body.epochs)
    return LocalWork(head.steps + body.steps)
