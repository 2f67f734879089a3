"""FoolsGold: a small weight for clients whose sums of uploads point in similar directions.

C. Fung, C. J. M. Yoon and I. Beschastnikh, "The Limitations of Federated Learning in Sybil
Settings", RAID 2020, arXiv 1808.04866, Algorithm 1, with the constants of the authors' code. H_k is
the sum of all uploads of client k so far, and cs_kk = 0::

    cs_ij = cos(H_i, H_j),    v_i = max_j cs_ij + ε
    cs_ij ← cs_ij v_i / v_j    for all j with v_j > v_i    (pardoning)
    α_i = 1 − max_j cs_ij in [0, 1],    α ← α / max(α), and 0.99 where that is 1
    α_i ← ln(α_i / (1 − α_i) + ε) + 0.5, clipped to [0, 1]
    Δ = Σ_k α_k Δ_k / Σ_k α_k

Departs from the authors' code:

- It adds up α_k Δ_k without a divisor, up to n times as much as a mean. Here the default is a
  weighted mean, because the server's step is that of a mean. ``divisor`` has both.
- If all sums have one direction, it divides by 0. Here all weights are 0, and so is the result.
- It compares all clients; here, as in BackFed, those of the cohort are compared.
- A sum of length 0 is similar to none.
- Cosines within 1e-9 of 1 are 1: rounding decides nothing.

Sybils need similar uploads to be found. Therefore benign clients with equal data are punished, and
one attacker alone has a weight of 1.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.client_memory import ClientMemory
from pl_fed.aggregators.output_layer import OutputLayer
from pl_fed.arguments import check_choice, check_positive, check_shares
from pl_fed.functional.aggregation import gram_matrix, merging_dtype, weighted_sum
from pl_fed.nets.rows import RowLayout, finite_rows
from pl_fed.types import RoundContext

_EPSILON = 1e-5  # of the authors' code
_TOP_WEIGHT = 0.99  # of the authors' code: the logit of 1 is infinite
_ROUNDING = 1e-9  # cosines that differ from 1 by less are 1


class FoolsGold(Aggregator):
    """FoolsGold: mean of the uploads, with weights near 0 for clients that are similar.

    Source: Fung et al., RAID 2020, Algorithm 1. It keeps the sum of each client's uploads: as many
    rows as clients took part so far. Breakdown point: 0, because an upload of any length counts if
    its client resembles no other. :class:`Clipping` in front bounds the length, also in the sums.
    It logs the number of uploads with weight 0 as ``"dropped"``.

    Args:
        output_share: A share in (0, 1]. Similarities then use only the output layer's weights, for
            each output this share of the largest ones in the global model: the features that
            indicate a class. ``None`` uses all coordinates.
        divisor: Divisor of Σ α_k Δ_k: the sum of the ``"weights"``, the number of ``"clients"`` in
            the cohort, or ``"none"`` as in the authors' code.

    Shape:
        - ``uploads``: [n, d], n at least 1, finite; d is constant over all rounds.
        - ``weights``: [n]; unused.
        - output: [d]; 0 if all weights are 0.

    Attributes:
        sums: The sum of each client's uploads, or of the output layer's part of them.

    Raises:
        ValueError: If an argument is out of range, there is no upload, an upload is not finite,
            or the context lacks the clients' ids. With ``output_share``, if the net has no linear
            layer, or the context lacks the layout or the broadcast.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
        >>> context = RoundContext(clients=torch.arange(4))
        >>> FoolsGold()(uploads, torch.ones(4), context)
        tensor([0.5000, 0.5000])
    """

    remembers_clients = True

    def __init__(
        self,
        output_share: float | None = None,
        divisor: Literal["weights", "clients", "none"] = "weights",
    ) -> None:
        super().__init__()
        if output_share is not None:
            check_positive(output_share=output_share)
            check_shares(output_share=output_share)
        check_choice(("weights", "clients", "none"), divisor=divisor)
        self.output_share = output_share
        self.divisor = divisor
        self.sums = ClientMemory()

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean by dissimilarity [d]."""
        self.require_uploads(uploads)
        clients = self.require_clients(uploads, context)
        features, is_important = self._select_features(uploads, context)
        if not finite_rows(uploads).all():
            raise self.overflow_error(uploads)
        sums = self._add_to_sums(clients, features)
        by_client = clients.argsort(stable=True).to(uploads.device)
        compared = sums if is_important is None else sums * is_important
        products = gram_matrix(compared, by_client)
        if not products.isfinite().all():  # the squares of float64 sums overflow
            largest = compared.abs().amax(1, keepdim=True)
            products = gram_matrix(compared / torch.where(largest > 0, largest, 1.0), by_client)
        alphas = torch.empty(len(uploads), dtype=torch.float64, device=uploads.device)
        alphas[by_client] = find_foolsgold_weights(_find_cosines(products))
        context.reject_rows(alphas == 0)
        if self.divisor == "weights":
            alphas = alphas / alphas.sum().clamp(min=1)
        elif self.divisor == "clients":
            alphas = alphas / len(uploads)
        return weighted_sum(uploads, alphas)

    def list_compared_positions(self, layout: RowLayout) -> Tensor | None:
        """Return the positions of the output layer's weights; ``None`` without ``output_share``."""
        if self.output_share is None:
            return None
        return layout.positions(OutputLayer.find(layout, type(self).__name__).name)

    def _select_features(
        self, uploads: Tensor, context: RoundContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return the coordinates of uploads that are compared, [n, f], and a mask [f] or None."""
        if self.output_share is None:
            return uploads, None
        layer = OutputLayer.find(context.layout, type(self).__name__)
        self.require_layout(uploads, context)
        broadcast = self.require_broadcast(uploads, context)
        sizes = layer.read_weight(broadcast).abs()
        count = max(1, round(self.output_share * layer.num_inputs))
        largest = sizes.argsort(dim=1, descending=True, stable=True)[:, :count]
        mask = torch.zeros_like(sizes).scatter_(1, largest, 1.0)
        return layer.read_weight(uploads).flatten(1), mask.flatten()

    def _add_to_sums(self, clients: Tensor, features: Tensor) -> Tensor:
        """Add features [n, f] to the memory, and return the clients' sums, [n, f]."""
        dtype = merging_dtype(features)
        zeros = features.new_zeros(features.shape[1], dtype=dtype)
        sums = self.sums.read(clients, default=zeros).add_(features)
        largest = torch.finfo(dtype).max
        self.sums.write(clients, sums.clamp_(-largest, largest))
        return sums

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload may have any values if its client resembles no other."""
        return 0


def _find_cosines(products: Tensor) -> Tensor:
    """Return the cosines between rows with 0 on the diagonal, from the products of all pairs."""
    norms = products.diagonal().sqrt()
    cosines = (products / norms[:, None] / norms).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)
    cosines = torch.where(cosines > 1 - _ROUNDING, 1.0, cosines)
    upper = cosines.triu(1)  # the two halves of a matrix product may differ in the last bit
    return upper + upper.T


def find_foolsgold_weights(similarities: Tensor) -> Tensor:
    """Return the weights α of FoolsGold from the cosines of the clients' sums.

    Args:
        similarities: cs, symmetric, in [−1, 1], with 0 on the diagonal, float64 [n, n].

    Returns:
        Numbers in [0, 1], float64 [n].

    Example:
        >>> similarities = torch.tensor([[0.0, 0.0, 0.7], [0.0, 0.0, 1.0], [0.7, 1.0, 0.0]])
        >>> find_foolsgold_weights(similarities.double())
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    largest = similarities.amax(1) + _EPSILON
    ratios = (largest[:, None] / largest).clamp(max=1)
    alphas = (1 - (similarities * ratios).amax(1)).clamp(0, 1)
    if not alphas.any():
        return alphas
    alphas = alphas / alphas.max()
    alphas = torch.where(alphas == 1, _TOP_WEIGHT, alphas)
    logits: Tensor = (alphas / (1 - alphas) + _EPSILON).log() + 0.5
    return logits.clamp(0, 1)
