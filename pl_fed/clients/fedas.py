"""FedAS: clients align the received body with their own features before they train.

X. Yang, W. Huang and M. Ye. "FedAS: Bridging inconsistency in personalized federated learning".
CVPR 2024.

Client k keeps its head and its model w_k of its last round. At the start of a round:

1. With the body of w_k, the prototype p_c is the mean of the features of its samples of class c.
2. It takes steps on the received body, so that the features z of its samples approach these::

    Σ_c mean_{i in c} ‖z_i − p_c‖² / F        (F features; the classes c of the minibatch)

3. It takes local steps on the whole net, with its own head.

It sends the body and the trace F_k of the Fisher information of its model, Σ_i ‖∇ ℓ_i‖² with the
loss ℓ_i of a sample: −ln p(y_i | x_i) for cross entropy. The server averages the bodies with the
weights F_k / Σ F.

Departs from the authors' code (also in PFLlib):

- F_k sums over single samples. The code sums over minibatches the squared norm of a minibatch's
  mean gradient: equal for minibatches of one sample, and else dependent on their partition.
- ℓ_i is that of ``criterion``: weights of classes change F_k. The code takes −ln p.
- All clients align the received body. In PFLlib, the clients of a cohort change it in place, so
  that each begins with the one that those before it have aligned.
- The alignment takes minibatches of the size of the local steps; the code takes 16 samples.
- The code measures F_k for all clients, and reads it for the cohort alone. Here the cohort does.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative
from pl_fed.clients.contract import ClientRound, Model, Objective
from pl_fed.clients.fedper import FedPer
from pl_fed.clients.heads import find_head, require_body
from pl_fed.data.batches import LocalWork
from pl_fed.data.client_data import ClientData
from pl_fed.nets.rows import trainable_parameters
from pl_fed.trees import Tree, tree_map
from pl_fed.types import Batch, Population

_SAMPLES = 16  # gradients of single samples that are computed at once


class FedAS(FedPer):
    """FedAS: a shared body that each client first aligns with its last one, and an own head.

    The preparation of a round aligns the body. The evaluated model is that of a client's last
    round. The server weighs uploads by the Fisher traces, on top of the weights of the aggregator.

    Args:
        net: The net that clients train: see :class:`Client`. Its outputs must be those of its head.
        head: The name of the module that turns features into outputs, a client's own, such as
            ``"layers.5"``. ``None`` is the last module with trainable parameters.
        alignment_epochs: Passes over the client's data that align the body; 0 aligns none.
        alignment_lr: Learning rate of the alignment, by SGD, ≥ 0; 0.01 in the authors' code.
        fisher_weights: Whether the Fisher traces weigh the uploads.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If ``alignment_epochs`` is no integer.
        ValueError: If a number is out of range, or the net has no module ``head`` or only one
            module with trainable parameters. Before training, if the data have no class ids.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = FedAS(net, alignment_lr=0.1)
        >>> client.own, client.trained, client.preparation.trained
        (('2',), ('personal',), ('personal',))
    """

    reads_class_counts = True

    def __init__(
        self,
        net: nn.Module,
        head: str | None = None,
        alignment_epochs: int = 1,
        alignment_lr: float = 0.01,
        fisher_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        head = find_head(trainable_parameters(net), head)
        require_body(net, head)
        super().__init__(net, [head], **kwargs)
        self.set_models({"personal": Model()})
        self.head = head
        check_integers(0, alignment_epochs=alignment_epochs)
        check_nonnegative(alignment_lr=alignment_lr)
        self.fisher_weights = fisher_weights
        if fisher_weights:
            self.weigher = "trace"
            self.add_server_state("trace", 0.0)
        if alignment_epochs:
            aligned = Model(work=LocalWork(epochs=alignment_epochs))
            sgd = partial(torch.optim.SGD, lr=alignment_lr)
            self.preparation = Objective(self.preparation_step, {"personal": aligned}, sgd)

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse tasks without sample losses."""
        self.refuse_batch_criterion("FedAS sums the squared gradients of samples")

    def begin(self, client: ClientRound) -> None:
        """Take the prototypes of the last model, and put the own head on the broadcast body."""
        if not client.steps:  # an evaluation takes the model of the last round
            return
        if self.preparation is not None:
            client.extra["prototypes"] = self._compute_prototypes(client)
        last = client.models["personal"]
        start = client.broadcast.expand(len(client)).clone()
        start.statistics[:, self.own_statistics] = last.statistics[:, self.own_statistics]
        client.models["personal"] = start
        super().begin(client)

    def _compute_prototypes(self, client: ClientRound) -> Tensor:
        """Return the mean features by class, [clients, classes · F]; NaN for absent classes."""

        def sum_features(batch: Batch) -> Tensor:
            """Return the sum of the features by class, and the number of samples."""
            features = self.features_of("personal", batch).flatten(1)
            classes = self._mark_classes(batch).to(features)
            return torch.cat([classes.T @ features, classes.sum(0)[:, None]], 1)

        sums = self.own_sums(client, sum_features)
        return (sums[:, :, :-1] / sums[:, :, -1:]).flatten(1)

    def _mark_classes(self, batch: Batch) -> Tensor:
        """Return the classes of the samples that count, bool [batch, classes]."""
        labels = torch.arange(len(self.read("class_counts")), device=batch.device)
        classes: Tensor = batch.targets[:, None] == labels
        return classes if batch.mask is None else classes & batch.mask[:, None]

    def preparation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean squared distances of features to prototypes, summed over the classes."""
        features = self.features_of("personal", batch).flatten(1)
        prototypes = self.read("prototypes").view(-1, features.shape[1])[batch.targets]
        is_present = prototypes.isfinite().all(1)
        prototypes = torch.where(is_present[:, None], prototypes, features.detach())
        distances = (features - prototypes).square().mean(1)
        counts = self._mark_classes(batch).sum(0)[batch.targets]
        # Σ_c mean_{i in c} = Σ_i 1 / (the samples of its class)
        terms = distances / counts.clamp(min=1)
        mask = is_present if batch.mask is None else batch.mask & is_present
        return torch.where(mask, terms, 0).sum()

    def end_round(self, client: ClientRound) -> Tensor:
        """Propose the Fisher trace, keep the own head, and send the change of the body."""
        if self.fisher_weights:
            client.proposals["trace"] = self.own_sums(client, self._sum_squared_gradients)[:, None]
        return super().end_round(client)

    def _sum_squared_gradients(self, batch: Batch) -> Tensor:
        """Return Σ_i ‖∇ ℓ_i‖² of the personal model over the samples that count."""

        def compute_loss(parameters: dict[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
            """Return the loss of one sample."""
            inputs, targets = (tree_map(lambda t: t[None], tree) for tree in (inputs, targets))
            outputs = self.task.predict(self.net_at("personal", parameters), inputs)
            return self.sample_losses(outputs, targets)[0]

        def square_gradient(inputs: Tree, targets: Tree) -> Tensor:
            """Return ‖∇ ℓ_i‖² of one sample; gradients of a chunk are never joined."""
            gradients = torch.func.grad(compute_loss)(parameters, inputs, targets)
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
            return torch.stack(norms).square().sum()

        parameters = self.parameters_of("personal")
        squares: Tensor = torch.vmap(square_gradient, chunk_size=_SAMPLES)(
            batch.inputs, batch.targets
        )
        return squares.sum() if batch.mask is None else torch.where(batch.mask, squares, 0).sum()
