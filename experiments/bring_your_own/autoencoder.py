"""A variational autoencoder: random draws in the training step, no use of the labels."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class LitAutoencoder(LightningModule):
    """LitAutoencoder: encodes images as draws of a normal distribution."""

    def __init__(self, width: int = 48, code: int = 8, beta: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x):
        """Return the reconstructions of the mean codes."""
        mean, _ = self.encoder(x).chunk(2, 1)
        return self.decoder(mean).sigmoid().view_as(x)

    def training_step(self, batch, batch_idx):
        """Return the negative evidence lower bound."""
        x, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        errors = functional.binary_cross_entropy_with_logits(
            self.decoder(code), x.flatten(1), reduction="sum"
        ) / len(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        self.log("train_divergence", divergence)
        return errors + self.hparams.beta * divergence

    def validation_step(self, batch, batch_idx):
        """Log the reconstruction error."""
        x, _ = batch
        self.log("val_mse", functional.mse_loss(self(x), x))

    def test_step(self, batch, batch_idx):
        """Log the reconstruction error."""
        x, _ = batch
        self.log("test_mse", functional.mse_loss(self(x), x))

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class AutoencoderData(LightningDataModule):
    """AutoencoderData: scikit-learn's handwritten digits."""

    def build_loader(self, part: slice, shuffle: bool = False):
        """Return a loader of some samples."""
        digits = load_digits()
        x = torch.as_tensor(digits.images[part], dtype=torch.float32)[:, None] / 16
        return DataLoader(TensorDataset(x, torch.as_tensor(digits.target[part])), 32, shuffle)

    def train_dataloader(self):
        """Return the training samples."""
        return self.build_loader(slice(0, 1200), shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return self.build_loader(slice(1200, 1400))

    def test_dataloader(self):
        """Return the test samples."""
        return self.build_loader(slice(1400, 1797))
