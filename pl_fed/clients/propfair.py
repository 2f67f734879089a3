"""PropFair: federated averaging for proportional fairness, by the logarithm of a utility.

G. Zhang, S. Malekmohammadi, X. Chen and Y. Yu. "Proportional Fairness in Federated Learning". TMLR
2023. arXiv 2202.01666.

The utility of a client is M − F_k(w), with a ceiling M for losses. The server maximises the product
of all utilities, so a client minimises −ln(1 − F_k(w) / M) (Algorithm 1). Its gradient is that of
F_k, divided by M − F_k: clients with larger losses take longer steps. The logarithm acts on the
loss ℓ of each minibatch, and has a tail where M − ℓ < ε::

    −ln(1 − ℓ / M)                              if M − ℓ ≥ ε
    ℓ / M                                       otherwise, in the authors' code
    ln(M / ε) + (ℓ − M + ε) / ε                 otherwise, the Huber variant: the tangent at M − ε

The server takes the mean of the models, as in FedAvg; that is the paper's algorithm with equal
weights.

The authors' code writes the Huber tail as ℓ / ε, which has the same gradient. Its default tail is
flatter than the logarithm, by ε / M: a minibatch with a loss near M then counts less than one of a
smaller loss.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.types import Batch


class PropFair(Client):
    """PropFair: FedAvg with the loss −ln(1 − ℓ / M) of each minibatch.

    Args:
        net: The net that clients train: see :class:`Client`.
        ceiling: M > 0, above the losses of the first rounds; 2 to 5 for classification.
        epsilon: ε > 0, at most M: the logarithm ends where M − ℓ is smaller.
        tail: The loss beyond: ``"relative"`` is ℓ / M, as in the authors' code; ``"huber"``
            continues the logarithm by its tangent.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> client = PropFair(nn.Linear(4, 2), ceiling=5.0)
        >>> client.fair_loss(torch.tensor([0.5, 4.9]))
        tensor([0.1054, 0.9800])
    """

    def __init__(
        self,
        net: nn.Module,
        ceiling: float = 5.0,
        epsilon: float = 0.2,
        tail: Literal["relative", "huber"] = "relative",
        **kwargs: Any,
    ) -> None:
        check_positive(ceiling=ceiling, epsilon=epsilon)
        check_choice(("relative", "huber"), tail=tail)
        if epsilon > ceiling:
            raise ValueError(
                f"Expected argument `epsilon` to be at most `ceiling` = {ceiling} but got"
                f" {epsilon}."
            )
        super().__init__(net, models={"global": Model()}, **kwargs)
        self.ceiling = ceiling
        self.epsilon = epsilon
        self.tail = tail

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return −ln(1 − ℓ / M) of the minibatch's loss ℓ."""
        return self.fair_loss(self.loss("global", batch))

    def fair_loss(self, loss: Tensor) -> Tensor:
        """Return −ln(1 − ℓ / M), or the tail, of each loss ℓ; the shape stays."""
        largest = self.ceiling - self.epsilon  # of the logarithm
        in_reach = loss <= largest
        logarithm = -torch.log1p(-torch.where(in_reach, loss, largest) / self.ceiling)
        tail = loss / self.ceiling
        if self.tail == "huber":
            tail = logarithm + (loss - largest) / self.epsilon
        return torch.where(in_reach, logarithm, tail)
