"""Image classification: a small residual net with BatchNorm, metric objects and a schedule."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Block(nn.Module):
    """Block: two convolutions with BatchNorm around a skip connection."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        """Return images of the same shape."""
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(hidden)))


class LitImages(LightningModule):
    """LitImages: classifies images of digits."""

    def __init__(self, width: int = 12, lr: float = 0.05, label_smoothing: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.block = Block(width)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(4 * width, 10)
        self.train_acc = MulticlassAccuracy(10, average="micro")
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.test_acc = MulticlassAccuracy(10, average="micro")

    def forward(self, x):
        """Return logits [batch, 10]."""
        return self.fc(self.pool(self.block(self.stem(x))).flatten(1))

    def training_step(self, batch, batch_idx):
        """Return the smoothed cross-entropy."""
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y, label_smoothing=self.hparams.label_smoothing)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log loss and accuracy."""
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        """Log the accuracy."""
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        """Return SGD with a cosine schedule over epochs."""
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


class ImagesData(LightningDataModule):
    """ImagesData: scikit-learn's handwritten digits, cut at random."""

    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        """Read and cut the data set."""
        digits = load_digits()
        x = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
        y = torch.as_tensor(digits.target, dtype=torch.int64)
        parts = random_split(TensorDataset(x, y), [0.7, 0.1, 0.2], torch.Generator().manual_seed(0))
        self.train, self.val, self.test = parts

    def train_dataloader(self):
        """Return the training samples."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self):
        """Return the test samples."""
        return DataLoader(self.test, self.batch_size)
