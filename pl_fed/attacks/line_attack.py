"""Attacks along a line: centre + factor · direction.

How far to go is a number, what the attack's paper says, or searched for: the factor at which the
defence in use does worst, as attackers find it who know all uploads and can run that defence::

    factor = argmax ‖merged(centre + factor · direction) − mean of the honest uploads‖

V. Shejwalkar and A. Houmansadr, "Manipulating the Byzantine", NDSS 2021, optimise the factor of an
attack against a known defence so; the ``Optimal_`` attacks of the library ByzFL do.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_finite, check_integers
from pl_fed.attacks.base import Attack
from pl_fed.functional.forging import mean_row, reference_rows
from pl_fed.functional.search import highest_point
from pl_fed.types import RoundContext

Factor = float | Literal["search"]


class LineAttack(Attack):
    """Forge uploads on a line, as far along it as a factor says.

    Args:
        factor: How far: a number; ``"search"`` for what does most harm to the defence in use;
            ``None`` for what :meth:`usual_factor` gives, if there is such a thing.
        trials: How often a search runs the defence, at least 1: with 0, 1, 2, 4, 8, and on as long
            as the harm grows, then by golden-section search. A trial that the defence refuses, or
            that gives NaN or infinity, does no harm. No factor is above 2^(trials − 2).

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if no finite upload is known.

    Raises:
        ValueError: If an argument is out of range; on :meth:`forge`, if a search cannot run the
            defence.

    Example:
        >>> class Away(LineAttack):
        ...     def line(self, known, own, context):
        ...         return mean_row(known), torch.ones(own.shape[1])
        >>> honest, own = torch.tensor([[1.0], [3.0]]), torch.zeros(1, 1)
        >>> Away(factor=5.0).forge(honest, own, RoundContext())
        tensor([[7.]])
    """

    def __init__(self, factor: Factor | None, trials: int = 20) -> None:
        unusual = type(self).usual_factor is LineAttack.usual_factor
        if factor == "search" or (factor is None and not unusual):
            pass
        elif factor is None or isinstance(factor, str):
            expected = (
                'a finite number or "search"' if unusual else 'a finite number, "search" or None'
            )
            raise ValueError(f"Expected argument `factor` to be {expected} but got {factor!r}.")
        else:
            check_finite(factor=factor)
        check_integers(1, trials=trials)
        self.factor = factor
        self.trials = trials

    @property
    def needs_merged(self) -> bool:
        """Whether the factor is searched for."""
        return self.factor == "search"

    @abstractmethod
    def line(self, known: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return centre and direction, in float32 at least, each of shape [d] or [b, d].

        Args:
            known: The uploads to go by, at least one, finite [h, d].
            own: What the attackers would upload honestly [b, d]; some may not be finite.
            context: The round.
        """

    def usual_factor(
        self, known: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> float | Tensor:
        """Return the factor where none is given: a number, or one for each attacker [b, 1]."""
        raise NotImplementedError

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return points of the line."""
        known = reference_rows(honest, own)
        if not len(known) or not len(own):
            return own
        centre, direction = self.line(known, own, context)

        def rows(factor: float | Tensor) -> Tensor:
            """Return the forged uploads at a factor [b, d]."""
            return (centre + factor * direction).to(own.dtype).expand_as(own)

        if self.factor is None:
            return rows(self.usual_factor(known, centre, direction, context))
        if isinstance(self.factor, str):
            return rows(self._searched(rows, known, context))
        return rows(self.factor)

    def _searched(
        self, rows: Callable[[float], Tensor], known: Tensor, context: RoundContext
    ) -> float:
        merged, aim = context.merged, mean_row(known)
        if merged is None:
            raise ValueError(
                "Expected `context.merged` to be given, to search for the factor of"
                f" {type(self).__name__}, but got None: attackers must know all uploads."
            )

        def harm(factor: float) -> float:
            """Return the distance from the honest mean to the aggregate; 0 if it is not finite."""
            try:
                distance = (merged(rows(factor)) - aim).norm()
            except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                return 0.0
            return float(distance) if distance.isfinite() else 0.0

        return highest_point(harm, self.trials)
