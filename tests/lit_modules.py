"""LightningModules as real code bases write them; none of them knows of pl_fed."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryF1Score,
    MulticlassAccuracy,
)
from torchmetrics.regression import MeanAbsoluteError, R2Score


class LitImages(LightningModule):
    """Image classification with BatchNorm, a metric object and a schedule of epochs."""

    def __init__(self, lr=0.1, width=4, norm=True, momentum=0.5):
        super().__init__()
        self.save_hyperparameters()
        norms = [nn.BatchNorm2d(width)] if norm else []
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), *norms, nn.Tanh(), nn.Flatten(),
            nn.Linear(width * 36, 3),
        )  # fmt: skip
        self.val_acc = MulticlassAccuracy(3, average="micro")
        self.test_acc = MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", (logits.argmax(1) == y).float().mean())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", functional.cross_entropy(logits, y), on_epoch=True)
        self.log("val_acc", self.val_acc, on_epoch=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_acc(logits, y)
        self.log("test_acc", self.test_acc)
        return functional.cross_entropy(logits, y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


class LitTable(LightningModule):
    """A table with rare positives: class weights, AUROC and F1 in a collection."""

    def __init__(self, features=4, positive_weight=3.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 5), nn.Tanh())
        self.head = nn.Linear(5, 1)
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(positive_weight))
        metrics = MetricCollection({"auroc": BinaryAUROC(), "f1": BinaryF1Score()})
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = self.loss(self(x), y.to(x.dtype))
        self.log_dict({"train/loss": loss, "train/positives": y.float().mean()})
        return {"loss": loss}

    def _evaluate(self, batch, metrics):
        x, y = batch
        logits = self(x)
        metrics.update(logits.sigmoid(), y)
        self.log_dict(metrics)
        return {"loss": self.loss(logits, y.to(x.dtype))}

    def validation_step(self, batch, batch_idx):
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch, batch_idx):
        return self._evaluate(batch, self.test_metrics)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class LitRegression(LightningModule):
    """Regression, with metrics that are computed in the hook at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.mae, self.r2 = MeanAbsoluteError(), R2Score()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.net(x)
        self.mae.update(outputs, y)
        self.r2.update(outputs, y)

    def on_validation_epoch_end(self):
        self.log("val/mae", self.mae.compute())
        self.mae.reset()
        self.log("val/r2", self.r2)

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self.net(x).squeeze(-1)

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net.parameters(), lr=0.02)]


class LitAutoencoder(LightningModule):
    """An autoencoder: no use of targets, and no validation step."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))

    def training_step(self, batch, batch_idx):
        x, *_ = batch
        loss = (self(x) - x).square().mean()
        self.log("recon", loss, batch_size=len(x))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    learning_rate = 0.3


class LitTokens(LightningModule):
    """Next token of padded sentences, in batches that are dicts, as of Hugging Face."""

    def __init__(self, words=11, width=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids, attention_mask):
        sums = (self.embedding(input_ids) * attention_mask[..., None]).cumsum(1)
        return self.head(torch.tanh(sums))

    def _loss(self, batch):
        logits = self(batch["input_ids"], batch["attention_mask"])
        return functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
        )

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_perplexity", loss.exp())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx):
        loss = self._loss(batch)
        self.log("val_loss", loss)
        self.log("val_perplexity", loss.exp(), batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


class LitTemplate(LightningModule):
    """A widespread template: net and optimizer as arguments, a metric object for each number."""

    def __init__(self, net, optimizer, scheduler=None):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(3)
        self.val_acc = MulticlassAccuracy(3)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx):
        loss, predictions, y = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predictions, y)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, predictions, y = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predictions, y)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        options = {"monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}


class LitLists(LightningModule):
    """Collects outputs in a list until the end of the epoch, and logs the learning rate."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.outputs = []
        self.register_buffer("weights", torch.tensor([1.0, 3.0]))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y, weight=self.weights.to(x.dtype))
        self.log("train_loss", loss, on_step=True, on_epoch=True, logger=True)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return {"loss": loss, "samples": len(x)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.outputs.append((self.net(x).softmax(1)[:, 1], y))

    def on_validation_epoch_end(self):
        scores, y = (torch.cat(tensors) for tensors in zip(*self.outputs))
        self.log("val_auroc", BinaryAUROC()(scores, y))
        self.outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return [optimizer], [schedule]
