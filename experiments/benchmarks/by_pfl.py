"""The same federation in pfl-research 0.6 (Granqvist et al., arXiv:2404.06430).

``pip install pfl==0.6.0`` into an environment of its own that has pl_fed too: pfl wants other
versions of small packages than pl_fed's surroundings may. It takes part in several processes by
itself, started by ``torchrun``: importing it joins the group.
"""

import numpy as np
import torch
from cases import LR, Case
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)

from pl_fed.data.client_data import ClientData


class Net(nn.Module):
    """A net with the two methods that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what is minimised."""
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return what is reported of the first round: pfl evaluates it whatever it is told."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class OneRound(TrainingProcessCallback):
    """Ends a run of pfl after each round; the next goes on from there."""

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Stop."""
        return True, Metrics()


class ByPfl:
    """FedAvg as pfl's own benchmarks run it: no evaluation, users' tensors sliced beforehand.

    Args:
        case: What to run; all its clients take part.
        data: The clients' data, on the device.
    """

    def __init__(self, case: Case, data: ClientData) -> None:
        np.random.seed(0)  # noqa: NPY002 (it is what pfl draws from)
        torch.manual_seed(0)
        users = {}
        for client in range(case.clients):
            samples = data.train.samples(client)
            users[client] = [data.inputs[samples], data.targets[samples]]
        net = Net(case.build())
        self.model = PyTorchModel(
            net,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        )
        dataset = FederatedDataset.from_slices(users, MinimizeReuseUserSampler(list(users)))
        self.backend = SimulatedBackend(dataset, dataset)
        self.algorithm = FederatedAveraging()
        self.params = NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=case.clients,
            val_cohort_size=None,
        )
        self.local = NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=case.steps,
            local_learning_rate=LR,
            local_batch_size=case.batch_size,
        )

    def round(self) -> None:
        """Run one round."""
        self.algorithm.run(
            self.params,
            self.backend,
            self.model,
            self.local,
            callbacks=[OneRound()],
            send_metrics_to_platform=False,
        )
