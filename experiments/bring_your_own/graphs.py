"""A graph net: batches are dicts of nodes, edges and masks, for graphs of several sizes."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy

NODES = 10


class LitGraphs(LightningModule):
    """LitGraphs: predicts whether a molecule-like graph has a ring."""

    def __init__(self, width: int = 24, layers: int = 3, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(3, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.val_acc, self.test_acc = BinaryAccuracy(), BinaryAccuracy()

    def forward(self, batch):
        """Return logits [batch]."""
        mask = batch["mask"][..., None].to(batch["nodes"].dtype)
        hidden = self.embed(batch["nodes"]) * mask
        for layer in self.messages:
            gathered = batch["edges"] @ hidden
            hidden = functional.relu(layer(torch.cat([hidden, gathered], -1))) * mask
        return self.readout(hidden.sum(1) / mask.sum(1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        loss = functional.binary_cross_entropy_with_logits(self(batch), batch["ring"])
        self.log("train_loss", loss, batch_size=len(batch["ring"]))
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.val_acc(self(batch), batch["ring"].long())
        self.log("val_acc", self.val_acc, batch_size=len(batch["ring"]))

    def test_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.test_acc(self(batch), batch["ring"].long())
        self.log("test_acc", self.test_acc, batch_size=len(batch["ring"]))

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Graphs(Dataset):
    """Graphs: chains with random branches; half of them have a further edge, which makes a ring."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        laboratory, has_ring = index % 6, index // 6 % 2
        size = int(torch.randint(5, NODES + 1, (1,), generator=generator))
        edges = torch.zeros(NODES, NODES)
        for node in range(1, size):
            first = max(0, node - 1 - laboratory % 3)
            parent = int(torch.randint(first, node, (1,), generator=generator))
            edges[node, parent] = edges[parent, node] = 1
        if has_ring:
            missing = (1 - edges[:size, :size] - torch.eye(size)).triu().nonzero()
            a, b = missing[int(torch.randint(len(missing), (1,), generator=generator))].tolist()
            edges[a, b] = edges[b, a] = 1
        mask = torch.arange(NODES) < size
        degree = edges.sum(1)
        nodes = torch.stack([mask.float(), degree / 3, (degree == 1).float()], 1)
        return {
            "nodes": nodes, "edges": edges, "mask": mask, "laboratory": laboratory,
            "ring": torch.tensor(float(has_ring)),
        }  # fmt: skip


class GraphsData(LightningDataModule):
    """GraphsData: the parts of the drawn graphs."""

    def train_dataloader(self):
        """Return the training samples."""
        return DataLoader(Graphs(360, 1), 16, shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return DataLoader(Graphs(120, 2), 64)

    def test_dataloader(self):
        """Return the test samples."""
        return DataLoader(Graphs(240, 3), 64)
