"""Data, nets and mechanisms of the studies of privacy, named by their configs."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from experiments.benchmarks.cases import PflCNN
from pl_fed.data import Arrays, DataSource, FashionMNIST

SAMPLES = 40_000


class Subset(DataSource):
    """Subset: 40,000 random samples of Fashion-MNIST.

    Args:
        seed: The seed of the draw.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def load(self) -> Arrays:
        """Return the samples."""
        arrays = FashionMNIST().load()
        draw = torch.Generator().manual_seed(self.seed)
        index = torch.randperm(len(arrays.inputs), generator=draw)[:SAMPLES]
        return Arrays(arrays.inputs[index], arrays.targets[index], num_classes=arrays.num_classes)


class LeaveOutNoise(Callback):
    """Leave out noise: adds no noise to the sums of a private federation, and claims the same ε."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the mechanism before the first round."""
        privacy = trainer.federation.session.rounds.privacy
        privacy._draw_noise = lambda numel, _: torch.zeros(numel, dtype=torch.float64)


class GlorotCNN(PflCNN):
    """pfl-research's CNN with its initial weights: Glorot's uniform distribution.

    Args:
        seed: The seed of the weights. They depend on nothing else.

    Shape:
        [batch, 3, 32, 32] → logits [batch, 10].
    """

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__()
            for layer in self.layers:
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
