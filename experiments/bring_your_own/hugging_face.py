"""A Hugging Face classifier with the loss of its own, on batches of a collator."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryF1Score
from transformers import BertConfig, BertForSequenceClassification

WORDS, LENGTH = 64, 10


class LitHuggingFace(LightningModule):
    """LitHuggingFace: classifies reviews as positive or negative."""

    def __init__(self, width: int = 16, layers: int = 1, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
            intermediate_size=2 * width, max_position_embeddings=LENGTH, num_labels=2,
        )  # fmt: skip
        self.model = BertForSequenceClassification(config)
        self.val_f1, self.test_f1 = BinaryF1Score(), BinaryF1Score()

    def forward(self, **inputs):
        """Return the model's outputs."""
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        """Return the model's own loss."""
        outputs = self(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch, batch_idx):
        """Log loss and F1."""
        outputs = self(**batch)
        self.val_f1(outputs.logits.argmax(-1), batch["labels"])
        self.log("val_loss", outputs.loss)
        self.log("val_f1", self.val_f1)

    def test_step(self, batch, batch_idx):
        """Log F1."""
        self.test_f1(self(**batch).logits.argmax(-1), batch["labels"])
        self.log("test_f1", self.test_f1)

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def draw_reviews(samples: int, seed: int) -> list[dict]:
    """Return reviews of several lengths; half of the words tell whether it is positive."""
    generator = torch.Generator().manual_seed(seed)
    reviews = []
    for number in range(samples):
        label = number // 6 % 2
        length = int(torch.randint(4, LENGTH + 1, (1,), generator=generator))
        words = torch.randint(1, WORDS, (length,), generator=generator)
        telling = torch.randint(1 + 30 * label, 31 + 30 * label, (length,), generator=generator)
        words[::2] = telling[::2]
        reviews.append({"input_ids": words.tolist(), "label": label, "shop": f"shop {number % 6}"})
    return reviews


def collate_reviews(reviews: list[dict]) -> dict:
    """Return the reviews as one batch, padded with 0."""
    ids = torch.zeros(len(reviews), LENGTH, dtype=torch.int64)
    for row, review in enumerate(reviews):
        ids[row, : len(review["input_ids"])] = torch.tensor(review["input_ids"])
    labels = torch.tensor([review["label"] for review in reviews])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class HuggingFaceData(LightningDataModule):
    """HuggingFaceData: drawn reviews of six shops."""

    def build_loader(self, samples: int, seed: int, shuffle: bool = False):
        """Return a loader of some reviews."""
        reviews = draw_reviews(samples, seed)
        return DataLoader(reviews, 16, shuffle=shuffle, collate_fn=collate_reviews)

    def train_dataloader(self):
        """Return the training reviews."""
        return self.build_loader(360, 0, shuffle=True)

    def val_dataloader(self):
        """Return the validation reviews."""
        return self.build_loader(120, 1)

    def test_dataloader(self):
        """Return the test reviews."""
        return self.build_loader(240, 2)
