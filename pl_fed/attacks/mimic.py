"""Mimic.

S. P. Karimireddy, L. He and M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
Bucketing", ICLR 2022, arXiv 2006.09365 (the mimic attack)::

    Δ_k = x_i   for one honest client i,   i = argmax_i |z · x_i|
    z = the direction in which the honest uploads x_i differ most

All attackers copy one client, who then counts too much: no forged upload can be told from an honest
one, but where clients' data differ, the result is drawn away from the others.

Departs from the paper: z is the first principal direction of the round's uploads; in the paper it
is learnt over the first rounds, in which all attackers watch, and the client is kept from then on.
Here the copied client may change from round to round, unless it is given.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.attacks.base import Attack
from pl_fed.functional.aggregation import gram_matrix, inner_products
from pl_fed.functional.forging import mean_row
from pl_fed.nets.rows import finite_rows
from pl_fed.types import RoundContext


class Mimic(Attack):
    """Upload what one honest client uploads.

    Args:
        client: Its id, at least 0; ``None``, or where that client is not in the cohort, for the
            one that is furthest along the uploads' first principal direction. Of equal ones the
            smallest id is taken.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if no finite upload is known.

    Raises:
        ValueError: If ``client`` is negative; on :meth:`forge`, if ids are missing.

    Example:
        >>> honest, own = torch.tensor([[0.0, 1.0], [4.0, 0.0], [1.0, 1.0]]), torch.zeros(1, 2)
        >>> context = RoundContext(known=torch.tensor([2, 5, 7]))
        >>> Mimic().forge(honest, own, context)
        tensor([[4., 0.]])
        >>> Mimic(client=7).forge(honest, own, context)
        tensor([[1., 1.]])
    """

    def __init__(self, client: int | None = None) -> None:
        if client is not None:
            check_integers(0, client=client)
        self.client = client

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the row of the client that is copied."""
        known, ids = honest, context.known
        if not len(honest):
            whole = finite_rows(own)
            known, ids = own[whole], context.attackers[whole.cpu()]
        if len(ids) != len(known):
            raise ValueError(
                f"Expected `context.known` to be the ids of {len(known)} clients for Mimic but got"
                f" {ids.tolist()}."
            )
        if not len(known):
            return own
        given = [] if self.client is None else (ids == self.client).nonzero().flatten().tolist()
        best = given[0] if given else _furthest(known, ids)
        return known[best].to(own.dtype).expand_as(own)


def _furthest(rows: Tensor, ids: Tensor) -> int:
    """Return which row is furthest along the first principal direction of all."""
    mean = mean_row(rows)
    products = gram_matrix(rows, centre=mean)
    shares = torch.linalg.eigh(products).eigenvectors[:, -1]  # z = Σ shares_i · (x_i − mean)
    along = (products @ shares + inner_products(rows, mean, mean) @ shares).abs().cpu()
    by_id = ids.argsort()
    return int(by_id[along[by_id].argmax()])
