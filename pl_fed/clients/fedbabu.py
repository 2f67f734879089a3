"""FedBABU: clients train a common body under a common, frozen head, and tune both afterwards.

J. Oh, S. Kim and S.-Y. Yun. "FedBABU: Toward enhanced representation for federated image
classification". ICLR 2022. arXiv 2106.06042.

The net is a body θ and a head h. All clients begin with the same random head h⁰, and nobody changes
it during federated training (Algorithm 1). In a round, a client takes local steps on the body::

    θ_k ← θ_k − η ∇_θ F_k(θ_k, h⁰)

and the server averages the θ_k. Before an evaluation, a client tunes (θ, h⁰) on its own data.

Departs from the paper and from published code:

- The head has the broadcast's values in each step. Thus neither weight decay nor momentum moves it,
  as in the authors' code, where its learning rate is 0. FL-bench sets its gradient to 0, so that
  weight decay and the momentum of earlier steps still move it.
- Every evaluation tunes the current global model; clients keep no personal model. The authors tune
  the final model.
- PFLlib tunes for 10 epochs, the default here.
"""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.clients.argument_checks import check_work
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, Objective
from pl_fed.clients.fedper import belongs, find_positions, own_parts
from pl_fed.data.batches import LocalWork
from pl_fed.nets.rows import RowLayout
from pl_fed.types import Batch


class FedBABU(Client):
    """FedBABU: FedAvg of the body under a frozen head, and a tuned net before each evaluation.

    The global model consists of the trained body and the initial head. Only the parameters of the
    body cross the network, with the running statistics of the whole net.

    Args:
        net: The net that clients train: see :class:`Client`.
        head: Names of submodules or parameters of ``net`` that are the head, such as
            ``["layers.5"]``. ``None`` is the last module with trainable parameters. An empty list
            makes it :class:`Finetuning` of FedAvg.
        finetune_part: The part that is tuned before an evaluation: the whole ``"net"``, the
            ``"head"`` or the ``"body"``. With a part only, the tuning has no weight decay.
        finetune_epochs: Passes over the client's training data; 0 leaves the personal model equal
            to the global one. By default 10, unless ``finetune_steps`` is given.
        finetune_steps: Minibatch steps of the tuning, instead of ``finetune_epochs``.
        finetune_lr: Learning rate of the tuning; the optimizer's before any schedule by default.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``finetune_part`` is unknown, ``finetune_lr`` is negative or infinite, or
            ``finetune_steps`` or ``finetune_epochs`` is negative or both are given. If the net
            lacks a part in ``head``, the head is the whole net, or ``head`` is ``None`` and the net
            has only one module with trainable parameters.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = FedBABU(net, finetune_epochs=5)
        >>> client.head_parts, client.trained, client.adaptation.trained
        (('2',), ('global',), ('personal',))
        >>> client.upload_numbers  # 4 * 5 weights and 5 biases of the body
        25
    """

    head_positions: Tensor

    def __init__(
        self,
        net: nn.Module,
        head: Sequence[str] | None = None,
        finetune_part: Literal["net", "head", "body"] = "net",
        finetune_epochs: int | None = None,
        finetune_steps: int | None = None,
        finetune_lr: float | None = None,
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(), "personal": Model(trained=False, kept=False)}
        super().__init__(net, models=models, **kwargs)
        check_choice(("net", "head", "body"), finetune_part=finetune_part)
        if finetune_lr is not None:
            check_nonnegative(finetune_lr=finetune_lr)
        self.head_parts = own_parts(net, head, argument="head")
        self.default_parts = {"head": self.head_parts} if head is None else {}
        layout = RowLayout.from_parameters(net)
        head_positions = find_positions(layout, self.head_parts)
        self.register_buffer("head_positions", head_positions, persistent=False)
        if len(self.head_positions) == layout.numel:
            raise ValueError(
                "Expected argument `head` to leave a body to train but got"
                f" {', '.join(self.head_parts)}, which is the whole net: name its last layer."
            )
        self.finetune_part = finetune_part
        if {finetune_epochs, finetune_steps} != {0, None}:
            check_work(finetune_steps, finetune_epochs, prefix="finetune")
            work = LocalWork(finetune_steps, 10 if finetune_epochs is None else finetune_epochs)
            options = {} if finetune_part == "net" else {"weight_decay": 0.0}
            personal = Model(work=work, lr=finetune_lr, options=options)
            self.adaptation = Objective(
                self.adaptation_step, {"personal": personal}, self.optimizer
            )

    @property
    def shared_numbers(self) -> int:
        """The number of values that cross the network: all but the head's parameters."""
        return super().shared_numbers - len(self.head_positions)

    @property
    def sent_layout(self) -> RowLayout:
        """The layout of an upload without the head."""
        tensors = self.row("global").tensors.items()
        body = [(name, tensor) for name, tensor in tensors if not belongs(name, self.head_parts)]
        return RowLayout.from_tensors(body)

    @property
    def frozen_parameters(self) -> tuple[str, ...]:
        """The names of the head's parameters."""
        names = self.row("global").layout.names
        return tuple(name for name in names if belongs(name, self.head_parts))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(θ, h⁰) on the minibatch."""
        head, parameters = self.tensors("broadcast"), self.parameters_of("global")
        at = {
            name: head[name] if belongs(name, self.head_parts) else tensor
            for name, tensor in parameters.items()
        }
        return self.loss_at("global", at, batch)

    def adaptation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(θ, h) on the minibatch; only the tuned part moves."""
        if self.finetune_part == "net":
            return self.loss("personal", batch)
        tunes_head = self.finetune_part == "head"
        at = {
            name: tensor if belongs(name, self.head_parts) == tunes_head else tensor.detach()
            for name, tensor in self.parameters_of("personal").items()
        }
        return self.loss_at("personal", at, batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Send the change of the body."""
        upload = client.models["global"].parameters - client.broadcast.parameters
        upload[:, self.head_positions] = 0
        return upload
