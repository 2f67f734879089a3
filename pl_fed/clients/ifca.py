"""IFCA: clustered federated learning, with a choice of the cluster by the loss.

A. Ghosh, J. Chung, D. Yin and K. Ramchandran. "An efficient framework for clustered federated
learning". NeurIPS 2020. arXiv 2006.04088.

Algorithm 1 (model averaging): the server keeps k models θ_1..θ_k. In each round a client of the
cohort receives all of them, and chooses ĵ = argmin_j F_i(θ_j) by the loss on all its training data.
It trains θ_ĵ and sends the change. The server moves each θ_j by the mean over the clients that
chose it; a model that nobody chose stays.

Departs from the paper:

- The server merges the uploads of each cluster by ``federation.aggregator``, with a memory of its
  own, and moves its model by ``federation.server_optimizer``. The mean and SGD with learning rate 1
  are the paper's averages. Attackers forge among the uploads of the cluster that they chose.
- In the paper's experiments, the first models are independent random draws, and the best of several
  restarts counts. Here, the first model is the net, and the others are the net plus noise.
- Clients evaluate, and predict with, the model that has the smallest loss on their training data.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_positive
from pl_fed.clients.clustered import Clustered
from pl_fed.clients.contract import ClientRound
from pl_fed.random import generator


class IFCA(Clustered):
    """IFCA: k global models, of which each client trains the one with the smallest loss.

    Args:
        net: The net that clients train: see :class:`Client`. Nets with running statistics are
            refused, because clusters would share them.
        clusters: k, the number of models, at least 2.
        spread: Standard deviation of the noise that makes the first models differ, above 0, as a
            multiple of that of each tensor of the net. The draw depends on the weights of the net,
            and is the same in all processes.
        local_steps: Minibatch steps in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``clusters`` is below 2, ``spread`` is not above 0, or the net has running
            statistics. Before training, if all numbers of each tensor of the net are equal.

    Example:
        >>> client = IFCA(nn.Linear(4, 2), clusters=3)
        >>> client.num_centers, client.trained, client.evaluated
        (3, ('personal',), ('personal',))
    """

    def __init__(
        self, net: nn.Module, clusters: int = 2, spread: float = 1.0, **kwargs: Any
    ) -> None:
        check_integers(2, clusters=clusters)
        check_positive(spread=spread)
        super().__init__(net, clusters, needs_losses=True, **kwargs)
        self.spread = spread

    def draw_centers(self) -> Tensor:
        """Return the first models, [clusters, numel]: the net, and the net plus noise.

        Raises:
            ValueError: If all numbers of each tensor are equal, as zeros: the models would be, too.
        """
        first = self.row("global").data
        tensors = self.row("global").layout.views(first)
        scale = torch.cat([t.std(correction=0).expand(t.numel()) for t in tensors.values()])
        if not scale.any():
            raise ValueError(
                "Expected argument `net` to have a tensor of different numbers, whose spread the"
                f" noise of IFCA's first models takes, but got {type(self.global_model).__name__}"
                " with equal ones: give it random weights before training."
            )
        seed = int(first.double().sum().view(torch.int64))
        shape, draw = (self.num_centers - 1, len(first)), generator(seed, "centers")
        noise = torch.randn(shape, generator=draw, dtype=torch.float32)  # in any default dtype
        return torch.cat([first[None], first + self.spread * scale * noise.to(first)])

    def choose_centers(self, client: ClientRound) -> Tensor:
        """Choose the model with the smallest loss on the client's training data."""
        return cast(Tensor, client.center_losses).nan_to_num(torch.inf).argmin(dim=1)

    @property
    def download_numbers(self) -> int:
        """The number of values that a client receives: all models."""
        return self.num_centers * self.shared_numbers
