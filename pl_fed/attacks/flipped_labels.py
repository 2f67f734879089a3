"""Flipped labels.

M. Fang, X. Cao, J. Jia and N. Z. Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated
Learning", USENIX Security 2020 (label flipping); with two classes it is Ditto's A1 on CelebA::

    y ← num_classes − 1 − y
"""

from pl_fed.attacks.base import Attack
from pl_fed.types import Batch, ClientContext


class FlippedLabels(Attack):
    """Replace each training label by the one opposite to it in the list of classes.

    With an odd number of classes the one in the middle keeps its label.

    Shape:
        - ``batch.targets``: class ids, [batch, ...].

    Raises:
        ValueError: On :meth:`poison`, if the targets are real values.

    Example:
        >>> import torch
        >>> batch = Batch(torch.zeros(3, 2), torch.tensor([0, 1, 9]))
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> FlippedLabels().poison(batch, context).targets
        tensor([9, 8, 0])
    """

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with every label flipped."""
        if context.num_classes < 1:
            raise ValueError(
                "Expected argument `context.num_classes` to be at least 1 for FlippedLabels, which "
                f"cannot flip real-valued targets, but got {context.num_classes}."
            )
        return batch._replace(targets=context.num_classes - 1 - batch.targets)
