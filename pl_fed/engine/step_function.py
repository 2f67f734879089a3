"""An objective as a function of tensors."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.engine.base import as_outputs
from pl_fed.nets.calls import swap_tensors
from pl_fed.types import Batch

_Result = TypeVar("_Result")


class StepFunction:
    """Step function: the step of an objective as a function of models, batch and rows.

    Args:
        client: The algorithm; a call does not change it.
        objective: The objective; ``objective.step`` is a method of the client.

    Attributes:
        rows_read: Names of the rows that the step has read.
    """

    def __init__(self, client: Client, objective: Objective) -> None:
        self.client = client
        self.objective = objective
        self.rows_read: set[str] = set()

    def __call__(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        batch: Mapping[str, Any],
        index: int | Tensor,
        draw: Tensor | int,
        rows: Mapping[str, Any],
        read: Callable[[dict[str, Tensor]], _Result] | None = None,
    ) -> _Result | dict[str, Tensor]:
        """Return the outputs of the step for ONE client, or a function of them.

        Args:
            tensors: The parameters (and buffers) of each model, by model and name.
            batch: The fields of the minibatch: see :class:`~pl_fed.types.Batch`.
            index: The index of the local step, ``batch_idx``.
            draw: The key of the random draws of the client's layers.
            rows: The rows that the step may read, by name; rows as long as a model are dicts of
                tensors.
            read: A function of the outputs. It is called while the models have the given tensors:
                a backward pass may read them again, as with activation checkpoints.
        """
        named = {
            f"{model}_model.{name}": tensor
            for model, group in tensors.items()
            for name, tensor in group.items()
        }
        recording_rows = _RecordingRows(rows, self.rows_read)
        self.client.draws.start(draw)
        try:
            with self.client.reading(recording_rows), swap_tensors(self.client, named):
                # a traced step gets its index as a tensor
                outputs = as_outputs(self.objective.step(Batch(**batch), cast(int, index)))
                return outputs if read is None else read(outputs)
        finally:
            self.client.draws.start(0)


class _RecordingRows(dict[str, Any]):
    """Recording rows: rows by name that record every name that is read."""

    def __init__(self, rows: Mapping[str, Any], rows_read: set[str]) -> None:
        super().__init__(rows)
        self.rows_read = rows_read

    def __getitem__(self, name: str) -> Any:
        self.rows_read.add(name)
        return super().__getitem__(name)
