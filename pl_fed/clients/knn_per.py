"""kNN-Per: the global model's probabilities, mixed with those of a client's nearest own samples.

O. Marfoq, G. Neglia, L. Kameni and R. Vidal. "Personalized federated learning through local
memorization". ICML 2022. arXiv 2111.09360.

The global model w is trained as in FedAvg. Client k stores the features φ(x_i) under w, the inputs
of its head, and the labels y_i of its training samples. For a new x, with the Euclidean distances
d_i = ‖φ(x) − φ(x_i)‖ and the k nearest samples N::

    kNN(x)_c = Σ_{i in N, y_i = c} exp(−d_i) / Σ_{i in N} exp(−d_i)
    p(x) = (1 − λ_k) softmax(z(x)) + λ_k kNN(x)             (z the logits under w)

λ_k has the best accuracy on the client's validation data among 0, 0.1, ..., 1; of equal ones, the
first.

Departs from the paper and the authors' code:

- The authors evaluate the final model. Here each evaluation stores the features under the present
  global model; clients keep nothing between rounds.
- The authors' code takes exp(−d_i² / (F · scale)), with F features and the scale 1 by default. Here
  ``scale`` divides d_i.
- Their code scores all λ on the test data. Here the validation data choose λ; thus the metrics of
  the personal model on the validation data are too good.
- Their code may store a random part of a client's samples; here it stores all.
- FL-bench mixes the shares with logits in place of probabilities, and its capacity counts
  minibatches.
- Of stored samples as near as the k-th, the first ones of the client count; the paper names none.
- Probabilities below 1e-30 count as 1e-30, so that losses are finite.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_instances, check_integers, check_positive, check_shares
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.heads import find_head
from pl_fed.devices import numbers_on
from pl_fed.nets.rows import trainable_parameters
from pl_fed.types import Batch

_SMALLEST = 1e-30  # the smallest probability in a loss
_ULPS = 16  # differences of distances up to so many units of rounding are 0


class KNNPer(Client):
    """kNN-Per: FedAvg, and predictions mixed with the labels of a client's nearest own samples.

    In evaluations and predictions, the personal model mixes the outputs of the global one with the
    client's samples. It is no net by itself, so ``export`` writes the global model alone.

    Args:
        net: The net that clients train: see :class:`Client`. Its outputs must be those of its head.
        neighbors: k ≥ 1, the number of the nearest samples; all samples of a client with fewer.
        lams: The candidates of λ, each in [0, 1]; an empty list takes ``lam`` for all clients.
        lam: λ of clients without validation samples, in [0, 1].
        scale: Divides distances, > 0.
        head: The name of the module that turns features into logits, such as ``"layers.5"``.
            ``None`` is the last module with trainable parameters.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If ``neighbors`` is no integer, or ``lams`` is no sequence.
        ValueError: If a number is out of range, or the net has no module ``head``. Before training,
            if the data have no class ids.

    Example:
        >>> client = KNNPer(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), neighbors=5)
        >>> client.trained, client.evaluated
        (('global',), ('global', 'personal'))
    """

    reads_class_counts = True

    def __init__(
        self,
        net: nn.Module,
        neighbors: int = 10,
        lams: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        lam: float = 0.5,
        scale: float = 1.0,
        head: str | None = None,
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(), "personal": Model(trained=False, kept=False)}
        super().__init__(net, models=models, **kwargs)
        check_integers(1, neighbors=neighbors)
        check_instances(Sequence, lams=lams)
        for candidate in lams:
            check_shares(lams=candidate)
        check_shares(lam=lam)
        check_positive(scale=scale)
        self.neighbors = neighbors
        self.lams = tuple(lams)
        self.lam = lam
        self.scale = scale
        self.head = find_head(trainable_parameters(net), head)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(w) on the minibatch."""
        return self.loss("global", batch)

    def begin(self, client: ClientRound) -> None:
        """Store the client's features and labels, and choose λ; a round needs neither."""
        if client.steps:
            return
        client.extra["store"] = self.own_values(client, self._make_entries).flatten(1)
        client.extra["lam"] = self._choose_lams(client)

    def _make_entries(self, batch: Batch) -> Tensor:
        """Return features and label of each sample, [batch, F + 1]."""
        features = self.features_of("global", batch).flatten(1)
        return torch.cat([features, batch.targets[:, None].to(torch.float32)], 1)

    def _choose_lams(self, client: ClientRound) -> Tensor:
        """Return λ of each client, [clients, 1]."""
        lam = torch.full_like(client.samples, self.lam)
        if self.lams:
            candidates = numbers_on(client.samples, self.lams, client.samples.dtype)

            def count_correct(batch: Batch) -> Tensor:
                """Return the number of correct predictions for each λ."""
                predicted = self._mix(batch, candidates[:, None, None]).argmax(2)
                correct: Tensor = predicted == batch.targets
                return (correct if batch.mask is None else correct & batch.mask).sum(1)

            best = self.own_sums(client, count_correct, "val").argmax(1)
            lam = torch.where(client.validation_samples > 0, candidates[best, None], lam)
        return torch.where(client.samples > 0, lam, 0)  # 0 for a client with an empty store

    def predict(self, model: str, batch: Batch) -> Tensor:
        """Return the logarithms of the mixed probabilities."""
        return self._mix(batch, self.read("lam")).clamp(min=_SMALLEST).log()

    def _mix(self, batch: Batch, lam: Tensor) -> Tensor:
        """Return p(x) of ONE client, [batch, classes], for one λ or several."""
        features = self.features_of("global", batch)
        logits, features = self.head_of("global", features), features.flatten(1)
        store = self.read("store").view(-1, features.shape[1] + 1)
        shares = neighbor_shares(
            features.to(store) / self.scale,
            store[:, :-1] / self.scale,
            store[:, -1].to(torch.int64),
            is_stored=torch.arange(len(store), device=store.device) < self.read("samples"),
            neighbors=self.neighbors,
            num_classes=logits.shape[1],
        )
        return torch.lerp(logits.to(store).softmax(1), shares, lam.to(store))


def neighbor_shares(
    queries: Tensor,
    features: Tensor,
    labels: Tensor,
    is_stored: Tensor,
    neighbors: int,
    num_classes: int,
) -> Tensor:
    """Return the shares of the classes among the nearest stored features, weighted by exp(−d).

    Of entries as far away as the last neighbour, but for rounding, the first ones count.

    Args:
        queries: Features of samples, [batch, F].
        features: The stored features, [entries, F].
        labels: Their class ids, int64 [entries].
        is_stored: The entries that are no padding, bool [entries].
        neighbors: The number of the nearest entries; all if there are fewer.
        num_classes: The number of classes.

    Returns:
        Shape [batch, classes]; 0 without a stored entry.

    Example:
        >>> features, labels = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]), torch.arange(3)
        >>> query, is_stored = torch.tensor([[0.2, 0.5]]), torch.ones(3, dtype=torch.bool)
        >>> neighbor_shares(query, features, labels, is_stored, neighbors=2, num_classes=3)
        tensor([[0.5999, 0.4001, 0.0000]])
    """
    # not by a matrix product, whose rounding depends on the number of models that run at once
    distances = torch.cdist(queries, features, compute_mode="donot_use_mm_for_euclid_dist")
    distances = torch.where(is_stored, distances, torch.inf)
    count = min(neighbors, len(features))
    limit = distances.topk(count, dim=1, largest=False).values[:, -1:]
    scale = torch.linalg.vector_norm(queries, dim=1, keepdim=True) + limit
    rounding = torch.where(limit < torch.inf, _ULPS * torch.finfo(limit.dtype).eps * scale, 0)
    distances = torch.where((distances - limit).abs() <= rounding, limit, distances)
    ordered = distances.sort(dim=1, stable=True)  # topk takes others of equal ones with padding
    nearest, indices = ordered.values[:, :count], ordered.indices[:, :count]
    weights = torch.where(nearest < torch.inf, (-nearest).softmax(1), 0)
    classes = torch.arange(num_classes, device=labels.device)
    is_class = labels[indices][:, :, None] == classes
    return (weights[:, :, None] * is_class).sum(1)
