"""Scans as MONAI gives them: dicts with nested metadata and lists, from a transform of dicts."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class LitVolumes(LightningModule):
    """LitVolumes: segments lesions in small volumes, and looks at each sample's own lesions."""

    def __init__(self, width: int = 8, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(width, 1, 1),
        )

    def forward(self, batch):
        """Return logits [scans, 1, depth, height, width]."""
        spacing = torch.tensor(batch["meta"]["spacing"]).to(batch["image"])
        return self.net(batch["image"] * spacing.mean(1)[:, None, None, None, None])

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy and Dice loss."""
        logits, mask = self(batch), batch["mask"]
        overlap = 2 * (logits.sigmoid() * mask).sum() / (logits.sigmoid().sum() + mask.sum() + 1)
        loss = functional.binary_cross_entropy_with_logits(logits, mask) + 1 - overlap
        self.log("train_loss", loss, batch_size=len(mask))
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the share of lesions that are found."""
        self.log("val_recall", self.find_lesions(batch), batch_size=len(batch["mask"]))

    def test_step(self, batch, batch_idx):
        """Log the share of lesions that are found."""
        self.log("test_recall", self.find_lesions(batch), batch_size=len(batch["mask"]))

    def find_lesions(self, batch):
        """Return the share of lesions whose centre is marked."""
        marked = self(batch)[:, 0] > 0
        found = [
            marked[number, z, y, x].float()
            for number, lesions in enumerate(batch["lesions"])
            for z, y, x in (lesion["centre"] for lesion in lesions)
        ]
        return torch.stack(found).mean()

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Scans(Dataset):
    """Scans: volumes of 12³ voxels with one to three lesions, from four scanners."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * self.samples + index)
        scanner = index % 4
        image, mask = torch.randn(1, 12, 12, 12, generator=draw) / 2, torch.zeros(1, 12, 12, 12)
        lesions = []
        for number in range(1 + index // 4 % 3):
            z, y, x = torch.randint(2, 10, (3,), generator=draw).tolist()
            mask[:, z - 1 : z + 2, y - 1 : y + 2, x - 1 : x + 2] = 1
            lesions.append({"centre": [z, y, x], "name": f"lesion {number}"})
        spacing = [1.0 + scanner / 4, 1.0, 1.0]
        meta = {"spacing": spacing, "scanner": f"scanner {scanner}"}
        return {"image": image + mask, "mask": mask, "lesions": lesions, "meta": meta}


def join(scans):
    """Return a dict with tensors, and with lists of what differs in length."""
    return {
        "image": torch.stack([scan["image"] for scan in scans]),
        "mask": torch.stack([scan["mask"] for scan in scans]),
        "lesions": [scan["lesions"] for scan in scans],
        "meta": {name: [scan["meta"][name] for scan in scans] for name in ("spacing", "scanner")},
    }


def read_scanner(scan):
    """Return the owner of a scan."""
    return scan["meta"]["scanner"]


class VolumesData(LightningDataModule):
    """VolumesData: the parts of the scans."""

    def train_dataloader(self):
        """Return the training scans."""
        return DataLoader(Scans(96, 1), 8, shuffle=True, collate_fn=join)

    def val_dataloader(self):
        """Return the validation scans."""
        return DataLoader(Scans(32, 2), 8, collate_fn=join)

    def test_dataloader(self):
        """Return the test scans."""
        return DataLoader(Scans(64, 3), 8, collate_fn=join)
