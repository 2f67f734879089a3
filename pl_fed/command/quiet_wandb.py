"""W&B without lines of its own, from its first use on."""

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_fed.command.wandb_runs import silence_wandb


class QuietWandb(Callback):
    """Quiet W&B: silences W&B when a resumed training starts; earlier, W&B would write files."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Silence W&B before its run goes on."""
        silence_wandb()
