"""A detector of torchvision: a batch is a tuple of images and one of boxes, of any number."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou


class Backbone(nn.Sequential):
    """Backbone: three convolutions with a stride of 8 in all."""

    out_channels = 24

    def __init__(self):
        layers = []
        for before, after in ((1, 8), (8, 16), (16, self.out_channels)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers)


class LitDetection(LightningModule):
    """LitDetection: finds bright squares in noisy images."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.detector = RetinaNet(
            Backbone(),
            num_classes=2,
            anchor_generator=AnchorGenerator(sizes=((8, 12, 16),), aspect_ratios=((1.0,),)),
            min_size=48,
            max_size=64,
            image_mean=[0.0],
            image_std=[1.0],
        )

    def training_step(self, batch, batch_idx):
        """Return the sum of the losses for classes and boxes."""
        images, targets = batch
        loss = sum(self.detector(list(images), list(targets)).values())
        self.log("train_loss", loss, batch_size=len(images))
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the overlap of each true box with its best detection."""
        self.log("val_iou", self.overlap(batch), batch_size=len(batch[0]))

    def test_step(self, batch, batch_idx):
        """Log the overlap of each true box with its best detection."""
        self.log("test_iou", self.overlap(batch), batch_size=len(batch[0]))

    def overlap(self, batch):
        """Return the mean intersection over union of the true boxes with the best of 5 boxes."""
        images, targets = batch
        overlaps = [
            box_iou(target["boxes"], found["boxes"][:5]).amax(1)
            if len(found["boxes"])
            else target["boxes"].new_zeros(len(target["boxes"]))
            for found, target in zip(self.detector(list(images)), targets, strict=True)
        ]
        return torch.cat(overlaps).mean()

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Squares(Dataset):
    """Squares: images of two widths with one to three bright squares, from six cameras."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed
        self.cameras = [f"camera {index % 6}" for index in range(samples)]

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * self.samples + index)
        image = 0.3 * torch.rand(1, 48, 48 + 8 * (index % 2), generator=draw)
        corners = torch.randint(0, 34, (1 + index % 3, 2), generator=draw).float()
        sides = torch.randint(8, 15, (len(corners), 1), generator=draw).float()
        boxes = torch.cat([corners, corners + sides], 1)
        for x_min, y_min, x_max, y_max in boxes.int().tolist():
            image[:, y_min:y_max, x_min:x_max] = 1
        return image, {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}


def collate(samples):
    """Return images and targets of several sizes as two tuples."""
    return tuple(zip(*samples, strict=True))


class DetectionData(LightningDataModule):
    """Detection data: 240 training images."""

    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        """Draw the images."""
        self.sets = [Squares(samples, seed) for seed, samples in enumerate((240, 60, 60))]

    def train_dataloader(self):
        """Return the training images."""
        return DataLoader(self.sets[0], self.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self):
        """Return the validation images."""
        return DataLoader(self.sets[1], self.batch_size, collate_fn=collate)

    def test_dataloader(self):
        """Return the test images."""
        return DataLoader(self.sets[2], self.batch_size, collate_fn=collate)
