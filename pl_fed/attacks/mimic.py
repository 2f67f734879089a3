"""Mimic: all attackers copy the upload of one benign client.

S. P. Karimireddy, L. He and M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
Bucketing", ICLR 2022, arXiv 2006.09365 (the mimic attack)::

    Δ_k = x_i   for one honest client i,   i = argmax_i |z · x_i|
    z = the direction in which the honest uploads x_i differ most

The weight of the copied client in the result becomes too large. No defence can distinguish a forged
upload from an honest one. Where the clients' data differ, the result moves away from the other
clients.

Departs from the paper: z is the first principal direction of the round's uploads. In the paper, the
attackers learn z while they only observe the first rounds, and copy the same client afterwards.
Here the copied client may change in every round, unless ``client`` is set.
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
    """Mimic: all attackers send a copy of one benign client's upload.

    Args:
        client: Id of the copied client, at least 0. If it is ``None``, or the client is not in the
            cohort, the attack copies the client furthest along the first principal direction of
            the uploads; the smallest id among equals.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d]. ``own``, if the attackers know no finite upload.

    Raises:
        TypeError: If ``client`` is not an integer.
        ValueError: If ``client`` is negative; on :meth:`forge`, if client ids are missing.

    Example:
        >>> honest, own = torch.tensor([[0.0, 1.0], [4.0, 0.0], [1.0, 1.0]]), torch.zeros(1, 2)
        >>> context = RoundContext(observed=torch.tensor([2, 5, 7]))
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
        """Return copies of one client's upload."""
        reference, ids = honest, context.observed
        if not len(honest):
            valid = finite_rows(own)
            reference, ids = own[valid], context.attackers[valid.cpu()]
        if len(ids) != len(reference):
            raise ValueError(
                f"Expected `context.observed` to be the ids of {len(reference)} clients for Mimic"
                f" but got {ids.tolist()}."
            )
        if not len(reference):
            return own
        positions = [] if self.client is None else (ids == self.client).nonzero().flatten().tolist()
        copied = positions[0] if positions else _furthest_position(reference, ids)
        return reference[copied].to(own.dtype).expand_as(own)


def _furthest_position(rows: Tensor, ids: Tensor) -> int:
    """Return the position of the row furthest along the first principal direction of all rows."""
    mean = mean_row(rows).nan_to_num(0.0, 0.0, 0.0)  # if it overflows, 0 is a centre, too
    products = gram_matrix(rows, centre=mean)
    coefficients = torch.linalg.eigh(products).eigenvectors[:, -1]  # c in z = Σ c_i (x_i − mean)
    projections = products @ coefficients + inner_products(rows, mean, mean) @ coefficients
    by_id = ids.argsort()
    return int(by_id[projections.abs().cpu()[by_id].argmax()])
