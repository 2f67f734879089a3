"""A net of timm: a vision transformer that is chosen by its name, with timm's own loss."""

import timm
import torch
from lightning.pytorch import LightningModule
from timm.loss import LabelSmoothingCrossEntropy
from torchmetrics.classification import MulticlassAccuracy

from experiments.bring_your_own.images import ImagesData


class LitTimm(LightningModule):
    """LitTimm: fits a net of timm to images of digits."""

    def __init__(self, name: str = "vit_tiny_patch16_224", lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(
            name, num_classes=10, in_chans=1, img_size=8, patch_size=4,
            embed_dim=32, depth=2, num_heads=2,
        )  # fmt: skip
        self.criterion = LabelSmoothingCrossEntropy(0.05)
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.test_acc = MulticlassAccuracy(10, average="micro")

    def forward(self, x):
        """Return logits [batch, 10]."""
        return self.model(x)

    def training_step(self, batch, batch_idx):
        """Return the smoothed cross-entropy."""
        images, labels = batch
        loss = self.criterion(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        images, labels = batch
        self.val_acc(self(images), labels)
        self.log("val_acc", self.val_acc)

    def test_step(self, batch, batch_idx):
        """Log the accuracy."""
        images, labels = batch
        self.test_acc(self(images), labels)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)


class TimmData(ImagesData):
    """TimmData: the digits of the image code base."""
