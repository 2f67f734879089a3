"""``python -m pl_fed export``: write clients' models as files that load without pl_fed."""

import warnings
from typing import Any

from lightning.pytorch import Trainer as LightningTrainer

from pl_fed.command.sections import SectionsCLI
from pl_fed.exports import Export, Request
from pl_fed.federation import Federation
from pl_fed.lightning.checkpoints import ClientSubsetIO
from pl_fed.lightning.trainer import Trainer

# Arguments that load a checkpoint in one process without predictions
_ONLY_LOAD = [
    *("--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto"),
    *("--trainer.logger=null", "--trainer.callbacks=null", "--trainer.profiler=null"),
    *("--trainer.enable_checkpointing=false", "--data.predict_clients=[]"),
]


class ExportCLI(SectionsCLI):
    """``python -m pl_fed export --ckpt runs/x/… --client 3``: models that load without pl_fed.

    Args:
        args: List of arguments to parse.
    """

    def __init__(self, args: list[str]) -> None:
        request = self.request = Request.parse(args)
        configs = [f"--config={path}" for path in request.config]
        arguments = [*configs, "--trainer.accelerator=auto", *request.overrides, *_ONLY_LOAD]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(callbacks used to create|length of .* is zero).*")
            super().__init__(save_config_callback=None, args=["predict", *arguments])
        self.model.to(self.trainer.strategy.root_device)
        print(f"The models are in {self.export.write()}")

    def before_instantiate_classes(self) -> None:
        """Set the checkpoint now: earlier, Lightning would load all of it for hyperparameters."""
        self.config.predict.ckpt_path = str(self.request.checkpoint)

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Build the trainer, which reads only the requested rows of the checkpoint."""
        federation: Federation = self._get(self.config_init, "federation")
        self.trainer_class = Trainer
        data = self.datamodule.clients
        clients = self.request.clients(data.num_clients, data.owners)
        self.export = Export(federation, self.request, clients, self.model.evaluated)
        return super().instantiate_trainer(
            federation=federation,
            run_dir=self.request.checkpoint.parent,
            plugins=[ClientSubsetIO(clients)],
            **kwargs,
        )
