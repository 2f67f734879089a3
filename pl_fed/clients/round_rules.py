"""Rules for ``begin`` and ``end_round``: the fields of a round that they may only read."""

from collections.abc import Iterator, Mapping

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
        self._before = self._read(client)

    def check(self, client: ClientRound) -> None:
        """Refuse a change of read-only fields by the hook.

        Raises:
            ValueError: If it has; with the name of the field.
        """
        before, after = self._before, self._read(client)
        for name in {**before, **after}:
            tensor, version = before.get(name, (None, 0))
            other, other_version = after.get(name, (None, 0))
            if tensor is other and version == other_version:
                continue
            remedy = _REMEDIES.get(name.partition("[")[0].partition(".")[0], "it is read only")
            raise ValueError(
                f"Expected `{self._hook}` to leave `client.{name}` as it is but got another value:"
                f" {remedy}."
            )

    def _read(self, client: ClientRound) -> dict[str, tuple[Tensor, int]]:
        """Return each read-only tensor and its version, by name."""
        return {name: (tensor, version_of(tensor)) for name, tensor in self._tensors(client)}

    def _tensors(self, client: ClientRound) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the hook may only read, with their names."""
        yield "ids", client.ids
        yield "samples", client.samples
        yield "validation_samples", client.validation_samples
        yield "broadcast.parameters", client.broadcast.parameters
        yield "broadcast.statistics", client.broadcast.statistics
        named = {"lr": client.lr, "server_states": client.server_states}
        if self._hook == "begin":
            named |= {field: getattr(client, field) for field in _END_ROUND_ONLY}
            if client.steps and "global" in client.models:  # an evaluation has no local steps
                yield "models['global']", client.models["global"].parameters
        else:
            named["steps"] = client.steps
        for field, tensors in named.items():
            yield from ((f"{field}[{name!r}]", tensor) for name, tensor in tensors.items())
        for field in ("validation_inputs", "validation_targets"):
            yield from ((field, leaf) for leaf in leaves(getattr(client, field)))
