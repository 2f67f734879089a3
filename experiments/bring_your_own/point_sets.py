"""Sets of points of any length: a batch is a dataclass with the points of all sets in one row."""

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


@dataclass
class PointSets:
    """Point sets: several sets, joined; ``owner`` is the set of each point."""

    points: Tensor
    owner: Tensor
    shape: Tensor
    site: list[str]


class LitPointSets(LightningModule):
    """LitPointSets: tells circles from squares by a network that ignores the order of points."""

    def __init__(self, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.point_net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width))
        self.set_net = nn.Sequential(nn.ReLU(), nn.Linear(width, 2))

    def forward(self, batch):
        """Return logits [sets, 2]."""
        features = self.point_net(batch.points)
        index = batch.owner[:, None].expand_as(features)
        start = features.new_full((len(batch.shape), features.shape[1]), -torch.inf)
        return self.set_net(start.scatter_reduce(0, index, features, "amax"))

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return functional.cross_entropy(self(batch), batch.shape)

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.log("val_acc", self.accuracy(batch), batch_size=len(batch.shape))

    def test_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.log("test_acc", self.accuracy(batch), batch_size=len(batch.shape))

    def accuracy(self, batch):
        """Return the share of sets whose shape is recognized."""
        return (self(batch).argmax(1) == batch.shape).float().mean()

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Scans(Dataset):
    """Scans: 8 to 40 noisy points of a circle or a square, turned by a site's own angle."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * self.samples + index)
        site, shape = index % 6, index // 6 % 2
        angle = 6.2832 * torch.rand(8 + index % 33, generator=draw)
        points = torch.stack([angle.cos(), angle.sin()], 1)
        if shape:
            points = points / points.abs().amax(1, keepdim=True)
        turn = torch.tensor(site / 6)
        rotation = torch.stack(
            [torch.stack([turn.cos(), -turn.sin()]), torch.stack([turn.sin(), turn.cos()])]
        )
        noise = 0.1 * torch.randn(points.shape, generator=draw)
        return {"points": points @ rotation + noise, "shape": shape, "site": f"site {site}"}


def join(scans):
    """Return scans as one object."""
    sizes = torch.tensor([len(scan["points"]) for scan in scans])
    return PointSets(
        points=torch.cat([scan["points"] for scan in scans]),
        owner=torch.arange(len(scans)).repeat_interleave(sizes),
        shape=torch.tensor([scan["shape"] for scan in scans]),
        site=[scan["site"] for scan in scans],
    )


class PointSetsData(LightningDataModule):
    """PointSetsData: the parts of the scans."""

    def train_dataloader(self):
        """Return the training scans."""
        return DataLoader(Scans(360, 1), 16, shuffle=True, collate_fn=join)

    def val_dataloader(self):
        """Return the validation scans."""
        return DataLoader(Scans(120, 2), 64, collate_fn=join)

    def test_dataloader(self):
        """Return the test scans."""
        return DataLoader(Scans(240, 3), 64, collate_fn=join)
