"""The same federation in pfl-research 0.6 (Granqvist et al., arXiv:2404.06430).

Run ``pip install pfl==0.6.0`` in a separate environment with pl_fed, because pfl may need other
versions of small packages. Under ``torchrun``, importing pfl joins the process group.
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
    """Net with the two methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the training loss."""
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the metrics of the first round, because pfl always evaluates it."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class OneRound(TrainingProcessCallback):
    """Callback that ends a run of pfl after each round; the next run continues from there."""

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Stop."""
        return True, Metrics()


class ByPfl:
    """FedAvg as pfl's own benchmarks run it: no evaluation, users' tensors sliced beforehand.

    Args:
        case: The federation to run; all its clients take part.
        data: The clients' data, on the device.
    """

    def __init__(self, case: Case, data: ClientData) -> None:
        np.random.seed(0)  # noqa: NPY002 (pfl draws from it)
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
