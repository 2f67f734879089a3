"""Attacks along a line: centre + factor · direction.

The factor is a number, the value from the attack's paper, or the result of a search. The search
needs attackers that know all uploads and can run the defence. It maximises the harm::

    factor = argmax ‖merged(centre + factor · direction) − mean of the honest uploads‖

V. Shejwalkar and A. Houmansadr, "Manipulating the Byzantine", NDSS 2021, optimise the factor of an
attack against a known defence in this way, as do the ``Optimal_`` attacks of the library ByzFL.
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
    """Line attack: uploads at centre + factor · direction.

    A subclass defines :meth:`line`, and :meth:`default_factor` if its paper has a value.

    Args:
        factor: A finite number; ``"search"`` for the factor that does most harm to the defence in
            use; ``None`` for :meth:`default_factor`, in attacks that define it.
        trials: Number of runs of the defence in a search, at least 1. The search tries 0, 1, 2, 4,
            8, and further powers of 2 while the harm grows; golden-section search follows. A trial
            counts as harmless if the defence raises an error or returns NaN or infinity. No factor
            is above 2^(trials − 2).

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if the attackers know no finite upload.

    Raises:
        ValueError: If an argument is out of range; on :meth:`forge`, if a search cannot run the
            defence.

    Example:
        >>> class Away(LineAttack):
        ...     def line(self, reference, own, context):
        ...         return mean_row(reference), torch.ones(own.shape[1])
        >>> honest, own = torch.tensor([[1.0], [3.0]]), torch.zeros(1, 1)
        >>> Away(factor=5.0).forge(honest, own, RoundContext())
        tensor([[7.]])
    """

    def __init__(self, factor: Factor | None, trials: int = 20) -> None:
        has_default_factor = type(self).default_factor is not LineAttack.default_factor
        if factor == "search" or (factor is None and has_default_factor):
            pass
        elif factor is None or isinstance(factor, str):
            values = 'number, "search" or None' if has_default_factor else 'number or "search"'
            raise ValueError(
                f"Expected argument `factor` to be a finite {values} but got {factor!r}."
            )
        else:
            check_finite(factor=factor)
        check_integers(1, trials=trials)
        self.factor = factor
        self.trials = trials

    @property
    def needs_simulation(self) -> bool:
        """Whether the attack searches for its factor."""
        return self.factor == "search"

    @abstractmethod
    def line(self, reference: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return the centre and the direction, in float32 or wider, of shape [d] or [b, d].

        Args:
            reference: The uploads that the attackers know, at least one, all finite [h, d].
            own: The attackers' own uploads [b, d]; some may not be finite.
            context: The round.
        """

    def default_factor(
        self, reference: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> float | Tensor:
        """Return the factor for ``factor=None``: a number, or one number per attacker [b, 1]."""
        raise NotImplementedError

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return points of the line."""
        reference = reference_rows(honest, own)
        if not len(reference) or not len(own):
            return own
        centre, direction = self.line(reference, own, context)

        def forge_at(factor: float | Tensor) -> Tensor:
            """Return the forged uploads at a factor [b, d]."""
            return (centre + factor * direction).to(own.dtype).expand_as(own)

        if self.factor is None:
            return forge_at(self.default_factor(reference, centre, direction, context))
        if isinstance(self.factor, str):
            return forge_at(self._search_factor(forge_at, reference, context))
        return forge_at(self.factor)

    def _search_factor(
        self, forge_at: Callable[[float], Tensor], reference: Tensor, context: RoundContext
    ) -> float:
        """Return the factor that does most harm to the defence in use.

        Args:
            forge_at: Returns the forged uploads at a factor [b, d].
            reference: The uploads that the attackers know, finite [h, d].
            context: The round.

        Raises:
            ValueError: If the attackers cannot run the defence.
        """
        simulate_merge, honest_mean = require_simulation(self, context), mean_row(reference)
        return highest_point(
            lambda factor: measure_harm(simulate_merge, forge_at(factor), honest_mean), self.trials
        )


def require_simulation(attack: Attack, context: RoundContext) -> Callable[..., Tensor]:
    """Return ``context.simulate_merge``.

    Raises:
        ValueError: If the attackers cannot run the defence.
    """
    if context.simulate_merge is None:
        raise ValueError(
            "Expected `context.simulate_merge` to be given, to search for the factor of"
            f" {type(attack).__name__}, but got None: set `federation.adversary.knowledge` to"
            ' "all".'
        )
    return context.simulate_merge


def measure_harm(merge: Callable[[Tensor], Tensor], forged: Tensor, honest_mean: Tensor) -> float:
    """Return the distance from the honest mean to the aggregate.

    Args:
        merge: Returns the aggregate [d] for forged uploads.
        forged: The forged uploads [b, d].
        honest_mean: The mean of the honest uploads [d].

    Returns:
        The distance; 0 if it is not finite, or if the defence raises an error.
    """
    try:
        distance = (merge(forged) - honest_mean).norm()
    except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return 0.0
    return float(distance) if distance.isfinite() else 0.0
