"""Sentences of any length: each batch is padded to its own longest sentence, and packed."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

WORDS = ("good", "bad", "not", "very", "the", "film", "was", "and", "rather")
GOOD, BAD, NOT = 1, 2, 3  # ids of words; 0 pads


class LitSentences(LightningModule):
    """LitSentences: reads a sentence by a GRU, and says whether it praises."""

    def __init__(self, width: int = 24, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(1 + len(WORDS), width, padding_idx=0)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.readout = nn.Linear(width, 2)
        self.val_acc, self.test_acc = MulticlassAccuracy(2), MulticlassAccuracy(2)

    def forward(self, batch):
        """Return logits [sentences, 2]."""
        packed = pack_padded_sequence(
            self.words(batch["tokens"]), batch["lengths"].cpu(), True, enforce_sorted=False
        )
        return self.readout(self.reader(packed)[1][-1])

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        loss = functional.cross_entropy(self(batch), batch["praises"])
        self.log("train_loss", loss, batch_size=len(batch["praises"]))
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.val_acc(self(batch), batch["praises"])
        self.log("val_acc", self.val_acc, batch_size=len(batch["praises"]))

    def test_step(self, batch, batch_idx):
        """Log the accuracy."""
        self.test_acc(self(batch), batch["praises"])
        self.log("test_acc", self.test_acc, batch_size=len(batch["praises"]))

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Reviews(Dataset):
    """Reviews: 3 to 20 words from six papers, whose sentences differ in length."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * self.samples + index)
        paper, praises = index % 6, index // 6 % 2
        length = 3 + int(torch.randint(3 * (paper + 1), (1,), generator=draw))
        tokens = torch.randint(NOT + 1, 1 + len(WORDS), (length,), generator=draw)
        place = int(torch.randint(1, length, (1,), generator=draw))
        is_negated = bool(torch.randint(2, (1,), generator=draw))
        if is_negated:
            tokens[place - 1] = NOT
        tokens[place] = GOOD if bool(praises) != is_negated else BAD
        return {"tokens": tokens, "praises": praises, "paper": f"paper {paper}"}


def pad(reviews):
    """Return reviews padded to the longest of them."""
    tokens = [review["tokens"] for review in reviews]
    return {
        "tokens": pad_sequence(tokens, batch_first=True),
        "lengths": torch.tensor([len(sentence) for sentence in tokens]),
        "praises": torch.tensor([review["praises"] for review in reviews]),
    }


class SentencesData(LightningDataModule):
    """SentencesData: the parts of the reviews."""

    def train_dataloader(self):
        """Return the training reviews."""
        return DataLoader(Reviews(360, 1), 16, shuffle=True, collate_fn=pad)

    def val_dataloader(self):
        """Return the validation reviews."""
        return DataLoader(Reviews(120, 2), 64, collate_fn=pad)

    def test_dataloader(self):
        """Return the test reviews."""
        return DataLoader(Reviews(240, 3), 64, collate_fn=pad)
