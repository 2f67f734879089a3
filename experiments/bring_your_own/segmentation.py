"""Segmentation: a U-Net with cross-entropy and Dice loss, masks with unlabelled pixels."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex

IGNORED = 255


def convolve(inputs: int, outputs: int) -> nn.Module:
    """Return two convolutions with GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
    )  # fmt: skip


class LitSegmentation(LightningModule):
    """LitSegmentation: a class for each pixel, background, disc or square."""

    def __init__(self, width: int = 6, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.down1, self.down2 = convolve(1, width), convolve(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = convolve(2 * width, width)
        self.classes = nn.Conv2d(width, 3, 1)
        self.val_iou = MulticlassJaccardIndex(3, ignore_index=IGNORED)
        self.test_iou = MulticlassJaccardIndex(3, ignore_index=IGNORED)

    def forward(self, image):
        """Return logits [batch, 3, height, width]."""
        high = self.down1(image)
        low = self.down2(functional.max_pool2d(high, 2))
        return self.classes(self.merge(torch.cat([high, self.up(low)], 1)))

    def dice_loss(self, logits, mask):
        """Return 1 minus the Dice coefficient over the labelled pixels of the batch."""
        labelled = (mask != IGNORED)[:, None]
        probabilities = logits.softmax(1) * labelled
        targets = functional.one_hot(mask.clamp(max=2), 3).movedim(-1, 1) * labelled
        overlap = (probabilities * targets).sum((0, 2, 3))
        sums = (probabilities + targets).sum((0, 2, 3))
        return 1 - ((2 * overlap + 1) / (sums + 1)).mean()

    def compute_step(self, batch, stage):
        """Return loss and logits, and log the loss."""
        logits = self(batch["image"])
        cross_entropy = functional.cross_entropy(logits, batch["mask"], ignore_index=IGNORED)
        loss = cross_entropy + self.dice_loss(logits, batch["mask"])
        self.log(f"{stage}_loss", loss, batch_size=len(batch["image"]))
        return loss, logits

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        return self.compute_step(batch, "train")[0]

    def validation_step(self, batch, batch_idx):
        """Log loss and intersection over union."""
        _, logits = self.compute_step(batch, "val")
        self.val_iou(logits.argmax(1), batch["mask"])
        self.log("val_iou", self.val_iou)

    def test_step(self, batch, batch_idx):
        """Log loss and intersection over union."""
        _, logits = self.compute_step(batch, "test")
        self.test_iou(logits.argmax(1), batch["mask"])
        self.log("test_iou", self.test_iou)

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Shapes(Dataset):
    """Shapes: noisy images of a disc and a square, from six cameras of different contrast."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        camera = index % 6
        places = torch.randint(3, 13, (4,), generator=generator).tolist()
        rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        mask = torch.zeros(16, 16, dtype=torch.int64)
        mask[(rows - places[0]).square() + (columns - places[1]).square() < 12] = 1
        mask[((rows - places[2]).abs() < 3) & ((columns - places[3]).abs() < 3)] = 2
        levels = torch.tensor([0.0, 0.5, 1.0])[mask] * (0.5 + 0.2 * camera)
        image = levels + 0.2 * torch.randn(16, 16, generator=generator)
        mask[torch.rand(16, 16, generator=generator) < 0.1] = IGNORED
        return {"image": image[None], "mask": mask, "camera": camera}


class SegmentationData(LightningDataModule):
    """SegmentationData: the parts of the shapes."""

    def train_dataloader(self):
        """Return the training samples."""
        return DataLoader(Shapes(240, 1), 8, shuffle=True)

    def val_dataloader(self):
        """Return the validation samples."""
        return DataLoader(Shapes(60, 2), 16)

    def test_dataloader(self):
        """Return the test samples."""
        return DataLoader(Shapes(120, 3), 16)
