"""Undoes the changes of an evaluation in modules and in generators of random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import kept_parts, lay_rows
from pl_fed.clients.model_guard import restore_models
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.nets.kept_values import Part, ValueGuard
from pl_fed.nets.modes import list_shortened_weights
from pl_fed.preflight.step_rules import refuse_evaluation_changes
from pl_fed.random import fork_all_generators, key


class RestoredValues:
    """Restored values: undoes the changes of an evaluation, so that training does not see them.

    Args:
        client: The algorithm.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._parts: list[Part] | None = None
        self._guard: ValueGuard | None = None  # of the evaluation that runs now
        # after each client; until an evaluation of a net without steps has changed nothing
        self._restores = True
        self._has_changes = False
        self._changed_values: set[str] = set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Undo the changes of an evaluation at its end; its draws are the same in each evaluation.

        Raises:
            ValueError: If the evaluation changes an option of the optimizer or the trainer.
        """
        if self._guard is not None:
            yield
            return
        if self._parts is None:
            self._parts = kept_parts(self.client)
        with (
            fork_all_generators(self.client.device) as seed,
            self.client.draws.without_key(),
        ):
            seed(key(0, "evaluation"))
            lay_rows(self.client)
            self._guard = ValueGuard(self._parts, self._list_loaded_buffers())
            options = OptionGuard.guard_trainer(self.client)
            self._changed_values.clear()
            shortens = list_shortened_weights(self.client.global_model)
            try:
                with restore_models(self.client, ["global"]) if shortens else nullcontext():
                    yield
            finally:
                self._changed_values |= {*self._guard.restore()}
                self._has_changes |= bool(self._changed_values)
                # a step may begin to change values in a later round
                self._restores = self._has_changes or self.client.task.runs_steps
                self._guard = None
                changed_options = options.restore()
        net = type(self.client.global_model).__name__
        refuse_evaluation_changes("validation_step", net, self._changed_values, changed_options)

    def _list_loaded_buffers(self) -> list[Tensor]:
        """Return the running statistics of models that are loaded client by client."""
        names = [name for name in self.client.models if name != "global"]
        rows = [self.client.statistics(name) for name in names]
        return [tensor for row in rows for tensor in row.tensors.values()]

    def restore(self) -> None:
        """Undo the changes by the last batch or client, so that no other one sees them."""
        if self._guard is not None and self._restores:
            self._changed_values |= {*self._guard.restore()}
            self._has_changes |= bool(self._changed_values)
