"""Directed deviation, against Krum, or against the trimmed mean and the median.

M. Fang, X. Cao, J. Jia and N. Z. Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated
Learning", USENIX Security 2020, arXiv 1911.11815. The attackers want the global model to go against
the signs s of the change that there would be without them. Against Krum::

    u_k = w^t − λ · s,   the largest λ of λ_0, λ_0 / 2, λ_0 / 4, ... that Krum picks, or below 1e-5

Against the trimmed mean and the median, for each coordinate j, and with b = 2::

    u_kj ~ uniform between min_j and min_j · b   (min_j / b if min_j > 0)     if s_j = 1
    u_kj ~ uniform between max_j and max_j · b   (max_j / b if max_j < 0)     else

where u_k is the model that is sent, and min_j and max_j are over the honest ones. Attackers who
know their own models only draw from [μ_j − 4 σ_j, μ_j − 3 σ_j] or [μ_j + 3 σ_j, μ_j + 4 σ_j], of
their mean and standard deviation; and against Krum they try with one forged model among their own
honest ones, and with more and more if no λ will do.

λ_0 is a bound on what Krum can pick: the forged models are at least λ √d − max ‖x_i‖ away from the
honest ones, where x_i are updates and d is the number of signs that are not 0, so that::

    λ_0 = (max_i ‖x_i‖ + √(lowest score of an honest one / number of honest neighbours)) / √d

That holds where Krum looks at honest neighbours, too: of up to f + 1 attackers who are fewer than
n − f − 1, f being what the server expects. With more, which a cohort may have by chance, it may
pick a larger λ, too, which is not tried: n − f − 1 or more are each other's neighbours, at any λ.

Departs from the paper: its λ_0 is for distances that are not squared; s is of the mean of the known
updates, for attackers who know the defence, too; all attackers send the same to Krum, where the
paper also says how to send models that are nearly the same.
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
_SMALLEST = 1e-5  # of the λ that are tried


class Fang(Attack):
    """Draw the global model against the direction in which it would go.

    Whether attackers know all uploads is seen by ``context.merged``.

    Args:
        defence: Against what: ``"krum"``, or ``"trimmed_mean"``, which is for the median as well.
            The number f of byzantine uploads with which Krum counts is what the server expects; for
            attackers who know their own only, how many they forge.
        on: Whether minima and maxima, which the trimmed mean is attacked beyond, are those of the
            ``"model"`` that is sent, as in the paper, or of the ``"update"``. Signs matter to how
            far beyond.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if no finite upload is known.

    Raises:
        ValueError: If an argument is none of these.

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
        """Return what is to be picked by Krum, or draws beyond the honest range."""
        known = reference_rows(honest, own)
        if not len(known) or not len(own):
            return own
        mean = mean_row(known)
        if self.defence == "krum":
            signs = mean.sign()
            return (-_step(known, signs, len(own), context) * signs).to(own.dtype).expand_as(own)
        near, far = self._beyond(known, mean, own, context)
        numbers, forged = torch.arange(len(mean), device=own.device), torch.empty_like(own)
        for row, client in zip(forged, self.attacker_ids(own, context)):
            draw = key(context.seed, "fang", context.round, client)
            row.copy_(near + uniforms(draw, numbers) * (far - near))
        return forged

    def _beyond(
        self, known: Tensor, mean: Tensor, own: Tensor, context: RoundContext
    ) -> tuple[Tensor, Tensor]:
        """Return the ends of the intervals to draw from, the one that is nearer to the honest."""
        rises = mean > 0
        if context.merged is None:
            away = torch.where(rises, -1, 1) * standard_deviations(known, mean)
            return mean + 3 * away, mean + 4 * away
        start = upload_origin(self.on, own, context.broadcast)
        edge = torch.where(rises, known.amin(0), known.amax(0)) + start
        outwards = torch.where(rises, edge < 0, edge > 0)  # is away from 0
        return edge - start, torch.where(outwards, edge * _REACH, edge / _REACH) - start


def _step(known: Tensor, signs: Tensor, attackers: int, context: RoundContext) -> float:
    """Return the λ with which Krum picks −λ · signs."""
    distances = squared_distances(gram_matrix(known, centre=mean_row(known)))
    squares = squared_norms(known)
    along, square = inner_products(known, signs), float(signs.abs().sum(dtype=torch.double))
    lam = 0.0
    for copies in range(attackers if context.merged else 1, attackers + 1):
        expected = context.num_byzantine if context.merged else copies
        neighbours = max(1, len(known) + copies - expected - 2)
        lam = _bound(distances, squares, square, neighbours, copies)
        while lam >= _SMALLEST:
            reached = squares + 2 * lam * along + lam**2 * square  # ‖x_i + λ s‖²
            if _is_picked(distances, reached, neighbours, copies):
                return lam
            lam /= 2
    return lam


def _bound(
    distances: Tensor, squares: Tensor, square: float, neighbours: int, copies: int
) -> float:
    """Return λ_0."""
    if not square:
        return 0.0
    lowest = float(distances.sort(dim=1).values[:, 1 : neighbours + 1].sum(1).min())
    share = lowest / max(1, neighbours - copies + 1)
    return (math.sqrt(float(squares.max())) + math.sqrt(share)) / math.sqrt(square)


def _is_picked(distances: Tensor, reached: Tensor, neighbours: int, copies: int) -> bool:
    """Whether Krum picks a row of which there are so many copies, at such squared distances."""
    forged = reached.sort().values[: max(0, neighbours - copies + 1)].sum()
    to_all = torch.cat([distances, reached[:, None].expand(-1, copies)], dim=1)
    honest = to_all.sort(dim=1).values[:, 1 : neighbours + 1].sum(1)  # without itself
    return bool(forged < honest.min())
