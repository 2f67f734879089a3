"""DeepSight: look into the clients' models, and leave out groups of suspicious ones.

P. Rieger, T. D. Nguyen, M. Miettinen and A.-R. Sadeghi, "DeepSight: Mitigating Backdoor Attacks in
Federated Learning Through Deep Model Inspection", NDSS 2022, arXiv 2201.00763. With the update
(Δb, Δw) of the output layer of K classes, and p(x) the softmax of a model's outputs::

    E_ik = |Δb_ik| + Σ_f |Δw_ikf|,    NEUP_ik = E_ik² / Σ_k E_ik²
    TE_i = #{k: NEUP_ik > max(0.01, 1/K) max_k NEUP_ik};    suspicious: TE_i ≤ median(TE) / 2
    DDif_ik = mean of p_i(x)_k / p_w(x)_k over random inputs x, uniform in [0, 1]

HDBSCAN clusters the clients by the cosine distances of Δb, by NEUP, and by DDif for each of three
sets of inputs. Two clients in the same cluster have distance 0, others 1. The mean of the three
kinds of distances is clustered again. A group is accepted if its share of suspicious clients is
below 1/3. Clients in no group are left out. The result is the mean of the accepted uploads, each
clipped at the median norm of all.

A small TE means that a client trained few classes. The inputs have the key of the seed, the round
and the set.

Where papers and codes are silent or differ:

- Clients in no cluster differ from each other. In FLPoison they are in one cluster.
- Clusters have at least min(5, n // 2) clients, and 2. With 5, cohorts below 5 have no clusters.
- A density is that of as many neighbours as the smallest cluster has clients, as by default in the
  package of HDBSCAN and in BackFed: a group of exactly that size is no cluster. FLPoison has 3.
- Only the last clustering may find a single cluster, as in FLPoison.
- If no upload is accepted, the result is 0.
- If most uploads do not change the output layer, because its parameters stay with the clients, no
  client is suspicious.
- BackFed accepts groups with few benign clients, and both codes use outputs without softmax. Here
  both follow the paper.
"""

import warnings
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.output_layer import OutputLayer
from pl_fed.arguments import check_integers, check_shares
from pl_fed.devices import to_device
from pl_fed.functional.aggregation import (
    clip_and_average,
    cosine_distances,
    gram_matrix,
    squared_norms,
)
from pl_fed.functional.clustering import Array
from pl_fed.nets.rows import finite_rows
from pl_fed.random import generator
from pl_fed.types import RoundContext

_BATCH = 500  # random inputs of one forward pass
_LARGEST_LOGARITHM = 300.0  # of a ratio of probabilities: its exponential is finite


class DeepSight(Aggregator):
    """DeepSight: clipped mean of the groups of clients without many suspicious models.

    Source: Rieger et al., NDSS 2022. Breakdown point: f < n / 2, because no upload in the mean is
    longer than the median of the norms. It logs the uploads that it leaves out as ``"dropped"``,
    and the clipped ones among the others as ``"clipped"``.

    Each round takes ``num_sets`` · ``num_inputs`` forward passes of n + 1 models. It refuses nets
    without a linear layer with a bias at the end, nets without a `forward`, and inputs other than
    one real tensor. The last layer in the order of the parameters is the output layer. With a
    single output, and with clients that keep this layer to themselves, as in FedRep, no model is
    suspicious: the result is the clipped mean of all groups. A single output gets a warning.

    Args:
        num_inputs: The number of random inputs of a set, at least 1.
        num_sets: The number of sets of random inputs, at least 1.
        suspicious_share: The share of suspicious clients in [0, 1] from which on a group is left
            out.
        min_cluster_size: The smallest cluster in large cohorts, at least 2.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.broadcast``: [d].
        - ``weights``: [n]; unused.
        - output: [d]; 0 if no upload is accepted.

    Raises:
        ValueError: If an argument is out of range, there is no upload, or the context lacks the
            net, its inputs or the layout. If the net has no output layer with a bias, other
            inputs than one real tensor, or other outputs than [batch, K].

    Example:
        >>> from pl_fed.nets.rows import RowLayout
        >>> net = nn.Linear(2, 2)
        >>> uploads = torch.tensor([[1.0] * 6, [1.0] * 6, [1.1] * 6, [0.0] * 5 + [9.0]])
        >>> context = RoundContext(
        ...     clients=torch.arange(4),
        ...     broadcast=nn.utils.parameters_to_vector(net.parameters()).detach(),
        ...     layout=RowLayout.from_parameters(net),
        ...     inputs=torch.empty(0, 2),
        ...     net=lambda update=None: net,
        ... )
        >>> DeepSight(num_inputs=8)(uploads, torch.ones(4), context).shape
        torch.Size([6])
    """

    needs_net = True

    def __init__(
        self,
        num_inputs: int = 20_000,
        num_sets: int = 3,
        suspicious_share: float = 1 / 3,
        min_cluster_size: int = 5,
    ) -> None:
        super().__init__()
        check_integers(1, num_inputs=num_inputs, num_sets=num_sets)
        check_integers(2, min_cluster_size=min_cluster_size)
        check_shares(suspicious_share=suspicious_share)
        self.num_inputs = num_inputs
        self.num_sets = num_sets
        self.suspicious_share = suspicious_share
        self.min_cluster_size = min_cluster_size

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the clipped mean of the accepted groups [d]."""
        self.require_uploads(uploads)
        layer = self._find_layer(context)
        self.require_layout(uploads, context)
        norms = squared_norms(uploads).sqrt().nan_to_num(torch.inf, torch.inf)
        bound = norms.quantile(0.5)
        accepted = self._accept(uploads, layer, context) & norms.isfinite()
        context.reject_rows(~accepted)
        context.note("clipped", (accepted & (norms > bound)).sum())
        return clip_and_average(uploads, accepted, norms, bound)

    def _find_layer(self, context: RoundContext) -> OutputLayer:
        """Return the output layer, after a check of the net's parameters and inputs."""
        name, inputs = type(self).__name__, context.inputs
        layer = OutputLayer.find(context.layout, name)
        if layer.bias_begin is None:
            raise ValueError(
                "Expected argument `net` to end with a linear layer with a bias for"
                f" {name} but got {layer.name} without a trainable bias: add the bias, or use"
                " another `federation.aggregator`."
            )
        if layer.num_outputs < 2:
            warnings.warn(
                f"{name} compares the scores of classes, but {layer.name} has one output: no model"
                " is suspicious, and the result is the clipped mean. Use another"
                " `federation.aggregator`.",
                stacklevel=2,
            )
        if inputs is not None and not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
            kind = str(inputs.dtype) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ValueError(
                "Expected argument `data` to have one tensor of real numbers as inputs for"
                f" {name}, which draws random inputs, but got {kind}: use another"
                " `federation.aggregator`."
            )
        # also with the short uploads of a trial
        if context.net is not None and isinstance(inputs, Tensor):
            example = to_device(torch.zeros(1, *inputs.shape[1:]), inputs, inputs.dtype)
            self._log_probabilities(context.net(), example)
        return layer

    def _accept(self, uploads: Tensor, layer: OutputLayer, context: RoundContext) -> Tensor:
        """Return a mask of the uploads in accepted groups, bool [n]."""
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        biases = layer.read_bias(uploads).double()[by_client]
        energies = biases.abs() + layer.read_weight(uploads)[by_client].double().abs().sum(2)
        shares = normalize_energies(energies).cpu()
        is_suspicious = find_suspicious(shares).numpy()
        differences = self._measure_differences(uploads, by_client, context)
        products = gram_matrix(biases).cpu()
        usable = finite_rows(uploads)[by_client].cpu().numpy()
        usable &= products.diagonal().isfinite().numpy() & np.isfinite(differences).all((0, 2))
        by_bias = self._cluster(cosine_distances(products).numpy(), usable, precomputed=True)
        by_energy = self._cluster(shares.numpy(), usable)
        by_difference = [self._cluster(values, usable) for values in differences]
        distances = np.mean(
            [
                compare_labels(by_bias),
                compare_labels(by_energy),
                np.mean([compare_labels(labels) for labels in by_difference], axis=0),
            ],
            axis=0,
        )
        groups = self._cluster(distances, usable, precomputed=True, allow_single_cluster=True)
        accepted = np.zeros(len(groups), dtype=bool)
        for group in set(groups[groups >= 0].tolist()):
            members = groups == group
            accepted |= members & (is_suspicious[members].mean() < self.suspicious_share)
        mask = torch.zeros(len(uploads), dtype=torch.bool, device=uploads.device)
        mask[by_client] = torch.from_numpy(accepted).to(uploads.device)
        return mask

    def _measure_differences(
        self, uploads: Tensor, by_client: Tensor, context: RoundContext
    ) -> Array:
        """Return DDif of the clients in the order of their ids, [sets, n, K]."""
        if context.net is None or not isinstance(context.inputs, Tensor):
            raise ValueError(
                "Expected `context.net` and `context.inputs` to be the net and its kind of inputs"
                f" for {type(self).__name__} but got None."
            )
        global_net = context.net()
        expected = [
            [self._log_probabilities(global_net, inputs) for inputs in self._draw(number, context)]
            for number in range(self.num_sets)
        ]
        means: list[list[Tensor]] = []
        for client in by_client.tolist():
            net = context.net(uploads[client])
            means.append([])
            for number, reference in enumerate(expected):
                total = torch.zeros_like(reference[0][0])
                for inputs, logarithms in zip(self._draw(number, context), reference):
                    ratios = self._log_probabilities(net, inputs) - logarithms
                    total += ratios.clamp(max=_LARGEST_LOGARITHM).exp().sum(0)
                means[-1].append(total / self.num_inputs)
        values: Array = torch.stack([torch.stack(sets) for sets in means], 1).cpu().numpy()
        return values

    def _draw(self, number: int, context: RoundContext) -> Iterator[Tensor]:
        """Yield the batches of a set of random inputs, [batch, ...]."""
        example = cast(Tensor, context.inputs)
        draw = generator(context.seed, "deepsight", context.round, number)
        for begin in range(0, self.num_inputs, _BATCH):
            size = min(_BATCH, self.num_inputs - begin)
            inputs = torch.rand(size, *example.shape[1:], generator=draw)
            yield to_device(inputs, example, example.dtype)

    def _log_probabilities(self, net: nn.Module, inputs: Tensor) -> Tensor:
        """Return the logarithms of the softmax of a net's outputs, float64 [batch, K]."""
        try:
            with torch.no_grad():
                outputs = net(inputs)
        except NotImplementedError as error:  # a LightningModule may have steps alone
            raise ValueError(
                "Expected argument `net` to return a score for each class for"
                f" {type(self).__name__} but its `forward` failed: {str(error).rstrip('.')}; define"
                " it, or use another `federation.aggregator`."
            ) from error
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            got = getattr(outputs, "shape", type(outputs).__name__)
            raise ValueError(
                f"Expected argument `net` to return outputs [batch, classes] for"
                f" {type(self).__name__} but got {got}: use another `federation.aggregator`."
            )
        return outputs.double().log_softmax(1)

    def _cluster(self, values: Array, usable: Array, **options: Any) -> Array:
        """Return the cluster of each client by :func:`cluster_by_density`, −1 for none, [n]."""
        labels = np.full(len(values), -1)
        if not usable.any():
            return labels
        values = values[usable]
        if options.get("precomputed"):
            values = values[:, usable]
        labels[usable] = cluster_by_density(values, self.min_cluster_size, **options)
        return labels

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload in an accepted group may have any direction."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest minority: the result is never longer than the median of the norms."""
        return max(0, (num_uploads - 1) // 2)


def normalize_energies(energies: Tensor) -> Tensor:
    """Return NEUP, the share of each class in the squared energies of a client.

    Args:
        energies: E of each client and class, at least 0, float64 [n, K].

    Returns:
        Shape [n, K]; 0 for a client whose energies are 0 or not finite.

    Example:
        >>> normalize_energies(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
        tensor([[0.1000, 0.9000],
                [0.0000, 0.0000]])
    """
    if not energies.shape[1]:
        return energies
    largest = energies.amax(1, keepdim=True)
    squares = (energies / torch.where(largest == 0, 1, largest)).square()
    shares = squares / squares.sum(1, keepdim=True)
    return torch.where(largest.isfinite() & (largest > 0), shares, 0)


def find_suspicious(shares: Tensor) -> Tensor:
    """Return the clients with at most half of the median number of exceeded thresholds.

    Args:
        shares: NEUP, [n, K].

    Returns:
        bool [n]; all ``False`` if the median is 0.

    Example:
        >>> find_suspicious(torch.tensor([[0.3, 0.3, 0.4], [0.0, 0.0, 1.0], [0.4, 0.5, 0.1]]))
        tensor([False,  True, False])
    """
    n, num_classes = shares.shape
    if not num_classes:
        return torch.zeros(n, dtype=torch.bool)
    thresholds = max(0.01, 1 / num_classes) * shares.amax(1, keepdim=True)
    exceedings = (shares > thresholds).sum(1).double()
    median = exceedings.quantile(0.5)
    return (exceedings <= median / 2) & (median > 0)


def cluster_by_density(
    values: Array,
    min_cluster_size: int,
    precomputed: bool = False,
    allow_single_cluster: bool = False,
) -> Array:
    """Return the clusters of HDBSCAN by scikit-learn; −1 for points in none, int [n].

    A single point is a cluster.

    Args:
        values: Points [n, c], or distances [n, n].
        min_cluster_size: The smallest cluster; at most half of the points count, and at least 2.
        precomputed: Whether the values are distances.
        allow_single_cluster: Whether all points may be one cluster.

    Example:
        >>> cluster_by_density(np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.3]]), 2)
        array([0, 0, 0, 1, 1, 1])
    """
    from sklearn.cluster import HDBSCAN  # slow to import

    n = len(values)
    if n == 1 or not values.shape[1]:
        return np.zeros(n, dtype=int)
    smallest = max(2, min(min_cluster_size, n // 2))
    hdbscan = HDBSCAN(
        min_cluster_size=smallest,
        min_samples=min(smallest + 1, n),  # scikit-learn counts the point itself
        metric="precomputed" if precomputed else "euclidean",
        allow_single_cluster=allow_single_cluster,
        copy=True,
    )
    labels: Array = hdbscan.fit(values).labels_
    return labels


def compare_labels(labels: Array) -> Array:
    """Return 0 for two clients in one cluster and on the diagonal, else 1, [n, n].

    Example:
        >>> compare_labels(np.array([0, 0, -1, -1])).astype(int)
        array([[0, 0, 1, 1],
               [0, 0, 1, 1],
               [1, 1, 0, 1],
               [1, 1, 1, 0]])
    """
    is_same = (labels[:, None] == labels) & (labels >= 0)
    distances: Array = 1.0 - (is_same | np.eye(len(labels), dtype=bool))
    return distances
