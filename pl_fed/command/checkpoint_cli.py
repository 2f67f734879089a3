"""A run from its folder: its config and one of its checkpoints, loaded in one process."""

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from torch import Tensor

from pl_fed.command.sections import SectionsCLI
from pl_fed.federation import Federation
from pl_fed.lightning.checkpoints import ClientSubsetIO
from pl_fed.lightning.trainer import Trainer

# Arguments that load a checkpoint in one process without predictions
_ONLY_LOAD = [
    *("--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto"),
    *("--trainer.logger=null", "--trainer.callbacks=null", "--trainer.profiler=null"),
    *("--trainer.enable_checkpointing=false", "--data.predict_clients=[]"),
]


class CheckpointCLI(SectionsCLI):
    """Checkpoint CLI: sets up a run by its config, and loads a checkpoint in one process.

    It reads only the rows of the clients that :meth:`find_clients` returns.

    Args:
        checkpoint: The checkpoint.
        config: The files of the run's config.
        overrides: Further command-line arguments, as changes of the config.
    """

    def __init__(self, checkpoint: Path, config: Sequence[Path], overrides: Sequence[str]) -> None:
        self.checkpoint = checkpoint
        configs = [f"--config={path}" for path in config]
        arguments = [*configs, "--trainer.accelerator=auto", *overrides, *_ONLY_LOAD]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(callbacks used to create|length of .* is zero).*")
            super().__init__(save_config_callback=None, args=["predict", *arguments])
        self.model.to(self.trainer.strategy.root_device)

    @abstractmethod
    def find_clients(self) -> Tensor:
        """Return the ids of the clients to load, int64 [n]; data and federation exist."""

    @property
    def federation(self) -> Federation:
        """The federation."""
        federation: Federation = self._get(self.config_init, "federation")
        return federation

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments without the checkpoint with which the run began."""
        super().parse_arguments(parser, args)
        self.config.predict.ckpt_path = None

    def before_instantiate_classes(self) -> None:
        """Set the checkpoint now: earlier, Lightning would load all of it for hyperparameters."""
        self.config.predict.ckpt_path = str(self.checkpoint)

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Build the trainer, which reads only the requested rows of the checkpoint."""
        self.trainer_class = Trainer
        return super().instantiate_trainer(
            federation=self.federation,
            run_dir=self.checkpoint.parent,
            plugins=[ClientSubsetIO(self._find_training_clients())],
            **kwargs,
        )

    def _find_training_clients(self) -> Tensor:
        """Return the ids of the clients to load that have states: held-out clients have none."""
        clients = self.find_clients()
        return clients[clients < self.datamodule.clients.num_clients]
