"""MOCHA: multi-task learning of the clients' models and of their relations.

V. Smith, C.-K. Chiang, M. Sanjabi and A. Talwalkar. "Federated multi-task learning". NeurIPS 2017.
arXiv 1705.10467.

The objective (1), with the probabilistic prior of appendix B (Zhang and Yeung, UAI 2010) for the
relations, W = [w_1, ..., w_m] being the clients' models::

    min over W, Ω of  Σ_k F_k(w_k) + λ₁/2 tr(W Ω Wᵀ) + λ₂/2 ‖W‖²,   tr(Ω⁻¹) = 1

Two steps alternate. The clients move W with Ω fixed. Then Ω⁻¹ = (WᵀW + εI)^½ / tr(WᵀW + εI)^½; it
is optimal for W up to ε, and ε keeps it invertible. With all other models fixed, client k's share
of the middle term is a pull to a mixture of the models::

    σ′λ₁Ω_kk/2 ‖v − c_k‖²,   c_k = w_k − Σ_j Ω_kj w_j / (σ′Ω_kk)

With σ′ = 1 it is exact. The clients move at the same time; a larger σ′ keeps this stable, as in the
subproblems (4).

Departs from the paper:

- A client takes minibatch (sub)gradient steps on its subproblem instead of dual coordinate ascent.
  Any loss and any local optimizer work.
- F_k is a mean over samples.
- The regulariser is half of the paper's.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.types import Batch


class Mocha(Client):
    """MOCHA: a model for each client, with a pull to the models of related clients.

    MOCHA learns the relations. It suits convex nets, such as
    :class:`pl_fed.models.LogisticRegression`: their parameters have the same meaning in all
    clients. The server has all models, and sends each client its pull. Uploads move the server's
    models. The model of a client that forges uploads is therefore the sum of its forged uploads; an
    attack that sends a model adds this model in each round. The global model is the mean of the
    models (with ``aggregators.Mean`` and a server learning rate of 1).

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ₁ ≥ 0, the strength of the pull to related clients; 0 trains local models.
        decay: λ₂ ≥ 0, the strength of the pull to 0.
        epsilon: ε > 0. A smaller ε pulls unrelated directions harder, up to
            λ₁ tr(WᵀW + εI)^½ / ε^½; choose a learning rate that is small enough for this.
        sigma: σ′ ≥ 1; larger values are safer when clients move at the same time.
        max_numbers: The largest allowed m · d, clients times parameters: the server keeps m · d
            numbers.
        local_steps: Minibatch steps on the client's model in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range, or, before training, if m · d is too large.

    Example:
        >>> from pl_fed.types import Population
        >>> client = Mocha(nn.Linear(4, 2), lam=0.1)
        >>> client.population = Population(clients=3)
        >>> {name: len(row) for name, row in client.server_state_defaults().items()}
        {'models': 30}
    """

    mean_of = "clients"
    uploads_changes = True
    new_client_reason = "the server has models and relations of the training clients alone"

    def __init__(
        self,
        net: nn.Module,
        lam: float = 0.01,
        decay: float = 0.0,
        epsilon: float = 0.01,
        sigma: float = 1.0,
        max_numbers: int = 1_000_000,
        **kwargs: Any,
    ) -> None:
        models = {"global": Model(trained=False), "personal": Model(kept=False)}
        super().__init__(net, models=models, **kwargs)
        self.add_server_state("models", self._repeat_initial_row)  # W, one model behind the other
        check_nonnegative(lam=lam, decay=decay)
        check_positive(epsilon=epsilon)
        if not 1 <= sigma < math.inf:
            raise ValueError(
                f"Expected argument `sigma` to be at least 1, and finite, but got {sigma}."
            )
        self.lam = lam
        self.decay = decay
        self.epsilon = epsilon
        self.sigma = sigma
        self.max_numbers = max_numbers

    def _repeat_initial_row(self) -> Tensor:
        """Return W before the first round.

        Raises:
            ValueError: If clients times parameters exceed ``max_numbers``.
        """
        clients, row = self.population.clients, self.initial_row()
        if clients * len(row) > self.max_numbers:
            raise ValueError(
                f"Expected argument `max_numbers` ({self.max_numbers}) to be at least the number of"
                f" clients times that of parameters but got {clients} times {len(row)}: the server"
                " keeps all models, so use Mocha for small nets, such as convex ones."
            )
        return row.repeat(clients)

    def begin(self, client: ClientRound) -> None:
        """Read the clients' models from W, and compute the centre and strength of their pull."""
        models = self._all_models(client)
        client.models["personal"].parameters = models[client.ids]
        if not client.steps:  # an evaluation
            return
        relation = relations(models, self.epsilon)[client.ids]
        strength = self.sigma * relation.gather(1, client.ids[:, None])
        centre = models[client.ids] - relation @ models / strength
        client.extra |= {"strength": strength, "centre": centre}

    @property
    def upload_numbers(self) -> int:
        """The number of values that a client sends: its own model's change."""
        return self.shared_numbers

    @property
    def download_numbers(self) -> int:
        """The number of received values: its model, and the pull's centre and strength."""
        return 2 * self.shared_numbers + 1

    def _all_models(self, client: ClientRound) -> Tensor:
        """Return Wᵀ, [m, d]."""
        return client.server_states["models"].view(self.population.clients, -1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k(v) + σ′λ₁Ω_kk/2 ‖v − c_k‖² + λ₂/2 ‖v‖² on the minibatch."""
        loss = self.loss("personal", batch)
        pull = self.lam / 2 * self.read("strength")[0] * self.squared_distance("personal", "centre")
        norm = sum(tensor.square().sum() for tensor in self.parameters_of("personal").values())
        return loss + pull + self.decay / 2 * norm

    def end_round(self, client: ClientRound) -> Tensor:
        """Upload ``|S| / m`` times the model's change: their mean is the change of W's mean."""
        before = self._all_models(client)[client.ids]
        return self.population.share * (client.models["personal"].parameters - before)

    def receive(self, clients: Tensor, uploads: Tensor) -> dict[str, Tensor]:
        """Move the models of the clients by their uploads."""
        change = uploads.new_zeros(self.population.clients, uploads.shape[1])
        change[clients] = uploads / self.population.share
        return {"models": change.flatten()}


def relations(models: Tensor, epsilon: float) -> Tensor:
    """Return Ω, the inverse of (WᵀW + εI)^½ / tr(WᵀW + εI)^½; computed in float64.

    Args:
        models: Wᵀ, shape [m, d].
        epsilon: ε > 0.

    Returns:
        Shape [m, m], symmetric and positive definite. If the models are 0: m on the diagonal, 0
        elsewhere.

    Example:
        >>> relations(torch.zeros(2, 3), 0.01).tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    rows = models.double()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    roots = (values.clamp(min=0) + epsilon).sqrt()
    relation: Tensor = vectors * (roots.sum() / roots) @ vectors.T
    return relation.to(models)
