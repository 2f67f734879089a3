"""``python -m pl_fed partition``: print and draw the data split; trains nothing."""

from pathlib import Path

from lightning.pytorch.cli import ArgsType

from pl_fed.command.messages import describe_full_disk
from pl_fed.command.program import program_name
from pl_fed.command.run_files import (
    active_loggers,
    class_entries,
    discard_unstarted_run,
    place_logger,
)
from pl_fed.command.sections import SectionsCLI
from pl_fed.loggers import wandb_loggers
from pl_fed.reports.split import Split
from pl_fed.run_folder import new_folder

WITHOUT_MODEL = [
    *("--model=pl_fed.clients.FedAvg", "--model.net=torch.nn.Linear"),
    *("--model.net.in_features=1", "--model.net.out_features=1"),
    *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"),
    *("--trainer.strategy=auto", "--trainer.precision=32-true"),
]
"""Arguments that replace the config's model and machine: a data split needs neither."""


class PartitionCLI(SectionsCLI):
    """``python -m pl_fed partition --config x.yaml``: print and draw the data split.

    Args:
        args: List of arguments to parse; ``None`` uses the command line.

    Raises:
        OSError: If the disk is full; the original error does not name the folder.
    """

    def __init__(self, args: ArgsType = None) -> None:
        self.folder: Path | None = None
        try:
            super().__init__(
                save_config_callback=None,
                parser_kwargs={
                    "prog": f"{program_name()} partition",
                    "description": "Print and draw the number of samples of each class per client.",
                },
                run=False,
                args=args,
            )
            self._show()
        except BaseException as error:
            discard_unstarted_run(self.folder)
            files = f"the files of the data split in {self.folder}"
            if text := describe_full_disk(error, files, "repeat the command"):
                raise OSError(text) from error
            raise

    def _show(self) -> None:
        self.split = Split(self.datamodule.clients)
        self.split.show()
        if self.datamodule.held_out is not None:
            print(
                "Held-out clients, which never train, from id"
                f" {self.datamodule.clients.num_clients} on:"
            )
            Split(self.datamodule.held_out).show()
        self._save(Path(self.trainer.default_root_dir))

    def instantiate_classes(self) -> None:
        """Instantiate all classes; loggers write into a new folder."""
        folder = self.folder = new_folder(self.config.trainer.default_root_dir or "runs")
        self.config.trainer.default_root_dir = str(folder)
        self.config.trainer.logger = active_loggers(self.config.trainer.logger)
        for logger in class_entries(self.config.trainer.logger):
            place_logger(logger, folder)
        super().instantiate_classes()

    def _save(self, folder: Path) -> None:
        """Write the table and the picture, and log them to W&B."""
        self.split.write(folder / "split.csv")
        if self.datamodule.held_out is not None:
            Split(self.datamodule.held_out).write(folder / "split_held_out.csv")
        self.split.draw(folder / "split.png")
        for logger in wandb_loggers(self.trainer):
            rows = self.split.rows()
            logger.log_image("split", [str(folder / "split.png")])
            logger.log_table("clients", list(rows[0]), [list(row.values()) for row in rows])
            logger.experiment.finish()
        print(f"split.csv and split.png are in {folder}")
