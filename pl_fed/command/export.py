"""``python -m pl_fed export``: write clients' models as files that load without pl_fed."""

from dataclasses import replace
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pl_fed.command.checkpoint_cli import CheckpointCLI
from pl_fed.command.messages import explain_full_disk
from pl_fed.command.run_choice import choose_evaluated_run
from pl_fed.exports import Export, Request
from pl_fed.exports.request import find_checkpoint
from pl_fed.run_folder import LAST


class ExportCLI(CheckpointCLI):
    """``python -m pl_fed export --ckpt runs/x/… --client 3``: models that load without pl_fed.

    Args:
        args: List of arguments to parse.
    """

    def __init__(self, args: list[str]) -> None:
        request = self.request = Request.parse(args)
        super().__init__(request.checkpoint, request.config, request.overrides)
        place = self.request.out or self.request.run
        with explain_full_disk(f"the exported models in {place}", "repeat the command"):
            folder = self.export.write()
        print(f"The models are in {folder}")

    def before_instantiate_classes(self) -> None:
        """Find the newest run of the config if the request asks for the last one."""
        if self.request.checkpoint == Path(LAST):
            root = self.config.predict.trainer.default_root_dir or "runs"
            run = choose_evaluated_run(LAST, root, self.plain_config(), self.add_defaults)
            rank_zero_info(f"The models are those of {run.folder}.")
            self.checkpoint = find_checkpoint(run.folder)
            self.request = replace(self.request, checkpoint=self.checkpoint)
        super().before_instantiate_classes()

    def find_clients(self) -> Tensor:
        """Return the ids of the requested clients, int64 [n]."""
        clients = self.request.clients(self.datamodule)
        self.export = Export(self.federation, self.request, clients, self.model)
        return clients
