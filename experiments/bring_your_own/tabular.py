"""A table with two classes: class weights, AUROC and average precision, batches that are dicts."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision


class LitTabular(LightningModule):
    """LitTabular: predicts whether a tumour is malignant."""

    def __init__(self, features: int = 30, width: int = 32, positive_weight: float = 1.7):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, width), nn.ReLU())
        self.head = nn.Linear(width, 1)
        self.register_buffer("positive_weight", torch.tensor(positive_weight))
        metrics = MetricCollection({"auroc": BinaryAUROC(), "ap": BinaryAveragePrecision()})
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def forward(self, features):
        """Return logits [batch]."""
        return self.head(self.body(features)).squeeze(-1)

    def loss(self, logits, labels):
        """Return the weighted cross-entropy."""
        return functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), pos_weight=self.positive_weight
        )

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        loss = self.loss(self(batch["features"]), batch["label"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the loss and the metrics."""
        logits = self(batch["features"])
        self.val_metrics.update(logits, batch["label"])
        self.log("val/loss", self.loss(logits, batch["label"]))
        self.log_dict(self.val_metrics)

    def test_step(self, batch, batch_idx):
        """Log the metrics."""
        self.test_metrics.update(self(batch["features"]), batch["label"])
        self.log_dict(self.test_metrics)

    def predict_step(self, batch, batch_idx):
        """Return the probability of a malignant tumour."""
        return self(batch["features"]).sigmoid()

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=1e-2)


class Tumours(Dataset):
    """Tumours: scikit-learn's breast cancer data, with the hospital of each sample."""

    def __init__(self, part: int):
        table = load_breast_cancer()
        features = torch.as_tensor(table.data, dtype=torch.float32)
        features = (features - features.mean(0)) / features.std(0)
        own = torch.arange(len(features)) % 5
        chosen = own == 4 if part == 2 else own == 3 if part == 1 else own < 3
        self.features = features[chosen]
        self.labels = torch.as_tensor(1 - table.target)[chosen]
        self.hospitals = (torch.arange(len(features))[chosen] // 5 % 6).tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        hospital = f"hospital {self.hospitals[index]}"
        return {
            "features": self.features[index], "label": self.labels[index], "hospital": hospital
        }  # fmt: skip


class TabularData(LightningDataModule):
    """TabularData: the parts of the breast cancer data."""

    def train_dataloader(self):
        """Return the training samples."""
        return DataLoader(Tumours(0), 16, shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return DataLoader(Tumours(1), 64)

    def test_dataloader(self):
        """Return the test samples."""
        return DataLoader(Tumours(2), 64)
