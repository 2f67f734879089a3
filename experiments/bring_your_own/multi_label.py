"""Several labels a sample, some of them missing: a masked loss, and metrics in an epoch's hook."""

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import make_multilabel_classification
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multilabel_average_precision


class LitMultiLabel(LightningModule):
    """LitMultiLabel: predicts five findings; −1 marks findings that nobody looked for."""

    def __init__(self, findings: int = 5, width: int = 32):
        super().__init__()
        self.findings = findings
        self.net = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, findings))
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x):
        """Return logits [batch, findings]."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Return the mean cross-entropy over the observed findings."""
        x, y = batch
        observed = (y >= 0).to(x.dtype)
        losses = functional.binary_cross_entropy_with_logits(
            self(x), y.clamp(min=0), reduction="none"
        )
        return (losses * observed).sum() / observed.sum().clamp(min=1)

    def validation_step(self, batch, batch_idx):
        """Collect the outputs."""
        x, y = batch
        self.outputs.append((self(x).sigmoid(), y.long()))

    def on_validation_epoch_end(self):
        """Log the mean average precision."""
        scores, y = (torch.cat(tensors) for tensors in zip(*self.outputs, strict=True))
        self.outputs.clear()
        value = multilabel_average_precision(scores, y, self.findings, ignore_index=-1)
        self.log("val_map", value)

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class MultiLabelData(LightningDataModule):
    """MultiLabelData: drawn samples of scikit-learn, with one fifth of the labels missing."""

    def build_loader(self, part: slice, shuffle: bool = False):
        """Return a loader of some samples."""
        x, y = make_multilabel_classification(900, n_classes=5, n_labels=2, random_state=0)
        y = np.where(np.random.default_rng(0).random(y.shape) < 0.2, -1, y)
        tensors = [torch.as_tensor(array[part], dtype=torch.float32) for array in (x / 10 - 0.5, y)]
        return DataLoader(TensorDataset(*tensors), 16, shuffle=shuffle)

    def train_dataloader(self):
        """Return the training samples."""
        return self.build_loader(slice(0, 600), shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return self.build_loader(slice(600, 900))
