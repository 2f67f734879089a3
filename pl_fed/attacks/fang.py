"""Directed deviation, against Krum, or against the trimmed mean and the median.

M. Fang, X. Cao, J. Jia and N. Z. Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated
Learning", USENIX Security 2020, arXiv 1911.11815. The attackers want the global model to move
against the signs s of its change without an attack. Against Krum::

    u_k = w^t − λ · s,   λ = the first of λ_0, λ_0 / 2, λ_0 / 4, ... that Krum picks, or below 1e-5

Against the trimmed mean and the median, for each coordinate j, and with b = 2::

    u_kj ~ uniform between min_j and min_j · b   (min_j / b if min_j > 0)     if s_j = 1
    u_kj ~ uniform between max_j and max_j · b   (max_j / b if max_j < 0)     else

where u_k is the forged model, and min_j and max_j are over the honest models.

Attackers that know only their own models use the mean μ_j and the standard deviation σ_j of these.
They draw from [μ_j − 4 σ_j, μ_j − 3 σ_j] or [μ_j + 3 σ_j, μ_j + 4 σ_j]. Against Krum, they test λ
with one forged model among their own honest models. If Krum picks no λ, they add copies of the
forged model, one by one.

λ_0 is an upper bound on the λ that Krum can pick. Let x_i be the honest updates, and d the number
of signs other than 0. The forged models are at least λ √d − max ‖x_i‖ away from the honest models::

    λ_0 = (max_i ‖x_i‖ + √(lowest score of an honest model / number of honest neighbours)) / √d

The bound holds where Krum's neighbours of a forged model include honest models. Let f be the number
of Byzantine uploads that the server expects. The bound then holds for up to f + 1 attackers, if
they are fewer than n − f − 1. A cohort may have more attackers by chance: n − f − 1 or more
attackers are each other's neighbours at any λ. Krum may then pick a larger λ as well; the attack
does not test it.

Departs from the paper: the paper's λ_0 is for distances that are not squared. Here s is the sign of
the mean of the known updates, also for attackers that know the defence. All attackers send the same
model to Krum; the paper also describes models that differ slightly.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice
from pl_fed.attacks.base import Attack
from pl_fed.functional.aggregation import (
    gram_matrix,
    inner_products,
    squared_distances,
    squared_norms,
)
from pl_fed.functional.forging import mean_row, reference_rows, standard_deviations, upload_origin
from pl_fed.random import key, uniforms
from pl_fed.types import RoundContext

_REACH = 2.0  # the paper's b
_MIN_LAMBDA = 1e-5


class Fang(Attack):
    """Directed deviation: uploads that move the global model against the signs of its change.

    Attackers know all uploads if ``context.simulate_merge`` is set, and otherwise only their own.

    Args:
        defence: The defence to attack: ``"krum"``, or ``"trimmed_mean"`` for the trimmed mean and
            the median. Krum's f is the number of Byzantine uploads that the server expects; if
            attackers know only their own uploads, the number of forged ones.
        on: The vectors with the minima and maxima, for ``"trimmed_mean"``: the clients' ``"model"``
            as in the paper, or their ``"update"``. The signs of the minima and maxima decide how
            far beyond them the attack draws.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if the attackers know no finite upload.

    Raises:
        ValueError: If an argument is not one of its values.

    Example:
        >>> context = RoundContext(num_byzantine=1, attackers=torch.tensor([4]))
        >>> honest, own = torch.tensor([[1.0, -1.0], [2.0, -1.0], [3.0, -1.0]]), torch.zeros(1, 2)
        >>> Fang("trimmed_mean", on="update").forge(honest, own, context)
        tensor([[-0.7661, -1.0000]])
    """

    def __init__(
        self,
        defence: Literal["krum", "trimmed_mean"] = "krum",
        on: Literal["update", "model"] = "model",
    ) -> None:
        check_choice(("krum", "trimmed_mean"), defence=defence)
        check_choice(("update", "model"), on=on)
        self.defence = defence
        self.on = on

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return −λ · s against Krum, or draws beyond the honest range."""
        reference = reference_rows(honest, own)
        if not len(reference) or not len(own):
            return own
        mean = mean_row(reference)
        if self.defence == "krum":
            signs = mean.sign()
            lam = _search_lambda(reference, signs, len(own), context)
            return (-lam * signs).to(own.dtype).expand_as(own)
        near, far = self._draw_bounds(reference, mean, own, context)
        coordinates, forged = torch.arange(len(mean), device=own.device), torch.empty_like(own)
        for row, client in zip(forged, self.attacker_ids(own, context)):
            draw = key(context.seed, "fang", context.round, client)
            row.copy_(near + uniforms(draw, coordinates) * (far - near))
        return forged

    def _draw_bounds(
        self, reference: Tensor, mean: Tensor, own: Tensor, context: RoundContext
    ) -> tuple[Tensor, Tensor]:
        """Return the bounds of the draws, near to and far from the honest uploads, [d] each."""
        increases = mean > 0
        if context.simulate_merge is None:
            outward = torch.where(increases, -1, 1) * standard_deviations(reference, mean)
            return mean + 3 * outward, mean + 4 * outward
        origin = upload_origin(self.on, own, context.broadcast)
        edge = torch.where(increases, reference.amin(0), reference.amax(0)) + origin
        moves_from_zero = torch.where(increases, edge < 0, edge > 0)
        return edge - origin, torch.where(moves_from_zero, edge * _REACH, edge / _REACH) - origin


def _search_lambda(
    reference: Tensor, signs: Tensor, num_attackers: int, context: RoundContext
) -> float:
    """Return the first λ with which Krum picks −λ · s, or the first below the minimum."""
    distances = squared_distances(gram_matrix(reference, centre=mean_row(reference)))
    squares = squared_norms(reference)
    products = inner_products(reference, signs)
    num_signs = float(signs.abs().sum(dtype=torch.double))  # ‖s‖²
    lam = 0.0
    for copies in range(num_attackers if context.simulate_merge else 1, num_attackers + 1):
        expected = context.num_byzantine if context.simulate_merge else copies
        neighbours = max(1, len(reference) + copies - expected - 2)
        lam = _lambda_bound(distances, squares, num_signs, neighbours, copies)
        while _MIN_LAMBDA <= lam < math.inf:  # infinite if the mean of the uploads overflows
            to_forged = squares + 2 * lam * products + lam**2 * num_signs  # ‖x_i + λ s‖²
            if _krum_picks_forged(distances, to_forged, neighbours, copies):
                return lam
            lam /= 2
    return lam


def _lambda_bound(
    distances: Tensor, squares: Tensor, num_signs: float, neighbours: int, copies: int
) -> float:
    """Return λ_0.

    Args:
        distances: ‖x_i − x_j‖², [h, h].
        squares: ‖x_i‖², [h].
        num_signs: Number of signs other than 0.
        neighbours: Number of neighbours in Krum's score.
        copies: Number of forged models.
    """
    if not num_signs:
        return 0.0
    lowest_score = float(distances.sort(dim=1).values[:, 1 : neighbours + 1].sum(1).min())
    score_per_neighbour = lowest_score / max(1, neighbours - copies + 1)
    radius = math.sqrt(float(squares.max())) + math.sqrt(score_per_neighbour)
    return radius / math.sqrt(num_signs)


def _krum_picks_forged(distances: Tensor, to_forged: Tensor, neighbours: int, copies: int) -> bool:
    """Return whether Krum picks a forged row, of which there are several copies.

    Args:
        distances: ‖x_i − x_j‖², [h, h].
        to_forged: Squared distances of the honest rows from the forged row, [h].
        neighbours: Number of neighbours in Krum's score.
        copies: Number of forged rows.
    """
    forged_score = to_forged.sort().values[: max(0, neighbours - copies + 1)].sum()
    to_all = torch.cat([distances, to_forged[:, None].expand(-1, copies)], dim=1)
    honest_scores = to_all.sort(dim=1).values[:, 1 : neighbours + 1].sum(1)  # without itself
    return bool(forged_score < honest_scores.min())
