"""MOON: model-contrastive federated learning.

Q. Li, B. He and D. Song. "Model-contrastive federated learning". CVPR 2021. arXiv 2103.16257.

A client adds to its loss a contrast of features (Algorithm 1). With z the features of a sample
under the local model, z_g under w^t, z_p under the client's model of its last round, and cosine
similarity s::

    ℓ_con = −ln( exp(s(z, z_g) / τ) / (exp(s(z, z_g) / τ) + exp(s(z, z_p) / τ)) )
    min  CE + μ ℓ_con

It pulls features to those of the global model, and pushes them away from those of the last local
model. Only z has a gradient. In a client's first round the last model is the initial one.

Departs from the paper:

- Features are the inputs of the head. The paper inserts a projection head, a two-layer MLP, before
  the last layer: let such layers precede the head of your net.
- One last model is kept; the authors' code may keep several.
- All three passes of a step have the running statistics of the local model (BatchNorm's, as a
  rule), and only the local model's pass changes them.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pl_fed.arguments import check_nonnegative, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound
from pl_fed.clients.heads import find_head
from pl_fed.data.client_data import ClientData
from pl_fed.functional.losses import masked_mean
from pl_fed.nets.rows import trainable_parameters
from pl_fed.types import Batch, Population


class Moon(Client):
    """MOON: one global model; features are pulled to its own, and away from the last local model's.

    A local step runs the net three times, and differentiates one of the passes.

    Args:
        net: The net that clients train: see :class:`Client`. Its outputs must be those of its head.
        mu: μ ≥ 0, the weight of the contrast. The paper chooses among 0.1, 1, 5 and 10.
        temperature: τ > 0; 0.5 in the paper.
        head: The name of the module that turns features into outputs, such as ``"layers.5"``.
            ``None`` is the last module with trainable parameters.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``mu`` or ``temperature`` is out of range, or the net has no module ``head``.
            Before training, if the net has steps of its own.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = Moon(net, mu=1.0)
        >>> client.trained, list(client.state_defaults())
        (('global',), ['previous'])
    """

    def __init__(
        self,
        net: nn.Module,
        mu: float = 1.0,
        temperature: float = 0.5,
        head: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        check_nonnegative(mu=mu)
        check_positive(temperature=temperature)
        self.mu = mu
        self.temperature = temperature
        self.head = find_head(trainable_parameters(net), head)
        self.add_state("previous", self.initial_row)

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a net with steps of its own: its features and outputs are unknown."""
        super().check(data, population)
        self.refuse_module_steps("contrasts the features below its head")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return CE + μ ℓ_con on the minibatch."""
        features = self.features_of("global", batch)
        loss = self.mean_loss(self.head_of("global", features), batch)
        similarities = [
            F.cosine_similarity(features.flatten(1), self._features_at(row, batch), dim=1)
            for row in ("broadcast", "previous")
        ]
        to_global, to_previous = similarities
        # −ln(e^a / (e^a + e^b)) = softplus(b − a)
        contrasts = F.softplus((to_previous - to_global) / self.temperature)
        contrast = masked_mean(contrasts, batch.mask)
        return {"loss": loss + self.mu * contrast, "contrast": contrast}

    def _features_at(self, row: str, batch: Batch) -> Tensor:
        """Return the features of a row's model, [batch, features]; they have no gradient."""
        buffers = {name: buffer.clone() for name, buffer in self.model("global").named_buffers()}
        features = self.features_of("global", batch, {**self.tensors(row), **buffers})
        return features.detach().flatten(1)

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Keep the local model, and upload its change."""
        client.states["previous"] = client.models["global"].parameters
        return super().end_round(client)
