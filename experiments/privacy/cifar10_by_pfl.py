"""The CIFAR-10 federation in pfl-research 0.6 (Granqvist et al., arXiv:2404.06430).

The settings are those of pfl's own benchmark ``image_classification`` for PyTorch: FedAvg, uniform
weights, cohorts drawn with replacement, and the Gaussian mechanism with noise from pfl's accountant
of privacy loss distributions.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism, PLDPrivacyAccountant
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)

from pl_fed import DifferentialPrivacy

_NEVER = 10**9  # the first round is evaluated nevertheless: pfl always does that


class LossNet(nn.Module):
    """Net with the two methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the training loss."""
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the metrics of the first round."""
        self.eval()
        return {"loss": Weighted(float(F.cross_entropy(self.net(x), y)) * len(y), len(y))}


class Stopwatch(TrainingProcessCallback):
    """Stopwatch: the processor time of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = time.process_time()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Record the round."""
        now = time.process_time()
        self.seconds.append(now - self.begun)
        self.begun = now
        return False, Metrics()


class PflRun:
    """Run of pfl: it advances by blocks of rounds, and saves its model after each.

    A block draws from generators seeded by the seed and the block's first round, so that a resumed
    run gives equal numbers if it has equal blocks.

    Args:
        users: Inputs and classes of each user.
        net: The net with its initial weights.
        privacy: The mechanism; ``None`` neither clips nor adds noise.
        seed: Seed of the run.
        folder: Folder of the saved model.
        cohort: Number of users of a round.
        batch_size: Samples of a local minibatch.
        sampling: ``random`` draws users with replacement; ``minimize_reuse`` takes them in order.
    """

    def __init__(
        self,
        users: Sequence[tuple[Tensor, Tensor]],
        net: nn.Module,
        privacy: DifferentialPrivacy | None,
        seed: int,
        folder: Path,
        cohort: int = 50,
        batch_size: int = 10,
        sampling: str = "random",
    ) -> None:
        self.cohort, self.batch_size, self.sampling = cohort, batch_size, sampling
        self.users = {user: list(tensors) for user, tensors in enumerate(users)}
        self.net, self.seed, self.folder = net, seed, folder
        self.postprocessors: list[Postprocessor] = [WeightByUser()]
        if privacy is not None:
            mechanism = build_mechanism(privacy, cohort)
            self.postprocessors.append(CentrallyAppliedPrivacyMechanism(mechanism))
        model = LossNet(net)
        self.model = PyTorchModel(
            model,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        )
        self.rounds = 0
        if (saved := folder / "algorithm_checkpoint.json").exists():
            self.model.load(str(folder))
            self.rounds = json.loads(saved.read_text())["current_central_iteration"]

    def advance(self, rounds: int) -> list[float]:
        """Run until ``rounds`` rounds are done; return the processor time of each new round."""
        stopwatch = Stopwatch()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 10**6 + self.rounds)
            np.random.seed(self.seed * 10**6 + self.rounds)  # noqa: NPY002 (pfl draws from it)
            algorithm = FederatedAveraging()
            algorithm._current_central_iteration = self.rounds
            algorithm.run(
                self._params(rounds),
                self._backend(),
                self.model,
                NNTrainHyperParams(
                    local_num_epochs=1, local_learning_rate=0.1, local_batch_size=self.batch_size
                ),
                callbacks=[stopwatch],
                send_metrics_to_platform=False,
            )
        self.rounds = rounds
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model.save(str(self.folder))
        algorithm.save(str(self.folder))
        return stopwatch.seconds

    def _params(self, rounds: int) -> NNAlgorithmParams:
        """Return the parameters of a block of rounds."""
        return NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=_NEVER,
            train_cohort_size=self.cohort,
            val_cohort_size=None,
        )

    def _backend(self) -> SimulatedBackend:
        """Return the backend of a block of rounds."""
        sampler = get_user_sampler(self.sampling, list(self.users))
        users = FederatedDataset.from_slices(self.users, sampler)
        return SimulatedBackend(users, users, self.postprocessors)


def build_mechanism(privacy: DifferentialPrivacy, cohort: int) -> GaussianMechanism:
    """Return pfl's mechanism for the settings of pl_fed, as pfl's benchmark builds it."""
    accountant = PLDPrivacyAccountant(
        num_compositions=privacy.rounds,
        sampling_probability=privacy.noise_cohort_size / privacy.population,
        mechanism="gaussian",
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        noise_scale=cohort / privacy.noise_cohort_size,
    )
    return GaussianMechanism.from_privacy_accountant(accountant, privacy.clip_norm)
