"""A language model: a causal transformer on the characters of sentences of several lengths."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

SAYINGS = {  # proverbs, by the language that they come from
    "english": "a stitch in time saves nine|all that glitters is not gold|better late than never|"
    "every cloud has a silver lining|look before you leap|many hands make light work|"
    "actions speak louder than words|practice makes perfect|the early bird catches the worm|"
    "when in rome do as the romans do|a rolling stone gathers no moss|haste makes waste",
    "latin": "ars longa vita brevis|carpe diem quam minimum credula postero|errare humanum est|"
    "festina lente|fortes fortuna adiuvat|in vino veritas|nosce te ipsum|omnia vincit amor|"
    "per aspera ad astra|repetitio est mater studiorum|sapere aude|tempus fugit",
    "german": "aller anfang ist schwer|aller guten dinge sind drei|eile mit weile|"
    "ende gut alles gut|morgenstund hat gold im mund|ohne fleiss kein preis|"
    "stille wasser sind tief|uebung macht den meister|viele wege fuehren nach rom|"
    "was lange waehrt wird endlich gut|wer rastet der rostet|wer wagt gewinnt",
    "italian": "a caval donato non si guarda in bocca|chi dorme non piglia pesci|"
    "chi trova un amico trova un tesoro|chi va piano va sano e va lontano|finche dura|"
    "la notte porta consiglio|l unione fa la forza|meglio tardi che mai|"
    "non e tutto oro quel che luccica|roma non fu fatta in un giorno|tra il dire e il fare|"
    "tutte le strade portano a roma",
}
LETTERS = "_ abcdefghijklmnopqrstuvwxyz"  # 0 pads
LENGTH = 44


class LitLanguage(LightningModule):
    """LitLanguage: predicts the next character."""

    def __init__(self, width: int = 32, heads: int = 2, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(len(LETTERS), width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, ids):
        """Return logits [batch, length, characters]."""
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        split = self.attention(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.hparams.heads, -1)).transpose(1, 2) for t in split)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.feed(self.norm2(x)))

    def loss(self, batch):
        """Return the mean cross-entropy over the characters."""
        logits = self(batch["ids"])
        return functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
        )

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        loss = self.loss(batch)
        self.log("train/loss", loss, batch_size=len(batch["ids"]))
        return loss

    def validation_step(self, batch, batch_idx):
        """Log loss and perplexity."""
        loss = self.loss(batch)
        self.log_dict({"val/loss": loss, "val/ppl": loss.exp()}, batch_size=len(batch["ids"]))

    def test_step(self, batch, batch_idx):
        """Log loss and perplexity."""
        loss = self.loss(batch)
        self.log_dict({"test/loss": loss, "test/ppl": loss.exp()}, batch_size=len(batch["ids"]))

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def pad_sentences(samples: list[dict]) -> dict:
    """Return a batch of sentences, padded to the longest of them."""
    longest = max(len(sample["text"]) for sample in samples) - 1
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        characters = torch.tensor([LETTERS.index(letter) for letter in sample["text"]])
        ids[row, : len(characters) - 1] = characters[:-1]
        labels[row, : len(characters) - 1] = characters[1:]
    return {"ids": ids, "labels": labels}


class LanguageData(LightningDataModule):
    """LanguageData: the sentences of four languages, two of each language for validation."""

    def build_loader(self, part: slice, shuffle: bool = False):
        """Return a loader of some sentences of each language."""
        samples = [
            {"text": sentence, "language": language}
            for language, sentences in SAYINGS.items()
            for sentence in sentences.split("|")[part]
        ]
        return DataLoader(samples, 8, shuffle=shuffle, collate_fn=pad_sentences)

    def train_dataloader(self):
        """Return the training sentences."""
        return self.build_loader(slice(0, 8), shuffle=True)

    def val_dataloader(self):
        """Return the validation sentences."""
        return self.build_loader(slice(8, 10))

    def test_dataloader(self):
        """Return the test sentences."""
        return self.build_loader(slice(10, 12))
