"""Flipped labels: each training label becomes the opposite class.

M. Fang, X. Cao, J. Jia and N. Z. Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated
Learning", USENIX Security 2020 (label flipping). With two classes, it is Ditto's A1 on CelebA::

    y ← num_classes − 1 − y
"""

from pl_fed.attacks.base import Attack
from pl_fed.types import Batch, ClientContext


class FlippedLabels(Attack):
    """Flipped labels: the opposite class in the list of classes replaces every training label.

    With an odd number of classes, samples of the middle class keep their label.

    Shape:
        - ``batch.targets``: class ids, [batch, ...].

    Raises:
        ValueError: On :meth:`poison`, if the data have no classes.

    Example:
        >>> import torch
        >>> batch = Batch(torch.zeros(3, 2), torch.tensor([0, 1, 9]))
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> FlippedLabels().poison(batch, context).targets
        tensor([9, 8, 0])
    """

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with flipped labels."""
        if context.num_classes < 1:
            raise ValueError(
                "Expected argument `context.num_classes` to be at least 1 for FlippedLabels, which "
                f"cannot flip real-valued targets, but got {context.num_classes}."
            )
        return batch._replace(targets=context.num_classes - 1 - batch.targets)
