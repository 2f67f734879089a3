"""Adaptive attack: attackers that know the defence search inside its acceptance region.

V. Shejwalkar and A. Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and
Defenses for Federated Learning", NDSS 2021 (the AGR-tailored attacks)::

    Δ_k = m + λ · p,     m = the mean of the uploads x_i that the attackers know
    p = −m / ‖m‖,  −sign(m)  or  −std(x_i)

The attackers run the server's own defence to choose λ. Against rules that select uploads, such as
Krum, they search for the largest λ at which no forged upload is left out. Against all other rules,
such as the trimmed mean, they search for the λ that moves the aggregate furthest from m.

An attack with ``factor: search`` maximises the distance along its own line. This attack also finds
the acceptance region of the defence, and compares the three directions of the paper in each round.

Departs from the paper:

- The paper knows the defence and writes an objective for it. Here, a rule counts as selecting if
  it leaves out a forged upload at λ = 10, so that one attack serves every defence. The attack then
  makes both searches, and takes the λ that moves the aggregate further.
- The paper's code also searches the furthest aggregate by halving steps, which cap λ at 20. Here,
  the step doubles as long as the distance grows, and golden-section search follows.
- Standard deviations are those of the population; λ compensates for their factor.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_integers
from pl_fed.attacks.base import Attack
from pl_fed.attacks.line_attack import measure_harm, require_simulation
from pl_fed.functional.forging import mean_row, perturbation_of, reference_rows
from pl_fed.functional.search import highest_point, largest_accepted
from pl_fed.types import RoundContext

Direction = Literal["worst", "unit", "sign", "std"]
Objective = Literal["auto", "deviation", "acceptance"]
_START = 3.0  # the first λ of the acceptance search, as in the paper's code for Krum
_FAR = 10.0  # the first λ of the paper's code for the trimmed mean


class AdaptiveAttack(Attack):
    """Adaptive attack: the largest change that the defence in use lets through.

    All attackers send the same upload. The attack needs ``federation.adversary.knowledge: all``.

    Args:
        direction: The direction p: ``"unit"``, the negative unit vector of the mean; ``"sign"``,
            its negative signs; ``"std"``, the negative standard deviation; ``"worst"`` tries all
            three in each round, and takes the one that moves the aggregate furthest.
        objective: ``"acceptance"`` for the largest λ at which the defence leaves out no forged
            upload, or at which it takes one of them if it never takes all, such as Krum;
            ``"deviation"`` for the λ that moves the aggregate furthest; ``"auto"`` for the
            better one of both, or the latter alone if the defence leaves out no upload at λ = 10.
        trials: Number of runs of the defence in a search, at least 1.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if the attackers know no finite upload.

    Raises:
        TypeError: If ``trials`` is not an integer.
        ValueError: If an argument is out of range; on :meth:`forge`, if the attackers cannot run
            the defence.

    Example:
        >>> honest, own = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(1, 1)
        >>> def median(forged, reject=None):
        ...     return torch.cat([honest, forged]).median(0).values
        >>> context = RoundContext(simulate_merge=median)
        >>> AdaptiveAttack("unit").forge(honest, own, context)  # the median is 1 instead of 2
        tensor([[1.]])
    """

    def __init__(
        self, direction: Direction = "worst", objective: Objective = "auto", trials: int = 20
    ) -> None:
        check_choice(get_args(Direction), direction=direction)
        check_choice(get_args(Objective), objective=objective)
        check_integers(1, trials=trials)
        self.direction = direction
        self.objective = objective
        self.trials = trials

    @property
    def needs_simulation(self) -> bool:
        """Whether the attack runs the defence: always."""
        return True

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the furthest upload that the defence lets through."""
        reference = reference_rows(honest, own)
        if not len(reference) or not len(own):
            return own
        simulate_merge, mean = require_simulation(self, context), mean_row(reference)
        best, highest = own, -1.0
        for direction in self._find_directions(reference, mean):

            def forge_at(factor: float, direction: Tensor = direction) -> Tensor:
                """Return the forged uploads at a λ [b, d]."""
                return (mean + factor * direction).to(own.dtype).expand_as(own)

            for factor in self._search_factors(forge_at, mean, simulate_merge, context):
                forged = forge_at(factor)
                harm = measure_harm(simulate_merge, forged, mean)
                if harm > highest:
                    best, highest = forged, harm
        return best

    def _find_directions(self, reference: Tensor, mean: Tensor) -> list[Tensor]:
        """Return the directions to try, [d] each."""
        kinds = ("unit", "sign", "std") if self.direction == "worst" else (self.direction,)
        directions = [perturbation_of(kind, reference, mean) for kind in kinds]
        if "unit" in kinds:
            length = mean.double().norm().to(mean)
            directions[0] = directions[0] / length if length else directions[0]
        return directions

    def _search_factors(
        self,
        forge_at: Callable[[float], Tensor],
        mean: Tensor,
        simulate_merge: Callable[..., Tensor],
        context: RoundContext,
    ) -> list[float]:
        """Return the candidates for λ along one direction.

        Args:
            forge_at: Returns the forged uploads at a λ [b, d].
            mean: The mean of the known uploads [d].
            simulate_merge: Runs the defence.
            context: The round.
        """

        def measure(factor: float) -> float:
            """Return the distance from the mean of the known uploads to the aggregate."""
            return measure_harm(simulate_merge, forge_at(factor), mean)

        def run(factor: float) -> tuple[bool, int]:
            """Return whether the defence runs, and how many forged uploads it leaves out."""
            rejected: list[Tensor] = []
            merge = partial(simulate_merge, reject=rejected.append)
            runs = measure_harm(merge, forge_at(factor), mean) > 0
            ids = torch.cat([context.attackers[:0], *rejected])
            return runs, int(torch.isin(context.attackers, ids).count_nonzero())

        def search_acceptance(most_rejected: int) -> float:
            """Return the largest λ at which the defence leaves out at most so many uploads."""

            def accepts(factor: float) -> bool:
                """Return whether a λ is in the acceptance region."""
                runs, num_rejected = run(factor)
                return runs and num_rejected <= most_rejected

            return largest_accepted(accepts, _START, self.trials)

        if self.objective == "acceptance":
            factor = search_acceptance(0)
            if not factor and len(context.attackers) > 1:  # the defence may take one upload alone
                factor = search_acceptance(len(context.attackers) - 1)
            return [factor]
        is_selecting = self.objective == "auto" and run(_FAR)[1] > 0
        factors = [search_acceptance(0)] if is_selecting else []
        return [*factors, highest_point(measure, self.trials)]
