"""FedDBE: FedAvg with the domain bias eliminator; each client adds a vector of its own to features.

J. Zhang, Y. Hua, J. Cao, H. Wang, T. Song, Z. Xue, R. Ma and H. Guan. "Eliminating domain bias for
federated learning in representation space". NeurIPS 2023. arXiv 2311.14975.

The net is a body f, with d features, and a head g. Client k keeps a vector v_k [d], 0 at first: the
personalized representation bias memory. In the first round all train f and g plainly, and send the
means of their features; z̄ is their mean. In later rounds a step minimises in f, g and v_k::

    CE(g(f(x) + v_k), y) + κ / d ‖r − z̄‖² / 2,    r ← (1 − m) r + m · mean f(x) over the minibatch

The second term is the mean regularization. r is 0 at the start of a round, and only the minibatch's
mean has a gradient. The server averages f and g. Client k predicts by g(f(x) + v_k).

Departs from the paper and from the authors' code (TsingZ0/DBE, and PFLlib):

- The plain training that gives z̄ is the first round, with the clients of its cohort. There, all
  clients train once before the first round, and the server discards their models.
- A client sends the mean of its training samples' features under its trained model. There, it sends
  r at the end: the mean of the last minibatch if m = 1, and nearer to 0 after few steps if m < 1.
- The local optimizer trains v_k as it trains f and g. There, it is SGD without momentum.
- The aggregator determines the weights of models and of means, uniform by default; there, samples.
- The defaults are κ = 1 and m = 1. The authors' command for Fashion-MNIST has κ = 50, m = 1,
  512 features and learning rate 0.005; their code's defaults are κ = 0 and m = 0.1. With 64
  features and learning rate 0.05, as in ``configs/feddbe.yaml``, κ = 50 is too large: in one run of
  40 rounds, accuracy was 0.49 with 50, 0.81 with 5, 0.82 with 1, and 0.79 with 0.
- The head is linear, g(z) = W z + b, so that an evaluated model is an ordinary net: its bias is
  b + W v_k.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_at_most, check_nonnegative, check_positive
from pl_fed.clients.argument_checks import check_net
from pl_fed.clients.contract import ClientRound
from pl_fed.clients.fedper import FedPer
from pl_fed.clients.heads import find_head, require_linear_head
from pl_fed.data.client_data import ClientData
from pl_fed.nets.copies import remove_compilation
from pl_fed.nets.rows import trainable_parameters
from pl_fed.types import Batch, Population

_TRANSLATION = "translation"  # the parameter v_k of the head


class FedDBE(FedPer):
    """FedDBE: the clients share a net, and each adds a trained vector to the features of its own.

    The head gets a further parameter, ``translation``, that stays with the client. Copies of models
    for evaluation and export are the user's net again, without it.

    Args:
        net: The net that clients train: see :class:`Client`. Its outputs must be those of its head,
            a ``torch.nn.Linear`` with a bias.
        head: The name of the head, such as ``"layers.5"``. ``None`` is the last module with
            trainable parameters.
        kappa: κ ≥ 0, the weight of the mean regularization; each of the d features has κ / d. The
            larger κ times the learning rate, the sooner steps diverge.
        mean_momentum: m in (0, 1], the weight of a minibatch in the running mean r. Below 1, r is a
            memory between steps: clients then train one by one.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If the head is not linear with a bias.
        ValueError: If a number is out of range, or the net has no module ``head``. Before training,
            if the net has steps of its own.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = FedDBE(net, kappa=10.0)
        >>> client.head, client.own, client.evaluated
        ('2', ('2.translation',), ('personal',))
        >>> client.shared_numbers  # 25 of the body and 18 of the head
        43
    """

    weighted_states = ("mean_features", "sent_share")

    running_mean: Tensor

    def __init__(
        self,
        net: nn.Module,
        head: str | None = None,
        kappa: float = 1.0,
        mean_momentum: float = 1.0,
        **kwargs: Any,
    ) -> None:
        net = remove_compilation(net)
        check_net(net)
        head = find_head(trainable_parameters(net), head)
        linear = _add_translation(net, head)
        prefix = f"{head}." if head else ""
        super().__init__(net, [f"{prefix}{_TRANSLATION}"], **kwargs)
        check_nonnegative(kappa=kappa)
        check_positive(mean_momentum=mean_momentum)
        check_at_most(1, mean_momentum=mean_momentum)
        self.head = head
        self.kappa, self.mean_momentum = kappa, mean_momentum
        layout = self.row("global").layout
        self.weight_positions = layout.positions(f"{prefix}weight")
        self.bias_positions = layout.positions(f"{prefix}bias")
        self.weight_shape = linear.weight.shape
        self.add_server_state("mean_features", self._initial_own_parts)  # zeros [d]
        self.add_server_state("sent_share", 0.0)
        if mean_momentum < 1:  # engines restore it to 0 before each client's local steps
            self.register_buffer("running_mean", self._initial_own_parts(), persistent=False)

    def restore_net(self, net: nn.Module) -> None:
        """Remove the translation from a copy of a model; its values are in the bias."""
        delattr(net.get_submodule(self._head_name("global")), _TRANSLATION)

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a net with steps of its own: its features and outputs are unknown."""
        super().check(data, population)
        self.refuse_module_steps("adds a vector to the features below its head")

    def begin(self, client: ClientRound) -> None:
        """Put v_k into the broadcast model; an evaluation gets b + W v_k instead."""
        super().begin(client)
        share = client.server_states["sent_share"]
        # the mean divides by the share of the first cohort that sent one; 0 before it
        client.extra["has_mean"] = (share > 0).to(share)
        client.extra["target"] = client.server_states["mean_features"] / share.where(share > 0, 1)
        if not client.steps:
            rows = client.models["personal"].parameters
            translations = rows[:, self.own_positions]
            weights = rows[:, self.weight_positions].unflatten(1, self.weight_shape)
            rows[:, self.bias_positions] += (weights @ translations[:, :, None])[:, :, 0]
            rows[:, self.own_positions] = 0

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return CE(g(f + v_k)) and the mean regularization; CE(g(f)) in the first round."""
        has_mean = self.read("has_mean")
        features = self.features_of("personal", batch)
        translation = self.parameters_of("personal")[self.own[0]]
        outputs = self.head_of("personal", features + has_mean * translation)
        running = self._update_mean(_mean_features(features, batch.mask))
        distance = (running - self.read("target")).square().mean() / 2
        distance = (has_mean * distance).sum()  # a scalar
        return {
            "loss": self.mean_loss(outputs, batch) + self.kappa * distance,
            "mean_distance": distance,
        }

    def _update_mean(self, mean: Tensor) -> Tensor:
        """Return the running mean r after a minibatch, and keep it for the next one."""
        if self.mean_momentum == 1:
            return mean
        before = self.running_mean.clone()
        running = (1 - self.mean_momentum) * before + self.mean_momentum * mean
        with torch.no_grad():
            try:
                self.running_mean.copy_(running)
            except RuntimeError as error:  # under vmap: engines report it, and take another way
                raise RuntimeError(
                    "with mean_momentum below 1, each client keeps a running mean between steps"
                ) from error
        return running

    def end_round(self, client: ClientRound) -> Tensor:
        """Send the mean features in the first round, keep v_k, and send the change of the net."""
        share = client.server_states["sent_share"]
        if not share.any():
            sums = self.own_sums(client, self._sum_features)
            client.proposals["mean_features"] = sums / client.samples.clamp(min=1)
            client.proposals["sent_share"] = torch.ones_like(share).expand(len(client), 1)
        return super().end_round(client)

    def _sum_features(self, batch: Batch) -> Tensor:
        """Return the sum of the features over the samples that count, [d]."""
        features = _flatten_features(self.features_of("personal", batch))
        if batch.mask is not None:
            features = torch.where(batch.mask[:, None], features, 0)
        return features.sum(0)


def _add_translation(net: nn.Module, head: str) -> nn.Linear:
    """Add a parameter of zeros, as long as the features, to the head of a net, and return the head.

    Raises:
        TypeError: If the head is not linear with a bias.
    """
    linear = require_linear_head(net, head)
    zeros = torch.zeros_like(linear.weight[0]).detach()
    linear.register_parameter(_TRANSLATION, nn.Parameter(zeros))
    return linear


def _flatten_features(features: Tensor) -> Tensor:
    """Return the features of each sample, [batch, d]: the mean over further dimensions, if any."""
    return features.reshape(len(features), -1, features.shape[-1]).mean(1)


def _mean_features(features: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the features over the samples that count, [d]; 0 without samples."""
    features = _flatten_features(features)
    if mask is None:
        return features.mean(0)
    sums = torch.where(mask[:, None], features, 0).sum(0)
    return sums / mask.sum().clamp(min=1)
