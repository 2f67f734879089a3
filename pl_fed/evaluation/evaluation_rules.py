"""Rules about evaluations: they change nothing of the training; one sentence for each."""

from collections.abc import Collection, Sequence

from pl_fed.clients.kept_parts import STOP


def refuse_changes(step: str, net: str, values: Collection[str], options: Sequence[str]) -> None:
    """Refuse an evaluation that stops the trainer or changes options of the optimizer.

    Args:
        step: The name of the evaluation step.
        net: The class of the net.
        values: The names of all changed values.
        options: The names of changed options.

    Raises:
        ValueError: With the remedy.
    """
    if STOP in values:
        raise ValueError(describe_stop(step, net))
    if options:
        raise ValueError(
            f"Expected `{step}` and its hooks of {net} to leave the optimizer unchanged, because"
            f" they run for each client, but got another {quote(options)}: use a schedule of"
            " `configure_optimizers`, which steps once a round, or a callback of the trainer."
        )


def describe_stop(step: str, net: str) -> str:
    """Return the sentence about a step of one client that would end the run of all."""
    return (
        f"Expected `{step}` and its hooks of {net} to leave `trainer.should_stop` unchanged,"
        " because one client does not end the run of all, but got True: use the callback"
        " EarlyStopping with a metric over clients."
    )


def describe_outside_values(step: str, net: str, names: Sequence[str]) -> str:
    """Return the sentence about an evaluation that changes values outside of modules."""
    return (
        f"`{step}` and its hooks of {net} change {quote(names)} outside of the module, which"
        " pl_fed does not restore: a training that reads it depends on how often you evaluate."
    )


def quote(names: Sequence[str]) -> str:
    """Return the first three names in backticks, and the number of the others."""
    text = ", ".join(f"`{name}`" for name in names[:3])
    return text + (f" and {len(names) - 3} more" if len(names) > 3 else "")
