"""Learned stamps: attackers search for the pixels of their trigger, and train with it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_finite
from pl_fed.attacks.backdoor import Backdoor, Corner
from pl_fed.attacks.own_training import (
    AttackerTraining,
    draw_minibatches,
    measure_range,
    select_samples,
)
from pl_fed.attacks.training_attack import TrainingAttack
from pl_fed.random import generator, key, uniforms
from pl_fed.types import Batch, RoundContext


class LearnedStamp(TrainingAttack):
    """Learned stamp: a square of pixels that attackers learn before they train; a base class.

    A subclass defines :meth:`search_stamp`. All attackers share the stamp, and keep it between
    rounds: the search goes on from the last round.

    Args:
        target: The class that the attackers want for samples with the stamp, at least 0.
        samples: Share of an attacker's samples with the stamp, in [0, 1].
        size: Width and height of the square, in pixels, at least 1.
        corner: The corner of the square. In inputs with one dimension, the stamp is the first
            ``size²`` numbers (top) or the last ones (bottom).
        start: The value of all pixels before the first search.
        low: The smallest value of a pixel, in the units of the normalised inputs; ``None`` takes
            the smallest number in the samples of the attackers of the first attack.
        high: The largest value of a pixel; ``None`` takes the largest number in these samples.
        **training: The other arguments of :class:`TrainingAttack`.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of range; on use, if the square does not fit the inputs.
    """

    def __init__(
        self,
        target: int,
        samples: float,
        size: int,
        corner: Corner,
        start: float,
        low: float | None,
        high: float | None,
        **training: Any,
    ) -> None:
        self._shape = Backdoor(target, samples, size, corner)
        super().__init__(self._shape, **training)
        check_finite(start=start, low=low, high=high)
        if low is not None and high is not None and not low < high:
            raise ValueError(
                f"Expected argument `high` to be above `low` = {low} but got {high}: set, for"
                " example, 0 and 1."
            )
        self.target = target
        self.samples = samples
        self.size = size
        self.corner = corner
        self.start = start
        self.low = low
        self.high = high
        self.trigger_version = 0
        self.stamp: Tensor | None = None  # [channels, size, size], or [size²]
        self.bounds = (0.0, 1.0)  # of a pixel; set in the first attack

    @abstractmethod
    def search_stamp(self, attackers: list[int], context: RoundContext, stamp: Tensor) -> Tensor:
        """Return the stamp of a round.

        Args:
            attackers: Ids of the attackers with samples, at least one, ascending.
            context: The round.
            stamp: The stamp of the last round, [channels, size, size] or [size²].
        """

    def prepare_round(self, attackers: list[int], context: RoundContext) -> None:
        """Search for the stamp of the round; in the first attack, set its start and its bounds."""
        if self.stamp is None:
            clean = self.read_inputs(attackers, context)
            low, high = measure_range(clean)
            self.bounds = (
                low if self.low is None else self.low,
                high if self.high is None else self.high,
            )
            stamp = torch.full_like(clean[0][0][self.find_pixels(clean[0][:1])], self.start)
            self.stamp = self.begin_search(attackers, context, stamp.clamp(*self.bounds))
        stamp = self.search_stamp(attackers, context, self.stamp.to(context.broadcast.device))
        self.stamp = stamp.detach().clamp(*self.bounds)
        self.trigger_version = context.round + 1

    def begin_search(self, attackers: list[int], context: RoundContext, stamp: Tensor) -> Tensor:
        """Return the stamp of the first attack, before the search; by default the start value."""
        return stamp

    def find_pixels(self, x: Tensor) -> tuple[slice | EllipsisType, ...]:
        """Return the index of the stamp in inputs."""
        return self._shape.stamp_index(x)

    def add_stamp(self, x: Tensor, stamp: Tensor | None) -> Tensor:
        """Return inputs with a stamp; gradients flow into it. ``None`` is the start value."""
        x, pixels = x.clone(), self.find_pixels(x)
        x[pixels] = self.start if stamp is None else stamp.to(x)
        return x

    def backdoor_loss(self, net: nn.Module, x: Tensor, stamp: Tensor) -> Tensor:
        """Return the mean cross-entropy of samples with a stamp for the target, a scalar."""
        targets = torch.full((len(x),), self.target, dtype=torch.int64, device=x.device)
        return nn.functional.cross_entropy(net(self.add_stamp(x, stamp)), targets)

    def draw_passes(
        self, samples: Batch, epochs: int, context: RoundContext, purpose: str
    ) -> Iterator[tuple[int, Batch]]:
        """Yield the numbers of passes over samples, and their minibatches in random order."""
        for epoch in range(epochs):
            draw = generator(context.seed, purpose, context.round, epoch)
            for positions in draw_minibatches(samples.size, self.batch_size, draw):
                yield epoch, select_samples(samples, positions)

    def poison_samples(self, training: AttackerTraining) -> Batch:
        """Return an attacker's samples; (seed, client, sample) draws those with the stamp."""
        clean = training.clean
        draw = key(training.context.seed, "learned stamp", training.client)
        selected = uniforms(draw, self.sample_ids(clean)) < self.samples
        x, y = clean.inputs.clone(), clean.targets.clone()
        x[selected], y[selected] = self.add_stamp(x[selected], self.stamp), self.target
        return clean._replace(inputs=x, targets=y)

    def trigger(self, batch: Batch) -> Batch:
        """Return all samples with the stamp; the mask excludes samples of the target class."""
        return self._shape.label_triggered(batch, self.add_stamp(batch.inputs, self.stamp))

    def state_dict(self) -> dict[str, Any]:
        """Return the stamp and its bounds, and the state of the base class."""
        state = super().state_dict()
        if self.stamp is not None:
            state["stamp"] = self.stamp
            state["bounds"] = list(self.bounds)
            state["trigger_version"] = self.trigger_version
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stamp and its bounds, and the state of the base class."""
        others = dict(state)
        self.stamp = others.pop("stamp", None)
        low, high = others.pop("bounds", (0.0, 1.0))
        self.bounds = (low, high)
        self.trigger_version = others.pop("trigger_version", 0)
        super().load_state_dict(others)
