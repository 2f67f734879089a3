"""TorchJD: weights of the uploads by a method of Jacobian descent, from inner products.

P. Quinton and V. Rey, "Jacobian Descent For Multi-Objective Optimization", arXiv 2406.16232, and
their package torchjd, which has many methods that weigh conflicting gradients, one for each client
here::

    Δ = Σ_k a_k Δ_k,    a = method(P),    P_jk = Δ_j · Δ_k / mean_i ‖Δ_i‖²

Among them are UPGrad, CAGrad, NashMTL, AlignedMTL, DualProj, IMTLG, MGDA, PCGrad and FairGrad.
pl_fed computes P, also in slices of the coordinates, and the method sees n × n numbers only.

Departs from torchjd:

- It gives the methods the gradients. Here P is divided by the mean squared length, because the
  constants of the methods suit gradients of a length of about 1. Bounds of a length, such as
  ``max_norm`` of NashMTL, are in units of the root of this mean.
- NashMTL reads the matrix of gradients. Here it gets the root of P, whose rows have the same
  products. Methods that need single coordinates, such as ExcessMTL, are refused.
- Methods with a state, such as NashMTL, are reset in each round, so that a checkpoint needs none.
- Random numbers come from a key of the seed and the round.

torchjd's solver of NashMTL may fail without a word, and weighs all clients alike then. In 3 of 30
trials (three updates of six normal numbers with mean 1/2), no a_k (P a)_k was like the others.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.aggregators.base import Aggregator
from pl_fed.functional.aggregation import gram_matrix, linear_combinations, merging_dtype
from pl_fed.random import fork_torch_rng, key
from pl_fed.types import RoundContext


class TorchJD(Aggregator):
    """TorchJD: weighted sum of the uploads by a method of the package torchjd.

    It needs ``pip install pl_fed[torchjd]``. The weights may be negative, and have any sum.
    Breakdown point: 0.

    Args:
        method: The name of an aggregator of ``torchjd.aggregation`` that weighs gradients, such as
            ``"UPGrad"``; or such an object; or a module that maps the matrix of inner products,
            float64 [n, n], to weights [n].
        options: Arguments of the method by name, such as ``{c: 0.5}`` for ``"CAGrad"``.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; unused.
        - output: [d]; 0 if all uploads are 0.

    Raises:
        ModuleNotFoundError: If a package is not installed.
        TypeError: If ``method`` is neither a name nor a module.
        ValueError: If the method or an option does not exist, there is no upload, or the method
            fails or gives other than n finite weights.

    Example:
        >>> class Equal(nn.Module):
        ...     def forward(self, products):
        ...         return torch.full((len(products),), 1 / len(products))
        >>> uploads = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> TorchJD(Equal())(uploads, torch.ones(2), RoundContext())
        tensor([0.5000, 1.5000])
    """

    shards = True

    def __init__(
        self, method: str | nn.Module = "UPGrad", options: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        if isinstance(method, str):
            method = build_method(method, options or {})
        elif not isinstance(method, nn.Module):
            raise TypeError(
                "Expected argument `method` to be the name of an aggregator of torchjd or a module"
                f" but got {type(method).__name__}."
            )
        elif options:
            raise ValueError(
                "Expected argument `options` to be empty beside a built `method` but got"
                f" {options}."
            )
        self.method = method

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their weighted sum [d]."""
        self.require_uploads(uploads)
        order = torch.arange(len(uploads))
        if context.clients.shape == order.shape:
            order = context.clients.argsort(stable=True)
        order = order.to(uploads.device)
        products = context.sum(gram_matrix(uploads, order))
        if not products.isfinite().all():
            raise self.overflow_error(uploads)
        unit = products.diagonal().mean()
        if not unit > 0:
            return uploads.new_zeros(uploads.shape[1], dtype=merging_dtype(uploads))
        shares = torch.empty_like(unit.expand(len(uploads)))
        shares[order] = self._weigh(products / unit, context)
        return linear_combinations(uploads, shares[None])[0]

    def _weigh(self, products: Tensor, context: RoundContext) -> Tensor:
        """Return the method's weights for inner products [n, n], float64 [n]."""
        name = type(self.method).__name__
        with fork_torch_rng(products.device) as seed:
            seed(key(context.seed, "torchjd", context.round))
            try:
                shares = weigh_by_method(self.method, products)
            except Exception as error:
                raise ValueError(
                    f"Expected argument `method` of TorchJD to weigh {len(products)} uploads but"
                    f" {name} raised {type(error).__name__}: {error}"
                ) from error
        if shares.shape != products.shape[:1] or not shares.isfinite().all():
            raise ValueError(
                f"Expected argument `method` of TorchJD to give {len(products)} finite weights but"
                f" {name} gave {shares.tolist()}."
            )
        return shares.to(products)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere."""
        return 0


def build_method(name: str, options: dict[str, Any]) -> nn.Module:
    """Return a method of torchjd, by the name of its aggregator."""
    remedy = "run `pip install pl_fed[torchjd]`"
    try:
        methods = importlib.import_module("torchjd.aggregation")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Expected the package torchjd for the aggregator TorchJD but it is missing: {remedy}."
        ) from error
    kinds = {
        member.__name__: member
        for member in vars(methods).values()
        if isinstance(member, type) and issubclass(member, methods.GramianWeightedAggregator)
        if member is not methods.GramianWeightedAggregator
    } | {"NashMTL": methods.NashMTL}
    if name not in kinds:
        raise ValueError(
            f"Expected argument `method` to be one of {', '.join(sorted(kinds))} but got {name!r}."
        )
    try:
        method: nn.Module = kinds[name](**options)
    except ImportError as error:
        raise ModuleNotFoundError(f"{name} of torchjd lacks a package: {remedy}.") from error
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected argument `options` to be arguments of {name} of torchjd but got {options}:"
            f" {error}"
        ) from error
    return method


def weigh_by_method(method: nn.Module, products: Tensor) -> Tensor:
    """Return the weights of a method for inner products [n, n]."""
    reset = getattr(method, "reset", None)
    if callable(reset):
        reset()
    kinds = {kind.__name__ for kind in type(method).__mro__}
    weighting: Any = method
    if "GramianWeightedAggregator" in kinds:
        weighting = method.gramian_weighting
    elif "NashMTL" in kinds:
        weighting, products = method.weighting, find_root(products)
    with torch.no_grad():
        shares: Tensor = weighting(products)
    return shares


def find_root(products: Tensor) -> Tensor:
    """Return the symmetric root of a Gram matrix [n, n]: rows with the same products.

    Example:
        >>> find_root(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))
        tensor([[2., 0.],
                [0., 3.]])
    """
    values, vectors = torch.linalg.eigh(products)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
