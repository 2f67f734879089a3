"""FLDetector: detect clients whose updates are unlike a prediction from the past.

Z. Zhang, X. Cao, J. Jia and N. Z. Gong, "FLDetector: Defending Federated Learning Against Model
Poisoning Attacks via Detecting Malicious Clients", KDD 2022, arXiv 2207.09209, Algorithms 1 to 3.
With the global models w^t, the merged updates Δ^t and the update Δ_k of client k::

    S, Y = the last N pairs (w^r − w^(r−1), Δ^r − Δ^(r−1));   B from S and Y by L-BFGS
    prediction of Δ_k^t = Δ_k^τ + B (w^t − w^τ),    τ = the last round of client k
    d_k = ‖prediction − Δ_k‖ / mean_j ‖prediction − Δ_j‖;    score of k = mean of its last N d_k

If the gap statistic of the scores finds two or more clusters, there is an attack: 2-means splits
the scores, and the cluster with the larger mean is detected. The scores are scaled to [0, 1]. There
are 10 sets of reference points and up to 7 clusters, as in the authors' code.

A pair belongs to one round. The paper has gradients; updates are about their negative multiples,
so B is that of the negative multiple, and the prediction is the same.

Departs from the paper:

- The paper removes the detected clients and trains again from the start. Here the uploads of
  detected clients are left out from then on. With ``restart``, the global model goes back to the
  first one; rounds go on counting, and clients keep their own models and states. Without, the model
  stays. The pairs and scores begin again in both cases, because the merged updates jump.
- All clients take part in the paper. Here a client's own last update and the change of the model
  since then give its prediction. A client without an update within the last N + 1 merged rounds has
  no score in a round.
- The paper divides distances by their sum. Here it is their mean, so that rounds with few and with
  many clients count alike. If all clients take part, nothing changes.
- The first prediction is possible after N + 1 merged rounds, not after 2 N.
- A round whose small matrix is singular gives no scores. Fewer than four scored clients are not
  split.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.client_memory import ClientMemory
from pl_fed.aggregators.median import Median
from pl_fed.arguments import check_instances, check_integers
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.functional.clustering import Array, count_clusters, find_clusters
from pl_fed.functional.hessian import HessianEstimate
from pl_fed.nets.rows import finite_rows
from pl_fed.random import key, numpy_generator
from pl_fed.types import RoundContext

_MAX_CLUSTERS, _NUM_REFERENCES = 7, 10  # of the authors' code
_FEWEST_CLIENTS = 4
_NO_SCORE = -1.0


class FLDetector(Aggregator):
    """FLDetector: leaves out clients whose updates are unlike the prediction from their past.

    Source: Zhang et al., KDD 2022. It keeps the last upload of each client, N + 1 global models and
    N + 1 merged updates. The first detection is possible after 2 N + 1 rounds of a client.
    Breakdown point: 0, because forged uploads may make benign clients look odd. It logs the number
    of uploads of detected clients as ``"dropped"``.

    Args:
        window: N, the number of pairs and of distances in a score, at least 1.
        then: Merges the uploads of the others; ``None`` for the median, as in the authors' code. If
            fewer are left than it can merge, the median merges them.
        restart: Whether a detection sets the global model back to the first one, as in the paper.
            The server's optimizer has to be plain SGD with learning rate 1.

    Shape:
        - ``uploads``: [n, d], n at least 1, finite; d is constant over all rounds;
          ``context.broadcast``: [d].
        - ``weights``: [n], passed on.
        - output: [d]; 0 if all clients of the cohort are detected.

    Attributes:
        detected: Ids of the detected clients, int64.

    Raises:
        TypeError: If ``then`` is no aggregator, or ``restart`` no boolean.
        ValueError: If ``window`` is below 1, there is no upload, an upload is not finite, or the
            context lacks the clients' ids or the broadcast.

    Example:
        >>> uploads = torch.tensor([[1.0, 0.0], [1.0, 1.0], [4.0, 2.0]])
        >>> context = RoundContext(clients=torch.arange(3), broadcast=torch.zeros(2))
        >>> FLDetector()(uploads, torch.ones(3), context)
        tensor([1., 1.])
    """

    remembers_clients = True

    detected: Tensor
    first: Tensor
    models: Tensor
    updates: Tensor
    step: Tensor

    def __init__(
        self, window: int = 10, then: Aggregator | None = None, restart: bool = False
    ) -> None:
        super().__init__()
        check_integers(1, window=window)
        check_instances(Aggregator, then=then)
        check_instances(bool, restart=restart)
        self.window = window
        self.then = Median() if then is None else then
        self.take_needs(self.then)
        self.restart = restart
        self.sets_model |= restart
        if restart:
            self.add_memory("first")  # the global model of the first round
        self.add_memory("detected", torch.empty(0, dtype=torch.int64))
        self.add_memory("models")  # of the last N + 1 merged rounds, oldest first
        self.add_memory("updates")  # the merged updates of these rounds
        self.add_memory("step", torch.zeros((), dtype=torch.int64))  # merged rounds so far
        self.uploads = ClientMemory()
        self.steps = ClientMemory()  # the step of a client's last upload
        self.distances = ClientMemory()  # its last N distances, oldest first

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge the uploads [n, d] of the clients that are not detected [d]."""
        self.require_uploads(uploads)
        broadcast = self.require_broadcast(uploads, context)
        clients = self.require_clients(uploads, context)
        if not finite_rows(uploads).all():
            raise self.overflow_error(uploads)
        if self.restart and not len(self.first):
            self.first = broadcast.clone()
        self._score(uploads, clients, broadcast)
        detects = self._detect(context)
        is_detected = self._is_detected(clients).to(uploads.device)
        context.reject_rows(is_detected)
        if detects and self.restart:
            return (self.first.double() - broadcast.double()).to(merging_dtype(uploads))
        if is_detected.all():
            return uploads.new_zeros(uploads.shape[1], dtype=merging_dtype(uploads))
        merged = self._merge_others(uploads, weights, context, ~is_detected)
        self._remember(uploads, clients, broadcast, merged)
        return merged

    def _is_detected(self, clients: Tensor) -> Tensor:
        """Return whether each client is detected, bool [n] on the CPU."""
        return torch.isin(clients, self.detected.cpu())

    def _score(self, uploads: Tensor, clients: Tensor, broadcast: Tensor) -> None:
        """Append this round's distance of each client that has a prediction."""
        if len(self.models) <= self.window:
            return
        models, updates = self.models.double(), self.updates.double()
        estimate = HessianEstimate.fit(models.diff(dim=0), updates.diff(dim=0))
        if estimate is None:
            return
        last_steps = self.steps.read(clients, default=torch.tensor([-1], device=uploads.device))
        ages = int(self.step) - last_steps.flatten().cpu()
        predictable = self.uploads.contains(clients) & (ages <= len(models))
        predictable &= ~self._is_detected(clients)
        scored = predictable.nonzero().flatten()
        distances = torch.zeros(len(scored), dtype=torch.float64)
        for age in ages[scored].unique().tolist():
            change = estimate.multiply(broadcast - models[len(models) - age])
            for index in (ages[scored] == age).nonzero().flatten().tolist():
                row = int(scored[index])
                before = self.uploads.read(clients[row : row + 1], default=uploads[row])[0]
                distances[index] = (before.double() + change - uploads[row].double()).norm()
        total = distances.sum()
        if not total.isfinite():
            return
        distances = distances * len(scored) / total if total > 0 else distances
        missing = torch.full((self.window,), _NO_SCORE, dtype=torch.float64)
        past = self.distances.read(clients[scored], default=missing.to(uploads.device))
        latest = torch.cat([past[:, 1:], distances[:, None].to(past)], 1)
        if len(scored):
            self.distances.write(clients[scored], latest)

    def _detect(self, context: RoundContext) -> bool:
        """Split the clients with full scores; return whether clients have been detected."""
        if not len(self.distances.ids):
            return False
        ids, distances = self.distances.ids.cpu(), self.distances.rows.cpu()
        complete = (distances != _NO_SCORE).all(1) & ~self._is_detected(ids)
        ids, distances = ids[complete], distances[complete]
        order = ids.argsort()
        ids, scores = ids[order], distances[order].mean(1).numpy()
        odd = find_odd_scores(scores, key(context.seed, "fldetector", context.round))
        if odd.any():
            self.detected = torch.cat([self.detected, ids[torch.from_numpy(odd)].to(self.detected)])
            self.models, self.updates = self.models[:0], self.updates[:0]
            self.distances.rows = torch.full_like(self.distances.rows, _NO_SCORE)
        return bool(odd.any())

    def _merge_others(
        self, uploads: Tensor, weights: Tensor, context: RoundContext, others: Tensor
    ) -> Tensor:
        """Return the merged update of the uploads that a mask selects; at least one."""
        num_detected = len(others) - int(others.sum())
        if not num_detected:
            return self.then(uploads, weights, context)
        uploads, weights = uploads[others], weights[others.to(weights.device)]
        num_byzantine = max(0, context.num_byzantine - num_detected)
        context = replace(context.select(others), num_byzantine=num_byzantine)
        try:
            return self.then(uploads, weights, context)
        except ValueError:  # most likely, too few are left
            return Median()(uploads, weights, context)

    def _remember(
        self, uploads: Tensor, clients: Tensor, broadcast: Tensor, merged: Tensor
    ) -> None:
        """Keep the uploads, the global model and the merged update of this round."""
        last = slice(-self.window, None)
        if not len(self.models):
            self.models, self.updates = broadcast.new_empty(0, len(merged)), merged[None][:0]
        self.models = torch.cat([self.models[last], broadcast[None]])
        self.updates = torch.cat([self.updates[last], merged[None]])
        others = ~self._is_detected(clients)
        if others.any():
            self.uploads.write(clients[others], uploads[others.to(uploads.device)])
            self.steps.write(clients[others], self.step.expand(int(others.sum()), 1))
        self.step = self.step + 1

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: benign clients may be detected, and then forged uploads are the majority."""
        return 0


def find_odd_scores(scores: Array, draw_key: int) -> Array:
    """Return a mask of the scores in the upper cluster, if there are several clusters.

    Args:
        scores: Shape [n].
        draw_key: The key of the draws of reference points and starts.

    Returns:
        bool [n]; all ``False`` for one cluster, equal scores, or fewer than four scores.

    Example:
        >>> find_odd_scores(np.array([0.1, 0.11, 0.1, 0.12, 0.3, 0.29]), draw_key=0)
        array([False, False, False, False,  True,  True])
    """
    odd = np.zeros(len(scores), dtype=bool)
    if len(scores) < _FEWEST_CLIENTS or scores.min() == scores.max():
        return odd
    points = ((scores - scores.min()) / (scores.max() - scores.min()))[:, None]
    draw = numpy_generator(draw_key)
    if count_clusters(points, _MAX_CLUSTERS, _NUM_REFERENCES, draw) == 1:
        return odd
    labels = find_clusters(points[None], 2, draw)[0][0]
    means = [scores[labels == label].mean() for label in (0, 1)]
    upper: Array = labels == int(np.argmax(means))
    return upper
