"""Broken clients of a round: too many of them end the run."""

import math
from collections.abc import Mapping

from torch import Tensor

from pl_fed.rounds.trained_cohort import UploadStatus
from pl_fed.text import first_line


class NonFiniteLossError(RuntimeError):
    """Non-finite loss: too many benign clients have a loss or a model with NaN or infinity."""


def describe_client_error(errors: Mapping[int, Exception]) -> str:
    """Return the first exception of this process's clients in words, with the place in its note."""
    if not errors:
        return "in another process, which names it"
    client, error = next(iter(errors.items()))
    notes = [note.rstrip(".") for note in getattr(error, "__notes__", [])]
    place = notes[-1] if notes else f"In client {client}"
    return f"{place}: {type(error).__name__}: {first_line(error)}"


def check_broken_share(
    status: Tensor,
    benign: Tensor,
    losses: Tensor,
    clients: Tensor,
    round: int,
    max_rejected: float,
    errors: Mapping[int, Exception],
) -> Tensor:
    """Stop a run if too many of a round's benign clients are broken.

    Args:
        status: The :class:`UploadStatus` of each client, int8 [cohort].
        benign: A mask of the benign clients, bool [cohort].
        losses: The clients' training losses, [cohort].
        clients: The clients' ids, int64 [cohort].
        round: The round.
        max_rejected: The largest share of the benign clients that may be broken, in [0, 1].
        errors: The exceptions of this process's clients, by id.

    Returns:
        A mask of the broken benign clients, bool [cohort], on the CPU.

    Raises:
        NonFiniteLossError: If too many are broken; with the round, a client and the likely cause.
    """
    status = status.cpu()
    broken = (status != UploadStatus.VALID) & benign
    num_broken, num_benign = int(broken.sum()), int(benign.sum())
    if num_broken > max_rejected * num_benign:
        first = int(broken.nonzero()[0])
        loss = float(losses[first])
        expected = "finite losses"
        got = "a model with NaN or infinity" if math.isfinite(loss) else f"a loss of {loss}"
        cause = (
            "as a rule the learning rate is too high (or λ times it is above 2), or the inputs are"
            " not normalised"
        )
        if int(status[first]) == UploadStatus.MALFORMED:
            expected = "uploads and states of real numbers, as long as the model and its states"
            got = "rows of another kind or length, or no upload"
            cause = (
                "return the change by the local steps from `end_round`, a floating-point tensor"
                " [clients, numbers] on the model's device, and keep the dtypes and lengths of"
                " states"
            )
        if int(status[first]) == UploadStatus.FAILED:
            expected, got = "local work without an exception", "one"
            error = errors.get(int(clients[first]))
            cause = describe_client_error({int(clients[first]): error} if error else {})
        others = f", as did {num_broken - 1} more of {num_benign}" if num_broken > 1 else ""
        raise NonFiniteLossError(
            f"Expected {expected} but in round {round} client {int(clients[first])} got"
            f" {got}{others}: {cause}; checkpoints of earlier rounds are unchanged."
        )
    return broken
