"""Training attacks: attackers train a backdoor into the global model, and upload its change.

Each attacker of the cohort trains from the broadcast w^t on its own samples, of which a share has a
trigger and the attacker's target class::

    minimise (1 / n) Σ CE(w; x, y)  over clean samples and samples (x with the trigger, target)
    Δ_k ← w_k − w^t

so that the model stays accurate on clean samples, and learns the trigger. This is the data
poisoning of :class:`~pl_fed.attacks.Backdoor`, except that the attacker decides on its own steps,
loss, gradients and upload: see :class:`~pl_fed.attacks.OwnTraining`.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pl_fed.arguments import check_instances
from pl_fed.attacks.backdoor import Backdoor
from pl_fed.attacks.base import Attack, apply_attacks
from pl_fed.attacks.own_training import AttackerTraining, OwnTraining
from pl_fed.types import Batch, ClientContext


class TrainingAttack(OwnTraining):
    """Training attack: attackers train a backdoor themselves; the base class of others.

    A subclass overrides some of the methods of :class:`OwnTraining`.

    Args:
        backdoor: The attack on data that adds the trigger, such as :class:`Backdoor`; by default a
            square of 3×3 pixels in half of the samples, with the target class 0.
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch. The minibatches of a pass are as
            equal as possible.
        lr: Learning rate of SGD, above 0.
        momentum: Momentum of SGD, at least 0.
        weight_decay: Weight decay of SGD, at least 0.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d]; the upload of an attacker without samples.
        - output: [b, d].

    Raises:
        TypeError: If ``backdoor`` is no attack, or an argument is no number.
        ValueError: If ``backdoor`` has no trigger or forges uploads, or an argument is out of
            range; on use, if the net does not return a score for each class.

    Example:
        >>> class Freezing(TrainingAttack):  # trains only the last parameter
        ...     def change_gradients(self, training):
        ...         for parameter in list(training.parameters.values())[:-1]:
        ...             parameter.grad.zero_()
        >>> Freezing(epochs=1).forges, Freezing(epochs=1).triggers
        (True, True)
    """

    def __init__(
        self,
        backdoor: Attack | None = None,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        check_instances(Attack, backdoor=backdoor)
        backdoor = Backdoor(target=0) if backdoor is None else backdoor
        if backdoor.forges or not (backdoor.triggers and backdoor.poisons):
            raise ValueError(
                "Expected argument `backdoor` to be an attack on data with a trigger, such as"
                f" pl_fed.attacks.Backdoor, but got {type(backdoor).__name__}."
            )
        super().__init__(epochs, steps, batch_size, lr, momentum, weight_decay)
        self.backdoor = backdoor

    @property
    def needs_inputs(self) -> bool:  # type: ignore[override]
        """Whether the trigger changes inputs."""
        return self.backdoor.needs_inputs

    def trigger(self, batch: Batch) -> Batch:
        """Return samples with the trigger of ``backdoor``."""
        return self.backdoor.trigger(batch)

    def try_training(self, net: nn.Module, batch: Batch, context: ClientContext) -> None:
        """Refuse a net without scores of the classes, or samples without room for the trigger."""
        super().try_training(net, batch, context)
        apply_attacks(batch, [self.backdoor], context)

    def poison_samples(self, training: AttackerTraining) -> Batch:
        """Return an attacker's samples, a share of them with the trigger and the target."""
        return apply_attacks(training.clean, [self.backdoor], training.client_context)

    def state_dict(self) -> dict[str, Any]:
        """Return the attackers' own parts, and the state of ``backdoor``."""
        state, backdoor = super().state_dict(), self.backdoor.state_dict()
        return {**state, "backdoor": backdoor} if backdoor else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the attackers' own parts, and the state of ``backdoor``."""
        self.backdoor.load_state_dict(state.get("backdoor", {}))
        super().load_state_dict({k: value for k, value in state.items() if k != "backdoor"})
