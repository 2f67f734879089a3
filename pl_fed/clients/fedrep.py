"""FedRep: first the head of one's own, then the shared body.

L. Collins, H. Hassani, A. Mokhtari and S. Shakkottai. "Exploiting shared representations for
personalized federated learning". ICML 2021. arXiv 2102.07078.

Algorithm 1: in a round each client of the cohort takes τ steps on its head h_i under the body φ^t
that it was sent, then steps on the body under the head that it has now, and sends the body.

Departs from the paper: both begin at the first global model, and the body may take several steps,
as in the paper's experiments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.argument_checks import check_work
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.fedper import FedPer, belongs
from pl_fed.data.batches import LocalWork
from pl_fed.types import Batch


class FedRep(FedPer):
    """Local work in two parts: on one's own head, and then on the shared body.

    Head and body are two models of the same net, of which only the one's own and only the other's
    shared parts are trained, so that the local optimizer (its momentum, say) has no say in the part
    whose turn it is not. But weight decay pulls the body in all steps, and an optimizer that counts
    its steps (Adam, whose first ones its bias correction makes large) counts the head's, too. A
    limit on local steps (``limit_train_batches``) is one on both together: the head has its turn
    first.

    Args:
        net: See :class:`FedPer`, as for all that is not named here.
        own: Names of the parts that make the head; ``None`` is the last module with trainable
            parameters. With none of them it is FedAvg.
        head_steps: τ, minibatch steps on the head in a round; or give ``head_epochs``. As much work
            as on the body by default.
        head_epochs: The same, counted in passes over the client's data.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``criterion``; ``local_steps`` or
            ``local_epochs``, the work on the body, counted as that on the head is.

    Raises:
        ValueError: If the work is below 1, or counted in two ways; and as :class:`FedPer`.
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
                f" `local_epochs`, to be given together but got {head_steps or head_epochs}"
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

    def begin(self, client: ClientRound) -> None:
        """Begin with the body that the server sent, and with the head that was kept."""
        super().begin(client)
        if self.own:
            client.models["head"].parameters[:, self.own_places] = client.states["own"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(φ, h_k), which falls on the head in the first τ steps, then on the body."""
        if not self.own:
            return self.loss("personal", batch)
        turn_of_head = batch_idx < self.read("head.steps")[0]
        head, body = self.parameters_of("head"), self.parameters_of("personal")
        at = {
            name: head[name]  # which stands still after its turn
            if belongs(name, self.own)
            else torch.where(turn_of_head, body[name].detach(), body[name])
            for name in body
        }
        return self.loss_at("personal", at, batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Keep the head, and send how the body has changed."""
        if self.own:
            head = client.models["head"].parameters[:, self.own_places]
            client.models["personal"].parameters[:, self.own_places] = head
        return super().end_round(client)


def _add_work(head: LocalWork, body: LocalWork) -> LocalWork:
    """Return the work of the body, which stands still as long as the head is trained."""
    if head.steps is None or body.steps is None:
        return LocalWork(None, head.epochs + body.epochs)
    return LocalWork(head.steps + body.steps)
