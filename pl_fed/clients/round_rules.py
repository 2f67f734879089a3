"""Rules for the hooks of a round: the fields of a round that they may only read."""

from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_
from typing import Any

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
    "preparation_steps": "it is read in `begin` alone, so change it there",
}
_Fields = dict[str, dict[Any, Tensor]]  # the tensors of each field of the round by key
_END_ROUND_ONLY = ("validation_losses", "validation_scores", "step_means")


def call_hook(name: str, hook: Callable[[ClientRound], Any], client: ClientRound) -> Any:
    """Call ``begin``, ``end_preparation`` or ``end_round`` of an algorithm; return its result.

    pl_fed's own hooks are not checked in each round: tests hold them to the same rule.

    Args:
        name: ``"begin"``, ``"end_preparation"`` or ``"end_round"``.
        hook: The hook.
        client: The round.

    Raises:
        ValueError: If the hook changes a field of the round that it may only read.
    """
    if getattr(hook, "__module__", "").startswith("pl_fed."):
        return hook(client)
    read_only = ReadOnlyFields(name, client)
    result = hook(client)
    read_only.check(client)
    return result


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


def read_preparation_steps(client: ClientRound, model: str) -> list[int]:
    """Return the numbers of steps of the preparation on a model; ``begin`` may set them.

    Args:
        client: The round after ``begin``.
        model: The name of a prepared model.

    Raises:
        ValueError: If they are no integers [clients, 1], at least 0.
    """
    rows = client.preparation_steps.get(model)
    return _read_counts(rows, model, len(client), "preparation_steps")


def _read_counts(rows: object, model: str, clients: int, field: str = "steps") -> list[int]:
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
        f"Expected `begin` to set `client.{field}[{model!r}]` to integers of shape [clients, 1], at"
        f" least 0, but got {got}: round them with .round().long()."
    )


class ReadOnlyFields:
    """Read-only fields: finds a hook that changes a field of the round that it may only read.

    Nothing reads such a change, or it reaches other clients: ``end_round`` would then read numbers
    that no local step has used. Changes are found by the identity and the version of each tensor,
    without reading their numbers.

    Args:
        hook: ``"begin"``, ``"end_preparation"`` or ``"end_round"``.
        client: The round before the hook.
    """

    def __init__(self, hook: str, client: ClientRound) -> None:
        self._hook = hook
        self._before = self._read_fields(client)
        self._tensors = _list_tensors(self._before)
        self._versions = _read_versions(self._tensors)

    def check(self, client: ClientRound) -> None:
        """Refuse a change of read-only fields by the hook.

        Raises:
            ValueError: If it has; with the name of the field.
        """
        after = self._read_fields(client)
        tensors = _list_tensors(after)
        is_same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if is_same and self._versions == _read_versions(tensors):
            return
        name = self._find_changed(after)
        field = name.partition(".")[0].partition("[")[0]
        raise ValueError(
            f"Expected `{self._hook}` to leave `client.{name}` as it is but got another value:"
            f" {_REMEDIES.get(field, 'it is read only')}."
        )

    def _find_changed(self, after: _Fields) -> str:
        """Return the name of the first field, with its key, that differs."""
        stamps: list[dict[str, tuple[int, int]]] = [
            dict(zip(_name_tensors(self._before), zip(map(id, self._tensors), self._versions))),
            dict(zip(_name_tensors(after), map(_stamp, _list_tensors(after)))),
        ]
        names = {**stamps[0], **stamps[1]}
        return next(name for name in names if stamps[0].get(name) != stamps[1].get(name))

    def _read_fields(self, client: ClientRound) -> _Fields:
        """Return the fields that the hook may only read, each with its tensors by key."""
        fields: _Fields = {
            "": {
                "ids": client.ids,
                "samples": client.samples,
                "validation_samples": client.validation_samples,
                "broadcast.parameters": client.broadcast.parameters,
                "broadcast.statistics": client.broadcast.statistics,
            },
            "lr": dict(client.lr),
            "server_states": dict(client.server_states),
        }
        if client.class_counts is not None:
            fields[""]["class_counts"] = client.class_counts
        if client.validation_inputs is not None:
            for field in ("validation_inputs", "validation_targets"):
                fields[field] = dict(enumerate(leaves(getattr(client, field))))
        if self._hook == "end_round":
            return {**fields, "steps": dict(client.steps)}
        if self._hook == "end_preparation":
            steps = {"steps": client.steps, "preparation_steps": client.preparation_steps}
            fields |= {name: dict(rows) for name, rows in steps.items()}
        if client.steps and "global" in client.models:  # an evaluation has no local steps
            fields["models"] = {"global": client.models["global"].parameters}
        for field in _END_ROUND_ONLY:
            fields[field] = dict(getattr(client, field))
        return fields


def _name_tensors(fields: _Fields) -> list[str]:
    """Return the names of the tensors of fields, such as ``lr['global']``."""
    return [
        f"{field}[{key!r}]" if field else str(key)
        for field, tensors in fields.items()
        for key in tensors
    ]


def _list_tensors(fields: _Fields) -> list[Tensor]:
    """Return the tensors of fields, in the order of their names."""
    return list(chain.from_iterable(map(dict.values, fields.values())))


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Return the identity of a tensor and its number of changes in place."""
    return id(tensor), version_of(tensor)


def _read_versions(tensors: list[Tensor]) -> list[int]:
    """Return the numbers of changes in place of tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # a tensor of an inference
        return [version_of(tensor) for tensor in tensors]
