"""A trained run in Python: ``pl_fed.load`` gives the models of its clients."""

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.command.checkpoint_cli import CheckpointCLI
from pl_fed.command.messages import first_refusal
from pl_fed.exports.request import find_checkpoint, find_client, find_config
from pl_fed.federation import Federation
from pl_fed.isolation import isolate


class TrainedRun:
    """Trained run: the models of a run, as ``predict`` uses them.

    :func:`pl_fed.load` makes one.

    Args:
        checkpoint: The checkpoint.
        federation: The federation with the checkpoint's states.
        loaded: The ids of the clients whose states are loaded, int64 [n].

    Attributes:
        checkpoint: The checkpoint.
        federation: The federation, with its algorithm (``client``), data and states.
    """

    def __init__(self, checkpoint: Path, federation: Federation, loaded: Tensor) -> None:
        self.checkpoint = checkpoint
        self.federation = federation
        self._loaded = set(loaded.tolist())

    @property
    def clients(self) -> list[str]:
        """The names of the clients: of their owners if the data have names, else their ids."""
        data = self.federation.data
        return [
            ", ".join(data.owners[client]) if data.owners else str(client)
            for client in range(data.num_clients)
        ]

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the evaluated models; the last one is the clients' own, if there is one."""
        return self.federation.client.evaluated

    @property
    def preparation(self) -> dict[str, Any]:
        """What inputs must go through before a model: see ``FederatedData.preparation``."""
        return self.federation.session.datamodule.preparation

    @property
    def global_model(self) -> nn.Module:
        """A copy of the global model, as the user's net in evaluation mode.

        Raises:
            ValueError: If the algorithm has none, as ``Local``, or none with a trained head.
        """
        return self.federation.model_of(0, "global")

    def model_of(self, client: int | str, model: str | None = None) -> nn.Module:
        """Return a client's model: the user's net in evaluation mode, independent of pl_fed.

        Args:
            client: The id of the client, or the name of its owner. A text of digits is an id.
                Held-out clients have the ids after the last training client's.
            model: The name of one of ``models``; ``None`` for the last one.

        Raises:
            ValueError: If there is no such client or model, or the client's states were not
                loaded.
        """
        data = self.federation.session.datamodule
        found = find_client(str(client), data.num_evaluated, data.evaluated_owners)
        if found < data.clients.num_clients and found not in self._loaded:
            raise ValueError(
                f"Expected argument `client` to be one of the {len(self._loaded)} loaded clients"
                f" but got {client!r}: add it to the `clients` of pl_fed.load."
            )
        return self.federation.model_of(found, model)


class _LoadCLI(CheckpointCLI):
    """Load CLI: loads a run for Python.

    Args:
        checkpoint: The checkpoint.
        config: The files of the run's config.
        overrides: Changes of the config, as words of the command line.
        clients: Ids of clients or names of their owners; ``None`` for all clients.
    """

    def __init__(
        self,
        checkpoint: Path,
        config: Sequence[Path],
        overrides: Sequence[str],
        clients: Sequence[int | str] | None,
    ) -> None:
        self._requested = clients
        super().__init__(checkpoint, config, overrides)

    def find_clients(self) -> Tensor:
        """Return the ids of the requested clients, int64 [n]."""
        data = self.datamodule
        self.loaded = torch.arange(data.clients.num_clients)
        if self._requested is not None:
            number, owners = data.num_evaluated, data.evaluated_owners
            ids = [find_client(str(client), number, owners) for client in self._requested]
            self.loaded = torch.tensor(ids, dtype=torch.int64)
        return self.loaded


def load(
    run: str | Path,
    clients: Sequence[int | str] | None = None,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> TrainedRun:
    """Load a run of the command line for use in Python.

    Random generators, settings of torch and the environment stay as they are.

    Args:
        run: The run's folder, for its last checkpoint; or a checkpoint.
        clients: Ids of clients or names of their owners, to read the states of these alone;
            ``None`` reads those of all clients.
        config: The config; ``None`` for the ``config.yaml`` in the run's folder.
        overrides: Changes of the config as words of the command line, such as
            ``["--data.dataset.root=/elsewhere"]``.

    Returns:
        The run, on the device of its ``trainer.accelerator``, or a better one with ``auto``.

    Raises:
        FileNotFoundError: If there is no checkpoint, or no config beside it.
        ValueError: If the file is no checkpoint, or the config does not fit it.
    """
    checkpoint = find_checkpoint(Path(run), "run")
    configs = [find_config(checkpoint) if config is None else Path(config)]
    output = io.StringIO()
    with isolate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
                cli = _LoadCLI(checkpoint, configs, overrides, clients)
        except SystemExit:
            raise ValueError(first_refusal(output.getvalue())) from None
    return TrainedRun(checkpoint, cli.federation, cli.loaded)
