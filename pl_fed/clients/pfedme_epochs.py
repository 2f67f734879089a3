"""pFedMe in the form of FLAME's paper: clients keep personal models and train them in epochs.

S. Zhu et al. "On ADMM in heterogeneous federated learning: Personalization, robustness, and
fairness". arXiv 2407.16397, section VI; C. T. Dinh, N. H. Tran and T. D. Nguyen. "Personalized
federated learning with Moreau envelopes". NeurIPS 2020. arXiv 2006.08848.

As in FLAME's reference code, a client keeps θ_i from round to round. It takes H passes of gradient
steps on f_i(θ_i) + λ/2 ‖θ_i − w^t‖². Then it takes one step w_i = w^t − η λ (w^t − θ_i), and
w^(t+1) is the mean of the w_i. With η λ = 1 this is mean-regularised multi-task learning, and FLAME
with ρ = λ α_i and ``pull_to="broadcast"``. The paper tries η up to 0.5 for λ = 1.

Departs from the paper of pFedMe: there each minibatch has K steps on θ_i and then one on w_i, as in
:class:`~pl_fed.clients.PFedMe`.
"""

from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_positive
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.types import Batch


class PFedMeEpochs(Client):
    """pFedMe with epochs on θ_i, the model ``personal``, and one step on w_i a round.

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ > 0, the strength of the pull.
        eta: η > 0, the step size of w_i.
        optimizer: Builds the optimizer of θ_i in each round; SGD with learning rate 0.05 by
            default.
        local_steps: Minibatch steps on θ_i in a round; or give ``local_epochs``.
        local_epochs: H, the passes over the client's data in a round; 1 if neither is given.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lam`` or ``eta`` is not positive.

    Example:
        >>> client = PFedMeEpochs(nn.Linear(4, 2), lam=1.0, eta=0.5, local_epochs=5)
        >>> client.trained, client.evaluated
        (('personal',), ('global', 'personal'))
    """

    def __init__(self, net: nn.Module, lam: float = 1.0, eta: float = 0.1, **kwargs: Any) -> None:
        models = {"global": Model(trained=False), "personal": Model()}
        super().__init__(net, models=models, **kwargs)
        check_positive(lam=lam, eta=eta)
        self.lam = lam
        self.eta = eta

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return f_i(θ_i) + λ/2 ‖θ_i − w^t‖² on the minibatch."""
        pull = self.lam / 2 * self.squared_distance("personal", to="broadcast")
        return self.loss("personal", batch) + pull

    def end_round(self, client: ClientRound) -> Tensor:
        """Upload w_i − w^t = η λ (θ_i − w^t)."""
        difference = client.models["personal"].parameters - client.broadcast.parameters
        return self.eta * self.lam * difference
