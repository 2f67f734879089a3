"""APFL: Adaptive Personalized Federated Learning, a mixture of a local and the global model.

Y. Deng, M. M. Kamani and M. Mahdavi. "Adaptive personalized federated learning". arXiv 2003.13461
(v3, 2020).

Client k has a local model v_k, and the mixture v̄_k = α_k v_k + (1 − α_k) w. Each local step
(Algorithm 1) moves w_k by the gradient of f_k(w_k). It moves v_k by the gradient of f_k(v̄_k) with
respect to v_k: α_k ∇f_k(v̄_k). The client sends w_k, as in FedAvg. Gradient descent adapts α_k, too:
∂f_k(v̄_k) / ∂α_k = ⟨v_k − w_k, ∇f_k(v̄_k)⟩.

Departs from the paper:

- α_k moves once a round, by the mean of this derivative over the local steps, and stays in [0, 1].
  In the paper it moves at every step. In the authors' code it moves at the first step of a round,
  and the derivative has an additional term 0.02 α_k.
- v_k begins at w⁰.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_nonnegative, check_shares
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, ModelRows
from pl_fed.types import Batch


class APFL(Client):
    """APFL: the personal model is α v_k + (1 − α) w. α = 0 is FedAvg, α = 1 trains local models.

    Args:
        net: The net that clients train: see :class:`Client`.
        alpha: α in [0, 1]; the initial value if α is adapted.
        alpha_lr: Learning rate of α, >= 0; 0 keeps α fixed. Adapting α costs one more forward and
            backward pass a step.
        local_steps: τ, the minibatch steps in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``alpha`` is out of range, ``alpha_lr`` negative or infinite, or α is adapted
            and the net has running statistics (BatchNorm).

    Example:
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        >>> client = APFL(nn.Linear(4, 2), alpha=0.25, optimizer=sgd, local_epochs=2)
        >>> client.trained, client.evaluated  # "local" is v_k, "personal" the mixture
        (('global', 'local'), ('global', 'personal'))
    """

    def __init__(
        self, net: nn.Module, alpha: float = 0.5, alpha_lr: float = 0.0, **kwargs: Any
    ) -> None:
        models = {
            "global": Model(),
            "local": Model(evaluated=False),
            "personal": Model(trained=False, kept=False),
        }
        super().__init__(net, models=models, **kwargs)
        self.add_state("alpha", alpha)
        check_nonnegative(alpha_lr=alpha_lr)
        check_shares(alpha=alpha)
        if alpha_lr:
            self.refuse_running_statistics("the gradient with respect to α needs a second pass")
        self.alpha = alpha
        self.alpha_lr = alpha_lr

    def begin(self, client: ClientRound) -> None:
        """Mix the personal model from v_k and the broadcast w^t."""
        alpha, local = client.states["alpha"], client.models["local"]
        mixture = alpha * local.parameters + (1 - alpha) * client.broadcast.parameters
        client.models["personal"] = ModelRows(mixture, local.statistics.clone())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return f_k(w) + f_k(α v + (1 − α) w); the second term moves v alone."""
        w = {name: tensor.detach() for name, tensor in self.parameters_of("global").items()}
        v = self.parameters_of("local")

        def mixed_loss(alpha: Tensor, v: dict[str, Tensor]) -> Tensor:
            """Return f_k(α v + (1 − α) w) on the minibatch."""
            mixed = {name: alpha * v[name] + (1 - alpha) * w[name] for name in v}
            return self.loss_at("local", mixed, batch)

        alpha = self.read("alpha")[0]
        loss = self.loss("global", batch) + mixed_loss(alpha, v)
        if not self.alpha_lr:
            return loss
        detached = {name: tensor.detach() for name, tensor in v.items()}
        return {"loss": loss, "alpha_gradient": torch.func.grad(mixed_loss)(alpha, detached)}

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Adapt α, and upload w_k − w^t."""
        if self.alpha_lr:
            alpha = client.states["alpha"]
            step = self.alpha_lr * client.step_means["alpha_gradient"][:, None]
            client.states["alpha"] = (alpha - step.to(alpha)).clamp(0, 1)
        return super().end_round(client)
