"""Trigger attacks: some training samples get a trigger and the attacker's target label.

::

    (x, y) ← (x with the trigger, target)      for a share of the Byzantine clients' samples

The metric ``backdoor_success`` measures them: among benign clients' samples of other classes, the
share that the trigger makes the model classify as the target.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from pl_fed.arguments import check_integers, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.random import key, uniforms
from pl_fed.types import Batch, ClientContext


class TriggerAttack(Attack):
    """Trigger attack: a trigger on some training samples, which get the attacker's target label.

    A subclass defines :meth:`add_trigger`, and :meth:`mark_candidates` if the trigger is for some
    classes only. Every sample has one independent draw for all rounds. The share of samples with
    the trigger is therefore ``samples`` in expectation only.

    Args:
        target: The class that the attacker wants for samples with the trigger, at least 0.
        samples: Share of a Byzantine client's candidates with the trigger, in [0, 1].

    Shape:
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If ``target`` is not an integer.
        ValueError: If an argument is out of range; on use, if ``target`` is not a class of the
            data, or ``batch.samples`` is missing.

    Example:
        >>> class Bright(TriggerAttack):
        ...     def add_trigger(self, batch, context):
        ...         return batch.inputs + 1
        >>> triggered = Bright(target=3).trigger(Batch(torch.zeros(2, 1), torch.tensor([5, 3])))
        >>> triggered.inputs.flatten(), triggered.targets, triggered.mask
        (tensor([1., 1.]), tensor([3, 3]), tensor([ True, False]))
    """

    needs_inputs = True

    def __init__(self, target: int, samples: float = 0.5) -> None:
        check_integers(0, target=target)
        check_shares(samples=samples)
        self.target = target
        self.samples = samples

    @abstractmethod
    def add_trigger(self, batch: Batch, context: ClientContext | None) -> Tensor:
        """Return the inputs of all samples with the trigger, in a new tensor.

        Args:
            batch: Samples, maybe none; not changed.
            context: The attacker and the round; ``None`` for the trigger of an evaluation.
        """

    def mark_candidates(self, batch: Batch) -> Tensor:
        """Return a mask of the samples that the trigger is for, bool [batch]; by default all."""
        return torch.ones_like(batch.targets, dtype=torch.bool)

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with the trigger on samples drawn by (seed, client, sample)."""
        if self.target >= context.num_classes:
            raise ValueError(
                f"Expected argument `target` to be one of the {context.num_classes} classes but"
                f" got {self.target}."
            )
        draw = key(context.seed, "backdoor", context.client)
        drawn = uniforms(draw, self.sample_ids(batch)) < self.samples
        # positions: each mask would wait for the GPU, at each field
        selected = (drawn & self.mark_candidates(batch)).nonzero().flatten()
        fields = (None if field is None else field[selected] for field in batch)
        x, y = batch.inputs.clone(), batch.targets.clone()
        x[selected], y[selected] = self.add_trigger(Batch(*fields), context), self.target
        return batch._replace(inputs=x, targets=y)

    def trigger(self, batch: Batch) -> Batch:
        """Return all samples with the trigger.

        The mask excludes samples of the target class, and samples that the trigger is not for.
        """
        return self.label_triggered(batch, self.add_trigger(batch, None))

    def label_triggered(self, batch: Batch, inputs: Tensor) -> Batch:
        """Return samples with other inputs, the target class, and the mask of :meth:`trigger`.

        Args:
            batch: The samples without the trigger.
            inputs: Their inputs with it.
        """
        counts = self.mark_candidates(batch) & (batch.targets != self.target)
        mask = counts if batch.mask is None else batch.mask & counts
        y = torch.full_like(batch.targets, self.target)
        return batch._replace(inputs=inputs, targets=y, mask=mask)
