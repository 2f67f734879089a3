"""Cohorts that are too small for the aggregator: their rounds make no step, or end the run."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from pl_fed.aggregators import Aggregator
from pl_fed.preflight.aggregator_trial import try_aggregator
from pl_fed.types import RoundContext

SmallCohortRule = Literal["skip", "raise"]
"""Effect of a cohort that is too small on its round: no step, or an error that ends the run."""

_LEAST_PROBABILITY = 1e-12  # of a size that is looked at
_MAX_SIZES = 400  # most sizes that are looked at, the smallest first


class SmallCohorts:
    """Small cohorts: finds out whether the aggregator can merge a number of uploads.

    It tries a new aggregator on short random uploads, once for each number, so that it needs no
    promise of the aggregator, and a refused round changes no memory of an aggregator.

    Args:
        rule: ``"skip"`` or ``"raise"``.
        build_aggregator: Returns an aggregator without memory of any round.
        build_context: Returns the context of a round for a number of uploads.
    """

    def __init__(
        self,
        rule: SmallCohortRule,
        build_aggregator: Callable[[], Aggregator],
        build_context: Callable[[int], RoundContext],
    ) -> None:
        self.rule = rule
        self.build_aggregator = build_aggregator
        self.build_context = build_context
        self._refusals: dict[tuple[int, int], bool] = {}

    def must_skip(self, context: RoundContext) -> bool:
        """Return whether a round with these uploads makes no step."""
        num_uploads = len(context.clients)
        if not num_uploads:
            return True
        return self.rule == "skip" and self._refuses(num_uploads, context.num_byzantine)

    def _refuses(self, num_uploads: int, num_byzantine: int) -> bool:
        """Return whether the aggregator refuses a number of uploads."""
        key = (num_uploads, num_byzantine)
        if key not in self._refusals:
            context = replace(self.build_context(num_uploads), num_byzantine=num_byzantine)
            try:
                try_aggregator(self.build_aggregator(), context)
            except ValueError:
                self._refusals[key] = True
            else:
                self._refusals[key] = False
        return self._refusals[key]

    def sum_refused(self, probabilities: Tensor) -> float:
        """Return the probability of a cohort that the aggregator refuses, also of an empty one.

        Args:
            probabilities: The probability of each size of a cohort, from 0, float64 [sizes].
        """
        sizes = (probabilities > _LEAST_PROBABILITY).nonzero().flatten()[:_MAX_SIZES].tolist()
        refused = [
            size
            for size in sizes
            if size == 0 or self._refuses(size, self.build_context(size).num_byzantine)
        ]
        return math.fsum(probabilities[refused].tolist())

    def describe(self, probabilities: Tensor, rounds: float) -> str | None:
        """Return a sentence about the expected number of rounds with too small a cohort.

        Args:
            probabilities: The probability of each size of a cohort, from 0, float64 [sizes].
            rounds: The number of rounds of the run; may be infinite.

        Returns:
            The sentence; ``None`` if no cohort is too small.
        """
        share = self.sum_refused(probabilities)
        if share < _LEAST_PROBABILITY:
            return None
        name = type(self.build_aggregator().final_aggregator).__name__
        start = f"A cohort is empty, or too small for {name}, with probability {share:.3g}"
        if self.rule == "raise":
            ends = 1 - (1 - min(1.0, share - float(probabilities[0]))) ** rounds
            return f"{start}: one that is too small ends the run (probability {ends:.3g})."
        number = "" if rounds == math.inf else f", {share * rounds:.3g} of {rounds:g} are expected"
        return f"{start}: such rounds make no step{number}, and `train/small_cohort` counts them."
