"""Rules for ``begin`` and ``end_round``: the fields of a round that they may only read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pl_fed.clients.contract import ClientRound
from pl_fed.nets.kept_values import version_of
from pl_fed.trees import leaves

_REMEDIES = {
    "lr": "the optimizer has the learning rate, so set it by Model(lr=...) or by a schedule of"
    " `configure_optimizers`, or scale the loss",
    "server_states": "only the server moves them, so write client.proposals",
    "broadcast": "all clients share it, so write client.models of a personal model",
    "models": "it begins each round at the broadcast, so write a personal model",
    "steps": "it is read in `begin` alone, so change it there",
}
_Entry = tuple[str, str | None, Tensor]  # a field of the round, the key in it, and the tensor
_END_ROUND_ONLY = ("validation_losses", "validation_scores", "step_means")


class StepRows:
    """Step rows: the planned numbers of local steps; ``begin`` may change them.

    Args:
        planned: The planned numbers of steps of each client, by trained model, [clients, 1] each.
    """

    def __init__(self, planned: Mapping[str, Tensor]) -> None:
        self._planned = {model: (rows, version_of(rows)) for model, rows in planned.items()}

    def read_changed(self, client: ClientRound) -> dict[str, list[int]]:
        """Return the changed numbers of steps of each client, by trained model.

        Only changed numbers are read: reading them waits for a GPU.

        Args:
            client: The round after ``begin``.

        Raises:
            ValueError: If they are no integers [clients, 1], at least 0, of the trained models.
        """
        models = ", ".join(self._planned)
        if set(client.steps) != set(self._planned):
            raise ValueError(
                f"Expected `begin` to leave `client.steps` for the trained models ({models}) but"
                f" got {', '.join(client.steps) or 'none'}: change the rows of these models alone."
            )
        changed = {}
        for model, (rows, version) in self._planned.items():
            now = client.steps[model]
            if now is not rows or version_of(now) != version:
                changed[model] = _read_counts(now, model, len(client))
        return changed


def _read_counts(rows: object, model: str, clients: int) -> list[int]:
    """Return numbers of steps [clients, 1] as a list."""
    got = type(rows).__name__
    if isinstance(rows, Tensor):
        got = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
        is_integer = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
        if is_integer and rows.shape == (clients, 1):
            counts: list[int] = rows.flatten().tolist()
            if min(counts, default=0) >= 0:
                return counts
            got = f"{min(counts)}"
    raise ValueError(
        f"Expected `begin` to set `client.steps[{model!r}]` to integers of shape [clients, 1], at"
        f" least 0, but got {got}: round them with .round().long()."
    )


class ReadOnlyFields:
    """Read-only fields: finds a hook that changes a field of the round that it may only read.

    Nothing reads such a change, or it reaches other clients: ``end_round`` would then read numbers
    that no local step has used. Changes are found by the identity and the version of each tensor,
    without reading their numbers.

    Args:
        hook: ``"begin"`` or ``"end_round"``.
        client: The round before the hook.
    """

    def __init__(self, hook: str, client: ClientRound) -> None:
        self._hook = hook
        self._before = self._list_tensors(client)
        self._versions = _read_versions(self._before)

    def check(self, client: ClientRound) -> None:
        """Refuse a change of read-only fields by the hook.

        Raises:
            ValueError: If it has; with the name of the field.
        """
        after = self._list_tensors(client)
        is_same = len(after) == len(self._before) and all(
            now is then for (*_, now), (*_, then) in zip(after, self._before)
        )
        if is_same and self._versions == _read_versions(after):
            return
        field, key = self._find_changed(after)
        name = field if key is None else f"{field}[{key!r}]"
        raise ValueError(
            f"Expected `{self._hook}` to leave `client.{name}` as it is but got another value:"
            f" {_REMEDIES.get(field.partition('.')[0], 'it is read only')}."
        )

    def _find_changed(self, after: list[_Entry]) -> tuple[str, str | None]:
        """Return the field, and the key in it, of the first change."""
        stamps = [
            {(field, key): (id(tensor), version) for (field, key, tensor), version in pairs}
            for pairs in (
                zip(self._before, self._versions),
                zip(after, _read_versions(after)),
            )
        ]
        names = {**stamps[0], **stamps[1]}
        return next(name for name in names if stamps[0].get(name) != stamps[1].get(name))

    def _list_tensors(self, client: ClientRound) -> list[_Entry]:
        """Return the tensors that the hook may only read, with their fields and keys."""
        tables = {"lr": client.lr, "server_states": client.server_states}
        if self._hook == "begin":
            tables |= {field: getattr(client, field) for field in _END_ROUND_ONLY}
            if client.steps and "global" in client.models:  # an evaluation has no local steps
                tables["models"] = {"global": client.models["global"].parameters}
        else:
            tables["steps"] = client.steps
        return [
            ("ids", None, client.ids),
            ("samples", None, client.samples),
            ("validation_samples", None, client.validation_samples),
            ("broadcast.parameters", None, client.broadcast.parameters),
            ("broadcast.statistics", None, client.broadcast.statistics),
            *((field, key, rows) for field, table in tables.items() for key, rows in table.items()),
            *(("validation_inputs", None, leaf) for leaf in leaves(client.validation_inputs)),
            *(("validation_targets", None, leaf) for leaf in leaves(client.validation_targets)),
        ]


def _read_versions(entries: list[_Entry]) -> list[int]:
    """Return the numbers of changes in place of tensors."""
    try:
        return [tensor._version for *_, tensor in entries]
    except RuntimeError:  # a tensor of an inference
        return [version_of(tensor) for *_, tensor in entries]
