"""What the clients hold: their data, what they keep between rounds, and their models' rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pl_fed.attacks import Attack
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.data.client_data import ClientData
from pl_fed.distributed.processes import Processes
from pl_fed.distributed.work_share import RemoteRows
from pl_fed.rounds.features import moved
from pl_fed.rounds.identity import kind_of
from pl_fed.rounds.server import Server
from pl_fed.rounds.settings import RunSettings
from pl_fed.rounds.storage import StorageOptions
from pl_fed.state import ClientStore, check_states
from pl_fed.trees import tree_map


class ClientStates:
    """Clients' data and states, where the client's models are; made when first asked for.

    Args:
        client: The algorithm.
        data: The clients' data, as they were loaded.
        server: The server, which keeps states too.
        settings: The trainer's settings: precision, in which a frozen body computes features, and
            processes.
        storage: Where the clients' states are kept.

    Attributes:
        participation: The number of rounds in which each client's work counted, int32 [clients];
            ``None`` after a checkpoint that does not tell it.
    """

    participation: Tensor | None

    def __init__(
        self,
        client: Client,
        data: ClientData,
        server: Server,
        settings: RunSettings,
        storage: StorageOptions,
    ) -> None:
        self.client = client
        self.loaded = data
        self._server = server
        self.settings = settings
        self._storage = storage
        self._moved: ClientData | None = None
        self._place: tuple[torch.device, torch.dtype, bool] | None = None  # of what is moved
        self._triggered: dict[str, ClientData] = {}  # by part, of what is moved
        self._store: ClientStore | None = None
        self._saved: Mapping[str, Any] | None = None
        with torch.inference_mode(False):
            self.participation = torch.zeros(data.num_clients, dtype=torch.int32)

    @property
    def data(self) -> ClientData:
        """The clients' data, where the client's models are, in their precision.

        If the net keeps features, they stand for the inputs: computed when first asked for, by the
        body of the checkpoint if there is one.
        """
        example, data = self.client.row("global").example, self._moved
        place = (example.device, example.dtype, self.client.takes_integers)
        if data is None or self._place != place:
            with torch.inference_mode(False), self.settings.autocast():
                data = self._moved = moved(self.client, self.loaded)
                self._place, self._triggered = place, {}
        return data

    def shown(self, part: str, attack: Attack | None) -> ClientData | None:
        """Return a part's samples as the attacker shows them to models, if it does."""
        data = self.data
        if attack is None or not attack.triggers:
            return None
        if part not in self._triggered:
            with torch.inference_mode(False):
                self._triggered[part] = data.change_part(part, attack.trigger)
        return self._triggered[part]

    @property
    def server_states(self) -> dict[str, Tensor]:
        """What the server keeps beside the global model, where that is."""
        server = self._server
        if not self.client.has_server_states:
            return server.states
        row = self.client.row("global").data
        with torch.inference_mode(False):
            if not server.states:
                defaults = self.client.server_state_defaults()
                server.states = {name: rows.detach().clone() for name, rows in defaults.items()}
            server.states = {name: rows.to(row) for name, rows in server.states.items()}
        return server.states

    @property
    def store(self) -> ClientStore:
        """What the clients keep between rounds."""
        if self._store is None:
            states = self.client.state_defaults()
            with torch.inference_mode(False):
                self._store = ClientStore(
                    self.loaded.num_clients,
                    states,
                    self._storage.folder,
                    self._storage.memory,
                    self.processes.here,
                )
            if self._saved is not None:
                self._store.load_state_dict(self._saved)
                self._saved = None
        return self._store

    def are_of(self, client: Client, data: ClientData, seed: int) -> bool:
        """Return whether a client and data are these, the data perhaps made anew."""
        if client is not self.client:
            return False
        one, other = (kind_of(client, each, seed) for each in (data, self.loaded))
        return data is self.loaded or one == other

    def check_none_lost(self, client: Client) -> None:
        """Raise ``ValueError`` if an evaluation on others' data would lose clients' own models."""
        held = self._saved is not None or not (self._store is None or self._store.is_empty)
        if held and client is self.client:
            raise ValueError(
                f"Expected the data on which {type(client).__name__} was fitted, whose clients have"
                f" models of their own, but got others to evaluate it on: take another Federation"
                " for them, or give `ckpt_path`."
            )

    @property
    def processes(self) -> Processes:
        """The processes that share the clients."""
        return self.settings.processes

    def renew(self, data: ClientData, settings: RunSettings) -> None:
        """Go on in another stage, with data of the same clients, perhaps loaded once more."""
        self.settings = settings
        if data is not self.loaded:
            self.loaded, self._moved = data, None

    def count_round(self, clients: Tensor) -> None:
        """Count a round for the clients whose work counted in it, int64 [clients]."""
        if self.participation is not None:
            one = self.participation.new_ones(len(clients))
            self.participation.index_add_(0, clients, one)

    @property
    def keeps_models(self) -> bool:
        """Whether each client has a model of its own, which only its own rounds train."""
        return bool(self.client.state_defaults()) and self.client.evaluated[-1] != "global"

    def restore(self, saved: Mapping[str, Any], participation: Tensor | None) -> None:
        """Take over what a store gave for a checkpoint, when the models are where they will be.

        Args:
            saved: The clients' states.
            participation: See the attribute.

        Raises:
            ValueError: If it is of other clients, or of other states; nothing is changed then.
        """
        clients = self.loaded.num_clients
        check_states(saved, clients, self.client.state_defaults())
        if participation is not None:
            _check_participation(participation, clients)
        with torch.inference_mode(False):  # rounds that follow count in place
            self.participation = None if participation is None else participation.clone()
        self._store, self._saved = None, saved
        self._moved = None  # and features by the body that will be loaded

    def begin(
        self,
        clients: Tensor,
        broadcast: ModelRows | None = None,
        remote: RemoteRows | None = None,
        steps: Mapping[str, Tensor] | None = None,
        lr: Mapping[str, Tensor] | None = None,
    ) -> ClientRound:
        """Begin a round, or an evaluation, of some clients: see :meth:`Client.run_begin`.

        Args:
            clients: Their ids, int64 [clients].
            broadcast: The global model; as it is now by default.
            remote: Rows of clients whose home is another process.
            steps: For each trained model, how many steps each client takes, [clients, 1].
            lr: For each trained model, its learning rate, [1].
        """
        client, store, remote = self.client, self.store, remote or RemoteRows()
        if broadcast is None:
            broadcast = ModelRows(client.row("global").data, client.statistics("global").data)
        row = broadcast.parameters
        start = ClientRound(
            ids=clients.to(row.device),
            samples=self.data.train.sizes[clients].to(row)[:, None],
            validation_samples=self.data.val.sizes[clients].to(row)[:, None],
            broadcast=broadcast,
            states={name: remote.read(store, name, clients) for name in store.defaults},
            server_states=self.server_states,
            steps=dict(steps or {}),
            lr=dict(lr or {}),
        )
        if client.reads_validation and steps:
            inputs, targets = self.data.pad_part("val", clients)
            start.validation_inputs = tree_map(lambda leaf: leaf.flatten(1), inputs)
            start.validation_targets = tree_map(lambda leaf: leaf.flatten(1), targets)
        return client.run_begin(start)


def _check_participation(participation: object, clients: int) -> None:
    """Raise ``ValueError`` if something is not a number of rounds for each client."""
    got = type(participation).__name__
    if isinstance(participation, Tensor):
        if participation.shape == (clients,):
            return
        got = f"shape {list(participation.shape)}"
    raise ValueError(
        f"Expected a checkpoint whose participation is of {clients} clients but got one of {got}."
    )
