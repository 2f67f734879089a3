"""A user's code in the campaigns: modules, and a data set that draws."""

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset


class LitDigits(LightningModule):
    """LitDigits: a classifier with dropout, Adam and a schedule."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
        )

    def training_step(self, batch, batch_idx):
        """Return the loss of a minibatch."""
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the loss of a minibatch."""
        x, y = batch
        self.log("val_loss", functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        """Return Adam with a schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)]


class NoisyDigits(Dataset):
    """NoisyDigits: digits with noise that differs at each reading."""

    def __init__(self) -> None:
        digits = load_digits()
        self.x, self.y = torch.tensor(digits.data[:400] / 16).float(), digits.target[:400]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place):
        return self.x[place] + 0.1 * torch.randn(64), int(self.y[place])


class AdaptedNet(nn.Module):
    """AdaptedNet: a net whose layers have names, for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        """Return logits."""
        return self.head(self.body(x.flatten(1)).tanh())
