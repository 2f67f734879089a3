"""Graphs of PyTorch Geometric: a batch is one object that joins graphs of any size."""

from itertools import pairwise

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data, Dataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_mean_pool
from torchmetrics.classification import BinaryAccuracy


class LitMolecules(LightningModule):
    """LitMolecules: predicts whether a graph has a ring by a graph isomorphism network."""

    def __init__(self, width: int = 24, layers: int = 3, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        sizes = [2, *[width] * layers]
        self.convolutions = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after)))
            for before, after in pairwise(sizes)
        )
        self.readout = nn.Linear(width, 1)
        self.val_acc, self.test_acc = BinaryAccuracy(), BinaryAccuracy()

    def forward(self, batch):
        """Return logits [graphs]."""
        hidden = batch.x
        for convolution in self.convolutions:
            hidden = functional.relu(convolution(hidden, batch.edge_index))
        return self.readout(global_mean_pool(hidden, batch.batch)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        loss = functional.binary_cross_entropy_with_logits(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.val_acc(self(batch), batch.y.long())
        self.log("val_acc", self.val_acc, batch_size=batch.num_graphs)

    def test_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.test_acc(self(batch), batch.y.long())
        self.log("test_acc", self.test_acc, batch_size=batch.num_graphs)

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Molecules(Dataset):
    """Molecules: random trees of 5 to 12 nodes from six laboratories; half of them have a ring."""

    def __init__(self, samples: int, seed: int):
        super().__init__()
        self.samples = samples
        self.seed = seed
        self.laboratories = [index % 6 for index in range(samples)]

    def len(self):
        """Return the number of graphs."""
        return self.samples

    def get(self, idx):
        """Return a graph."""
        draw = torch.Generator().manual_seed(self.seed * self.samples + idx)
        size = int(torch.randint(5, 13, (1,), generator=draw))
        reach = 1 + self.laboratories[idx] % 3  # a laboratory's trees are long or broad
        edges = [
            (int(torch.randint(max(0, node - reach), node, (1,), generator=draw)), node)
            for node in range(1, size)
        ]
        has_ring = idx // 6 % 2
        if has_ring:
            edges.append((0, size - 1))
        both = torch.tensor([*edges, *((b, a) for a, b in edges)]).T
        degree = both[0].bincount(minlength=size).float()
        features = torch.stack([degree / 3, (degree == 1).float()], 1)
        return Data(x=features, edge_index=both, y=torch.tensor([float(has_ring)]))


class MoleculesData(LightningDataModule):
    """MoleculesData: the parts of the drawn graphs."""

    def train_dataloader(self):
        """Return the training graphs."""
        return DataLoader(Molecules(360, 1), batch_size=16, shuffle=True)

    def val_dataloader(self):
        """Return the validation graphs."""
        return DataLoader(Molecules(120, 2), batch_size=64)

    def test_dataloader(self):
        """Return the test graphs."""
        return DataLoader(Molecules(240, 3), batch_size=64)
