"""``python -m pl_fed export``: write clients' models as files that load without pl_fed."""

from torch import Tensor

from pl_fed.command.checkpoint_cli import CheckpointCLI
from pl_fed.command.messages import explain_full_disk
from pl_fed.exports import Export, Request


class ExportCLI(CheckpointCLI):
    """``python -m pl_fed export --ckpt runs/x/… --client 3``: models that load without pl_fed.

    Args:
        args: List of arguments to parse.
    """

    def __init__(self, args: list[str]) -> None:
        request = self.request = Request.parse(args)
        super().__init__(request.checkpoint, request.config, request.overrides)
        with explain_full_disk("the exported models", "repeat the command"):
            folder = self.export.write()
        print(f"The models are in {folder}")

    def find_clients(self) -> Tensor:
        """Return the ids of the requested clients, int64 [n]."""
        clients = self.request.clients(self.datamodule)
        self.export = Export(self.federation, self.request, clients, self.model)
        return clients
