"""Rules over the facts of local steps: what a step may change; one sentence for each refusal."""

from pl_fed.clients.kept_parts import STOP
from pl_fed.evaluation.evaluation_rules import describe_stop, quote
from pl_fed.rounds.step_facts import StepFacts

_REGISTER = (
    "register it as a floating-point buffer (`self.register_buffer(...)`) and update the buffer in"
    " place in `training_step`"
)


def refuse_changes(facts: StepFacts) -> None:
    """Refuse local steps that carry anything from one client to the next besides buffers.

    Args:
        facts: What the local steps change.

    Raises:
        ValueError: With the name of the parameter, buffer or attribute, and the remedy.
    """
    for reason in (
        _describe_frozen_parameters(facts),
        _describe_replaced_parameters(facts),
        _describe_moved_parameters(facts),
        _describe_toggled(facts),
        _describe_reshaped_buffers(facts),
        _describe_counters(facts),
        _describe_modes(facts),
        _describe_options(facts),
        _describe_stop(facts),
        _describe_attributes(facts),
        _describe_leaks(facts),
    ):
        if reason is not None:
            raise ValueError(reason)


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


def _describe_frozen_parameters(facts: StepFacts) -> str | None:
    if not facts.frozen_parameters:
        return None
    return (
        f"Expected `training_step` of {facts.net} to leave parameters with requires_grad=False"
        f" unchanged, because all clients share them, but got a change of"
        f" {quote(facts.frozen_parameters)}: {_REGISTER}."
    )


def _describe_replaced_parameters(facts: StepFacts) -> str | None:
    if not facts.replaced_parameters:
        return None
    return (
        f"Expected `training_step` of {facts.net} to keep its parameters but got other tensors for"
        f" {quote(facts.replaced_parameters)}: change them in place, or leave them to the"
        " optimizer."
    )


def _describe_moved_parameters(facts: StepFacts) -> str | None:
    if not facts.moved_parameters:
        return None
    return (
        f"Expected `training_step` of {facts.net} to change parameters in place but it sets `.data`"
        f" of {quote(facts.moved_parameters)}: write into it, as in `parameter.data.copy_(...)`."
    )


def _describe_toggled(facts: StepFacts) -> str | None:
    if not facts.toggled:
        return None
    return (
        f"Expected `training_step` of {facts.net} to leave `requires_grad` unchanged but got"
        f" another value for {quote(facts.toggled)}: set it in `__init__`, since it decides which"
        " parameters clients train and send."
    )


def _describe_reshaped_buffers(facts: StepFacts) -> str | None:
    if not facts.reshaped_buffers:
        return None
    return (
        f"Expected `training_step` of {facts.net} to keep the shapes of buffers but got another one"
        f" for {quote(facts.reshaped_buffers)}: register the buffer in its final shape and update"
        " it in place."
    )


def _describe_counters(facts: StepFacts) -> str | None:
    if not facts.counters:
        return None
    return (
        f"Expected `training_step` of {facts.net} to change floating-point buffers only but got a"
        f" change of {quote(facts.counters)}, integers that no mean over clients keeps: register it"
        " as a floating-point buffer, or with persistent=False to begin anew in each round."
    )


def _describe_modes(facts: StepFacts) -> str | None:
    modes = tuple(n for n in facts.attributes if n.rpartition(".")[2] == "training")
    if not modes:
        return None
    return (
        f"Expected `training_step` of {facts.net} to leave modules in the mode in which it found"
        f" them but got another value of {quote(modes)}: call `train()` or `eval()` again at the"
        " end of the step."
    )


def _describe_options(facts: StepFacts) -> str | None:
    if not facts.optimizer_options:
        return None
    return (
        f"Expected `training_step` of {facts.net} to leave the options of its optimizer unchanged,"
        f" which all clients share, but got another {quote(facts.optimizer_options)}: change them"
        " in `on_before_optimizer_step`, whose optimizer is the client's own, or by a schedule of"
        " `configure_optimizers`, which steps once a round."
    )


def _describe_stop(facts: StepFacts) -> str | None:
    if STOP not in facts.attributes:
        return None
    return describe_stop("training_step", facts.net)


def _describe_attributes(facts: StepFacts) -> str | None:
    if not facts.attributes:
        return None
    return (
        f"Expected `training_step` of {facts.net} to keep values between steps in buffers only but"
        f" it changes {quote(facts.attributes)}, which would pass from one client to the next:"
        f" {_REGISTER}."
    )


def _describe_leaks(facts: StepFacts) -> str | None:
    if not facts.leaks:
        return None
    return (
        f"Expected local steps of {facts.net} to depend on the client's own data alone but got"
        " other numbers for a client after the steps of another one: keep values between steps in"
        " buffers that `training_step` updates in place, not outside of the module."
    )
