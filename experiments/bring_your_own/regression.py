"""Regression: Huber loss, metrics that are computed at the end of an epoch, no test step."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import MeanAbsoluteError, R2Score


class LitRegression(LightningModule):
    """LitRegression: predicts the progress of diabetes after a year, in standard deviations."""

    def __init__(self, width: int = 24, dropout: float = 0.1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1)
        )
        self.mae = MeanAbsoluteError()
        self.r2 = R2Score()

    def forward(self, x):
        """Return predictions [batch, 1]."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Return the Huber loss."""
        x, y = batch
        loss = functional.huber_loss(self(x), y)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        """Update the metrics."""
        x, y = batch
        predictions = self(x)
        self.mae.update(predictions, y)
        self.r2.update(predictions, y)

    def on_validation_epoch_end(self):
        """Log the metrics."""
        self.log("val_mae", self.mae.compute(), prog_bar=True)
        self.log("val_r2", self.r2.compute())
        self.mae.reset()
        self.r2.reset()

    def configure_optimizers(self):
        """Return Adam with a schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]


class RegressionData(LightningDataModule):
    """RegressionData: scikit-learn's diabetes data."""

    def setup(self, stage=None):
        """Read and cut the data set."""
        x, y = (torch.as_tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
        data = TensorDataset((x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std())[:, None])
        parts = torch.utils.data.random_split(data, [342, 100], torch.Generator().manual_seed(0))
        self.train, self.val = parts

    def train_dataloader(self):
        """Return the training samples."""
        return DataLoader(self.train, 16, shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return DataLoader(self.val, 100)
