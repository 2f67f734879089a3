"""Samples with the trigger of a backdoor, for evaluations."""

import torch

from pl_fed.attacks import Attack
from pl_fed.data.client_data import ClientData


class TriggeredData:
    """Triggered data: the samples of each part with a trigger, made anew when the trigger changes.

    An owner whose samples move to another device or dtype begins with a new object.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, ClientData]] = {}  # with the version of the trigger

    def __len__(self) -> int:
        """Return the number of parts whose samples have got the trigger."""
        return len(self._parts)

    def apply(self, data: ClientData, part: str, attack: Attack) -> ClientData:
        """Return data in which the samples of a part have the trigger and the wanted targets.

        Args:
            data: The samples without the trigger.
            part: ``train``, ``val`` or ``test``.
            attack: An attack with a trigger.
        """
        version, triggered = self._parts.get(part, (attack.trigger_version, None))
        if triggered is None or version != attack.trigger_version:
            with torch.inference_mode(False):
                triggered = data.change_part(part, attack.trigger)
            self._parts[part] = (attack.trigger_version, triggered)
        return triggered
