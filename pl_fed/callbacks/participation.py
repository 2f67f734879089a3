"""Clients that never took part: their number in every evaluation, and a warning."""

import re

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.federation import Federation

_WARNED_STAGES = ("validate", "test")
_ENDING = re.compile(r"val/(untrained_clients$|.*_trained(_std|_worst10)?$)")


class Participation(Callback):
    """Participation: logs the number of benign clients whose own model was never trained.

    The metric is ``val/untrained_clients`` or ``test/untrained_clients``. It is missing where all
    benign clients took part. An evaluation after the fit also warns once.

    Args:
        federation: The federation.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self._warned = False

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove metrics that end when every client has taken part, so that none is outdated."""
        for metrics in (trainer.callback_metrics, trainer.logged_metrics):
            for name in [name for name in metrics if _ENDING.match(name)]:
                del metrics[name]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the number of clients for a validation."""
        self._report(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the number of clients for a test."""
        self._report(trainer, pl_module, "test")

    def _report(self, trainer: Trainer, module: LightningModule, part: str) -> None:
        untrained = len(self.federation.clients_without_training())
        if not untrained:
            return
        module.log(f"{part}/untrained_clients", torch.tensor(float(untrained)), batch_size=1)
        if trainer.state.fn in _WARNED_STAGES and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{describe_untrained(self.federation)} Metrics over the other clients end in"
                " `_trained`. The column `rounds` of per_client.csv has the number of rounds in"
                " which each client took part."
            )


def describe_untrained(federation: Federation) -> str:
    """Return a sentence on clients with untrained models of their own, or an empty string.

    Args:
        federation: The federation, after an evaluation.
    """
    untrained = len(federation.clients_without_training())
    if not untrained:
        return ""
    benign = int((~federation.is_byzantine).sum())
    consequence = "their personal models were never trained."
    if federation.untrained_models == "global":
        consequence = "the global model replaces their personal models."
    return f"{untrained} of {benign} benign clients never took part: {consequence}"
