"""Broken clients of a round: too many of them end the run."""

import warnings
from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.rounds.trained_cohort import TrainedCohort, UploadStatus
from pl_fed.text import first_line


class NonFiniteLossError(RuntimeError):
    """Non-finite loss: too many benign clients have a loss or a model with NaN or infinity."""


def check_broken_share(
    trained: TrainedCohort, benign: Tensor, round: int, max_rejected: float
) -> Tensor:
    """Stop a run if too many of a round's benign clients are broken.

    Args:
        trained: The results of the cohort.
        benign: A mask of the benign clients, bool [cohort].
        round: The round.
        max_rejected: The largest share of the benign clients that may be broken, in [0, 1].

    Returns:
        A mask of the broken benign clients, bool [cohort], on the CPU.

    Raises:
        NonFiniteLossError: If too many are broken; with the round, a client and the likely cause.
    """
    broken = ~trained.valid.cpu() & benign
    num_broken, num_benign = int(broken.sum()), int(benign.sum())
    if num_broken > max_rejected * num_benign:
        first = int(broken.nonzero()[0])
        client, status = int(trained.clients[first]), int(trained.status[first])
        losses = [values[first] for values in (trained.start_losses, trained.losses) if len(values)]
        not_finite = [float(loss) for loss in losses if not loss.isfinite()]
        expected = "finite losses"
        got = f"a loss of {not_finite[0]}" if not_finite else "a model with NaN or infinity"
        cause = (
            "as a rule the learning rate is too high (or λ times it is above 2), or the inputs are"
            " not normalised"
        )
        if status == UploadStatus.MALFORMED:
            expected = "uploads and states of real numbers, as long as the model and its states"
            got = "rows of another kind or length, or no upload"
            cause = (
                "return the change by the local steps from `end_round`, a floating-point tensor"
                " [clients, numbers] on the model's device, and keep the dtypes and lengths of"
                " states"
            )
        if status == UploadStatus.FAILED:
            expected, got = "local work without an exception", "one"
            errors = trained.own.errors
            cause = _describe_error({client: errors[client]} if client in errors else {})
        others = f", as did {num_broken - 1} more of {num_benign}" if num_broken > 1 else ""
        raise NonFiniteLossError(
            f"Expected {expected} but in round {round} client {client} got {got}{others}: {cause};"
            " checkpoints of earlier rounds are unchanged."
        )
    return broken


def warn_of_broken(trained: TrainedCohort, broken: Tensor, round: int) -> None:
    """Warn that a round leaves broken clients out.

    Args:
        trained: The results of the cohort.
        broken: A mask of the broken benign clients, bool [cohort], on the CPU.
        round: The round.
    """
    errors = trained.own.errors
    has_failed = (trained.status == UploadStatus.FAILED).cpu() & broken
    reasons = []
    if has_failed.any():
        reasons.append(f"of an exception ({_describe_error(errors)})")
    if (broken & ~has_failed).any():
        reasons.append(
            "they contain NaN or infinity, have a wrong length, or are not real numbers, or their"
            " clients lack a finite loss"
        )
    warn = warnings.warn if errors else rank_zero_warn  # only its process has an exception
    warn(
        f"pl_fed left out the uploads of clients {trained.clients[broken].tolist()} in round"
        f" {round}, because {' or because '.join(reasons)}. This warning appears once;"
        " `train/rejected` counts the broken uploads of every round.",
        stacklevel=2,
    )


def _describe_error(errors: Mapping[int, Exception]) -> str:
    """Return the first exception of this process's clients in words, with the place in its note."""
    if not errors:
        return "in another process, which names it"
    client, error = next(iter(errors.items()))
    notes = [note.rstrip(".") for note in getattr(error, "__notes__", [])]
    place = notes[-1] if notes else f"In client {client}"
    return f"{place}: {type(error).__name__}: {first_line(error)}"
