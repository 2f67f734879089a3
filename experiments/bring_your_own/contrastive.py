"""Contrastive learning: two random views of each image, and a loss over all pairs of a batch."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class LitContrastive(LightningModule):
    """LitContrastive: similar codes for two views of an image."""

    def __init__(self, width: int = 48, code: int = 16, temperature: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
        self.projection = nn.Sequential(nn.ReLU(), nn.Linear(width, code))

    def forward(self, x):
        """Return codes of length 1, [batch, code]."""
        return functional.normalize(self.projection(self.encoder(x.flatten(1))), dim=1)

    def augment(self, x):
        """Return a view: another contrast of each image, noise and hidden pixels."""
        contrast = 0.5 + torch.rand(len(x), 1, 1, 1, device=x.device, dtype=x.dtype)
        hidden = torch.rand_like(x) < 0.2
        return torch.where(hidden, 0.0, contrast * x + 0.1 * torch.randn_like(x))

    def similarities(self, x):
        """Return the similarity of each first view to each second view, [batch, batch]."""
        return self(self.augment(x)) @ self(self.augment(x)).T / self.hparams.temperature

    def training_step(self, batch, batch_idx):
        """Return the symmetric loss over all pairs."""
        x, _ = batch
        pairs = self.similarities(x)
        own = torch.arange(len(x), device=x.device)
        loss = (functional.cross_entropy(pairs, own) + functional.cross_entropy(pairs.T, own)) / 2
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the share of images whose other view is the most similar one."""
        x, _ = batch
        own = torch.arange(len(x), device=x.device)
        found = self.similarities(x).argmax(1) == own
        self.log("val_top1", found.float().mean(), batch_size=len(x))

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class ContrastiveData(LightningDataModule):
    """ContrastiveData: scikit-learn's handwritten digits."""

    def build_loader(self, part: slice, shuffle: bool = False):
        """Return a loader of some samples."""
        digits = load_digits()
        x = torch.as_tensor(digits.images[part], dtype=torch.float32)[:, None] / 16
        return DataLoader(TensorDataset(x, torch.as_tensor(digits.target[part])), 32, shuffle)

    def train_dataloader(self):
        """Return the training samples."""
        return self.build_loader(slice(0, 1280), shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return self.build_loader(slice(1280, 1797))
