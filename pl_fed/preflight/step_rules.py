"""Rules over the changes by steps, in training and evaluation; one sentence for each refusal."""

from collections.abc import Collection, Sequence

from pl_fed.clients.kept_parts import STOP
from pl_fed.preflight.step_facts import StepFacts
from pl_fed.text import quote

_REGISTER = (
    "register it as a floating-point buffer (`self.register_buffer(...)`) and update the buffer in"
    " place in `training_step`"
)
_STOP = (
    "leave `trainer.should_stop` unchanged, because one client does not end the run of all, but got"
    " True: use the callback EarlyStopping with a metric over clients."
)

_RULES = {
    "frozen_parameters": "leave parameters with requires_grad=False unchanged, because all clients"
    f" share them, but got a change of {{names}}: {_REGISTER}.",
    "replaced_parameters": "keep its parameters but got other tensors for {names}: change them in"
    " place, or leave them to the optimizer.",
    "moved_parameters": "change parameters in place but it sets `.data` of {names}: write into it,"
    " as in `parameter.data.copy_(...)`.",
    "toggled": "leave `requires_grad` unchanged but got another value for {names}: set it in"
    " `__init__`, since it decides which parameters clients train and send.",
    "reshaped_buffers": "keep the shapes of buffers but got another one for {names}: register the"
    " buffer in its final shape and update it in place.",
    "counters": "change finite floating-point buffers only but got a change of {names}, integers or"
    " infinite at first, which no mean over clients keeps: register it as a floating-point buffer"
    " with a finite number, or with persistent=False to begin anew in each round.",
    "modes": "leave modules in the mode in which it found them but got another value of {names}:"
    " call `train()` or `eval()` again at the end of the step.",
    "optimizer_options": "leave the options of its optimizer unchanged, which all clients share,"
    " but got another {names}: change them in `on_before_optimizer_step`, whose optimizer is the"
    " client's own, or by a schedule of `configure_optimizers`, which steps once a round.",
    "stops": _STOP,
    "attributes": "keep values between steps in buffers only but it changes {names}, which would"
    f" pass from one client to the next: {_REGISTER}.",
}
"""The facts that are refused, each with its rule for ``training_step``."""

_NUMBER = "give the module the number of its minibatches as an argument"
_READS = {
    "global_step": "`global_step`, which counts rounds, where a plain fit counts local steps, so"
    " that a schedule by it is slower: count by `current_epoch`, the round, and `batch_idx`, the"
    " local step in the round",
    "num_training_batches": "`trainer.num_training_batches`, which is the number of a round's"
    f" clients, where a plain fit has the number of minibatches: {_NUMBER}",
    "is_last_batch": "`trainer.is_last_batch`, which is about the round as one batch, where a plain"
    f" fit has a client's last minibatch: {_NUMBER}, and compare it with `batch_idx`",
    "train_dataloader": "`train_dataloader` of the trainer or of its datamodule, which has the"
    f" clients, where a plain fit has minibatches: {_NUMBER}",
    "callback_metrics": "`trainer.callback_metrics`, which has metrics over clients, such as"
    " `val/global/loss`, where a plain fit has the names that the module logs: compute what the"
    " step needs in the module",
}
"""What a step reads, and its remedy, by the name of the trainer's property."""


def refuse_changes(facts: StepFacts) -> None:
    """Refuse local steps that carry anything from one client to the next besides buffers.

    Args:
        facts: The changes by the local steps.

    Raises:
        ValueError: With the name of the parameter, buffer or attribute, and the remedy.
    """
    for fact, rule in _RULES.items():
        if names := getattr(facts, fact):
            raise ValueError(
                f"Expected `training_step` of {facts.net} to {rule.format(names=quote(names))}"
            )
    if facts.leaks:
        raise ValueError(
            f"Expected local steps of {facts.net} to depend on the client's own data alone but got"
            " other numbers for a client after the steps of another one: keep values between steps"
            " in buffers that `training_step` updates in place, not outside of the module."
        )


def describe_reset_buffers(facts: StepFacts) -> str | None:
    """Return the sentence about buffers that begin anew with every client; ``None`` without any."""
    if not facts.reset_buffers:
        return None
    return (
        f"Local steps of {facts.net} change the buffers {quote(facts.reset_buffers)}, which are not"
        " saved with the net: pl_fed sets them to their initial values before each client's steps"
        " in every round."
    )


def describe_shared_values(facts: StepFacts) -> str | None:
    """Return the sentence about values outside of modules; ``None`` if no step changes one."""
    if not facts.shared:
        return None
    return (
        f"Local steps of {facts.net} change {quote(facts.shared)} outside of the module. All"
        " clients of a process share it, and no checkpoint keeps it: if a step reads it, the result"
        " depends on the order of clients. Keep such a value in a floating-point buffer."
    )


def refuse_shared_values(steps: str, net: str, names: Sequence[str]) -> None:
    """Refuse values outside of modules that clients share, for privacy.

    A trial cannot tell that no later step reads them, and a value that a client has written there
    would change the uploads of others.

    Args:
        steps: The steps that change the values: ``"local steps"``, say.
        net: The class of the net.
        names: The names of the values.

    Raises:
        ValueError: With the names of the values, and the remedy, if there are any.
    """
    if names:
        raise ValueError(
            f"Expected {steps} of {net} to write no value outside of the module for"
            " `federation.privacy`, because a step that reads it sees other clients' data, but got"
            f" a change of {quote(names)}: {_REGISTER}, or do not write it."
        )


def describe_missing_loss(net: str, has_loss: bool, has_metrics: bool) -> str | None:
    """Return the sentence about a validation without a loss; ``None`` if there is one.

    Args:
        net: The class of the net.
        has_loss: Whether the validation gives a loss.
        has_metrics: Whether it gives other metrics.
    """
    if has_loss:
        return None
    effect = "metric `loss`" if has_metrics else "metric, and no hybrid model is chosen"
    return f"The validation of {net} neither returns nor logs a loss, so there is no {effect}."


def refuse_evaluation_changes(
    step: str,
    net: str,
    values: Collection[str],
    options: Sequence[str],
    parameters: Collection[str] = (),
) -> None:
    """Refuse an evaluation that changes the training: parameters, the optimizer, or its end.

    Args:
        step: The name of the evaluation step.
        net: The class of the net.
        values: The names of all changed values.
        options: The names of changed options of the optimizer.
        parameters: The names of changed parameters.

    Raises:
        ValueError: With the remedy.
    """
    expected = f"Expected `{step}` and its hooks of {net} to"
    if parameters:
        raise ValueError(
            f"{expected} leave parameters unchanged but got a change of"
            f" {quote(sorted(parameters))}: put the parameters back in"
            f" `on_{step[:-5]}_epoch_end`, or evaluate a copy."
        )
    if STOP in values:
        raise ValueError(f"{expected} {_STOP}")
    if options:
        raise ValueError(
            f"{expected} leave the optimizer unchanged, because they run for each client, but got"
            f" another {quote(options)}: use a schedule of `configure_optimizers`, which steps once"
            " a round, or a callback of the trainer."
        )


def describe_outside_values(step: str, net: str, names: Sequence[str]) -> str:
    """Return the sentence about an evaluation that changes values outside of modules."""
    return (
        f"`{step}` and its hooks of {net} change {quote(names)} outside of the module, which"
        " pl_fed does not restore: a training that reads it depends on how often you evaluate."
    )


def describe_lasting_metrics(net: str, names: Sequence[str]) -> str:
    """Return the sentence about metrics that a plain fit carries from validation to validation."""
    return (
        f"The metrics {quote(names)} of {net}, which a plain fit carries from one validation to the"
        " next, begin anew with each client in every evaluation: they have the value of one"
        " evaluation, and no best one of several rounds. `ModelCheckpoint` keeps the best round."
    )


def describe_read(reader: str, name: str) -> str:
    """Return the sentence about a value of the trainer that is another one in a plain fit.

    Args:
        reader: The step, its module, and perhaps its hooks.
        name: The name of the trainer's property.
    """
    return f"{reader} reads {_READS[name]}."


def describe_restored_numbers(step: str, net: str, names: Sequence[str]) -> str:
    """Return the sentence about a number that an evaluation sets, such as a threshold."""
    return (
        f"`{step}` and its hooks of {net} change {quote(names)}, which pl_fed sets back after each"
        " client: tests, later steps and exports have the value from before. To keep such a value,"
        " compute it in `training_step` as a floating-point buffer."
    )
