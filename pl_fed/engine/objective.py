"""``training_step`` as a function of tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.engine.base import as_outputs
from pl_fed.functional.calls import functional_call
from pl_fed.types import Batch


class Objective:
    """A client's ``training_step``, with the tensors that it reads from outside given to it.

    Args:
        client: The algorithm; it is left as it was.

    Attributes:
        read: Names of the rows that were read.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.read: set[str] = set()
        self._module = _TrainingStep(client)

    def __call__(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        batch: Batch,
        index: int | Tensor,
        draw: Tensor | int,
        centres: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Return what ``training_step`` gives for ONE client.

        Args:
            tensors: For each model its parameters (and buffers) by name.
            batch: The minibatch.
            index: Which local step it is: ``batch_idx``.
            draw: The key under which the client's layers draw.
            centres: Rows of the round by name; those of a model's length as a dict of tensors.
        """
        named = {
            f"client.{model}_model.{name}": tensor
            for model, group in tensors.items()
            for name, tensor in group.items()
        }
        self.client.draws.start(draw)
        self.client.centres = _Noted(centres, self.read)
        try:
            return functional_call(self._module, named, (batch, index))  # type: ignore[no-any-return]
        finally:
            self.client.draws.start(0)
            self.client.centres = {}


class _Noted(dict[str, Any]):
    """Rows by name, and a note of those that are read."""

    def __init__(self, rows: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(rows)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


class _TrainingStep(nn.Module):
    """A client whose forward is ``training_step``: what ``functional_call`` can swap tensors in."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client

    def forward(self, batch: Batch, index: int) -> dict[str, Tensor]:
        return as_outputs(self.client.training_step(batch, index))
