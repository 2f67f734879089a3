"""FedPer: the clients share a body, and each keeps a head.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh and S. Choudhary. "Federated learning with
personalization layers". 2019. arXiv 1912.00818.

The model of client k is (W_B, W_Pk). The server averages the base layers W_B (Algorithm 1). The
personalization layers W_Pk stay with the client. The same local steps train both (Algorithm 2).

Departs from the paper:

- All clients begin with the head of the initial global model, not with random heads.
- The aggregator determines the server's mean, uniform by default; the paper weighs by samples.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.heads import list_modules
from pl_fed.nets.rows import RowLayout, trainable_parameters
from pl_fed.types import Batch


class FedPer(Client):
    """FedPer: the clients share a net, except for the parts that each client keeps.

    A client keeps the parameters and running statistics of its own parts, and never sends them. The
    server averages the parameters and running statistics of the shared parts. The server's net is
    not usable by itself, because its own parts keep their initial values.

    Args:
        net: The net that clients train: see :class:`Client`.
        own: Names of submodules or parameters of ``net`` that are a client's own, such as
            ``["layers.5"]``. ``None`` is the head, the last module with trainable parameters. An
            empty list makes it FedAvg; a list of all parts makes it local training.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If the net lacks a part in ``own``, or ``own`` is ``None`` and the net has only
            one module with trainable parameters. Before training, if the loss does not depend on
            the default head.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> FedPer(net).own, FedPer(net, own=["0.weight"]).own
        (('2',), ('0.weight',))
    """

    own_positions: Tensor
    own_statistics: Tensor

    def __init__(self, net: nn.Module, own: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(net, models={"personal": Model(kept=False)}, **kwargs)
        self.own = own_parts(net, own)
        self.default_parts = {"own": self.own} if own is None else {}
        # buffers: an index on the CPU would wait for the GPU
        own_positions = find_positions(RowLayout.from_parameters(net), self.own)
        self.register_buffer("own_positions", own_positions, persistent=False)
        own_statistics = find_positions(RowLayout.from_buffers(net), self.own)
        self.register_buffer("own_statistics", own_statistics, persistent=False)
        self.add_state("own", self._initial_own_parts)

    @property
    def shared_numbers(self) -> int:
        """The number of values that cross the network: all but the client's own parts."""
        return super().shared_numbers - len(self.own_positions) - len(self.own_statistics)

    @property
    def sent_layout(self) -> RowLayout:
        """The layout of an upload without the client's own parts."""
        tensors = self.row("global").tensors.items()
        shared = [(name, tensor) for name, tensor in tensors if not belongs(name, self.own)]
        return RowLayout.from_tensors(shared)

    def _initial_own_parts(self) -> Tensor:
        return self.initial_row()[self.own_positions]

    def begin(self, client: ClientRound) -> None:
        """Put the client's own parts into the broadcast model."""
        personal = client.models["personal"]
        personal.parameters[:, self.own_positions] = client.states["own"]
        own_statistics = personal.statistics[:, self.own_statistics]
        personal.statistics[:] = client.broadcast.statistics
        personal.statistics[:, self.own_statistics] = own_statistics

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return F_k(W_B, W_Pk) on the minibatch."""
        return self.loss("personal", batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Keep the client's own parts, and send the change of the shared parts."""
        personal, broadcast = client.models["personal"], client.broadcast
        client.states["own"] = personal.parameters[:, self.own_positions]
        client.global_statistics = personal.statistics.clone()
        client.global_statistics[:, self.own_statistics] = broadcast.statistics[self.own_statistics]
        upload = personal.parameters - broadcast.parameters
        upload[:, self.own_positions] = 0
        return upload


def own_parts(net: nn.Module, own: Sequence[str] | None, argument: str = "own") -> tuple[str, ...]:
    """Return the names of a client's own parts of a net, checked.

    Args:
        net: The net.
        own: The names; ``None`` for the last module with trainable parameters.
        argument: The name of the argument ``own`` in error messages.

    Raises:
        ValueError: If the net lacks a part in ``own``; if ``own`` is ``None`` and the net has only
            one module with trainable parameters; or if a shared part also uses a parameter of an
            own part.
    """
    names = list(trainable_parameters(net))
    own = [own] if isinstance(own, str) else own
    if own is None:
        modules = list_modules(names)
        if len(modules) == 1:
            raise ValueError(
                f"Expected argument `{argument}` to be a list for a net with only one module with"
                f" trainable parameters ({type(net).__name__}) but got None."
            )
        own = (modules[-1],)
    names += RowLayout.from_buffers(net).names
    for part in own:
        if not any(belongs(name, [part]) for name in names):
            raise ValueError(
                f"Expected argument `{argument}` to list names among {', '.join(names)}, or modules"
                f" that contain them, but got {part!r}."
            )
    _refuse_tied_parameters(net, own, argument)
    return tuple(own)


def _refuse_tied_parameters(net: nn.Module, own: Sequence[str], argument: str) -> None:
    """Refuse a parameter of two names if one is among a client's own parts and one is shared."""
    uses: dict[Tensor, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            uses.setdefault(parameter, []).append(name)
    for names in uses.values():
        if 0 < sum(belongs(name, own) for name in names) < len(names):
            raise ValueError(
                f"Expected argument `{argument}` to list all or none of the names of a parameter"
                f" but got {', '.join(own)}: {' and '.join(names)} are the same parameter."
            )


def find_positions(layout: RowLayout, parts: Sequence[str]) -> Tensor:
    """Return the positions in a row of the parts' tensors, int64; empty without tensors."""
    names = [name for name in layout.names if belongs(name, parts)]
    return layout.positions(*names) if names else torch.empty(0, dtype=torch.int64)


def belongs(name: str, parts: Sequence[str]) -> bool:
    """Return whether a tensor is one of the parts, or belongs to one of them."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
