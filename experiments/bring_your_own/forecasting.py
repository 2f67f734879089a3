"""Forecasting: an LSTM on windows of the curves of several sensors."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.regression import MeanAbsoluteError


class LitForecasting(LightningModule):
    """LitForecasting: predicts the next four measurements from twelve."""

    def __init__(self, width: int = 16, horizon: int = 4, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, horizon)
        self.train_loss = MeanMetric()
        self.val_mae, self.test_mae = MeanAbsoluteError(), MeanAbsoluteError()

    def forward(self, window):
        """Return predictions [batch, horizon]."""
        hidden, _ = self.lstm(window[..., None])
        return self.head(hidden[:, -1])

    def training_step(self, batch, batch_idx):
        """Return the squared error."""
        window, future = batch
        loss = functional.mse_loss(self(window), future)
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the absolute error."""
        window, future = batch
        self.val_mae(self(window), future)
        self.log("val/mae", self.val_mae)

    def test_step(self, batch, batch_idx):
        """Log the absolute error."""
        window, future = batch
        self.test_mae(self(window), future)
        self.log("test/mae", self.test_mae)

    def predict_step(self, batch, batch_idx):
        """Return the predictions."""
        return self(batch[0])

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Windows(Dataset):
    """Windows: parts of noisy waves, and the sensor of each window.

    Attributes:
        sensors: The sensor of each window.
    """

    def __init__(self, begin: int, end: int):
        generator = torch.Generator().manual_seed(0)
        pieces, self.sensors = [], []
        for sensor in range(6):
            time = torch.arange(160.0)
            curve = torch.sin(time / (2 + sensor)) + 0.3 * torch.sin(time / 11 + sensor)
            curve = curve + 0.05 * torch.randn(160, generator=generator)
            pieces.append(curve[begin:end].unfold(0, 16, 1))
            self.sensors += [sensor] * len(pieces[-1])
        self.windows = torch.cat(pieces)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        window = self.windows[index]
        return window[:12], window[12:]


class ForecastingData(LightningDataModule):
    """ForecastingData: early windows for training, later ones for validation and testing."""

    def train_dataloader(self):
        """Return the training samples."""
        return DataLoader(Windows(0, 100), 16, shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return DataLoader(Windows(100, 130), 64)

    def test_dataloader(self):
        """Return the test samples."""
        return DataLoader(Windows(130, 160), 64)
