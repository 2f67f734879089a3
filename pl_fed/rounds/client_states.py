"""The clients' data, and the states that they keep between rounds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pl_fed.attacks import Attack
from pl_fed.clients.base import Client
from pl_fed.clients.client_rounds import optimizer_state_name
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.features import place_data
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.devices import to_device
from pl_fed.distributed.processes import Processes
from pl_fed.distributed.work_share import RemoteRows
from pl_fed.engine.own_samples import OwnSamples
from pl_fed.rounds.identity import states_identity
from pl_fed.rounds.server import Server
from pl_fed.rounds.settings import RunSettings
from pl_fed.rounds.storage import StorageOptions
from pl_fed.rounds.triggered_data import TriggeredData
from pl_fed.state import ClientStore, check_states
from pl_fed.trees import tree_map


class ClientStates:
    """Client states: the clients' data and states, on the device of the models.

    Data and states are created at their first use.

    Args:
        client: The algorithm.
        data: The clients' data, as loaded.
        server: The server, which has states too.
        settings: The trainer's settings. Their precision is the precision in which a frozen body
            computes features.
        storage: The storage options of the clients' states.
        rule: The split of samples into minibatches.
        augment: Applied to the inputs of each minibatch of training data.

    Attributes:
        participation: The number of rounds with a valid result of each client, int32 [clients];
            ``None`` after a checkpoint without these numbers.
        absent: The states of clients of a checkpoint that the data lack, for later checkpoints;
            ``None`` without any.
    """

    participation: Tensor | None

    def __init__(
        self,
        client: Client,
        data: ClientData,
        server: Server,
        settings: RunSettings,
        storage: StorageOptions,
        rule: BatchRule,
        augment: Callable[[Any], Any] | None,
    ) -> None:
        self.client = client
        self.loaded = data
        self._server = server
        self.settings = settings
        self.rule = rule
        self.augment = augment
        self._storage = storage
        self._data: ClientData | None = None
        self._data_format: tuple[torch.device, torch.dtype, bool] | None = None
        self._trigger_data = TriggeredData()
        self._own_samples: OwnSamples | None = None
        self._store: ClientStore | None = None
        self._saved: Mapping[str, Any] | None = None
        self._new_clients: Tensor | None = None  # their rows begin at the global model
        self.absent: Mapping[str, Any] | None = None
        with torch.inference_mode(False):
            self.participation = torch.zeros(data.num_clients, dtype=torch.int32)

    @property
    def data(self) -> ClientData:
        """The clients' data, on the device of the models and in their precision.

        If the net keeps features, features replace the inputs. The body computes them at the first
        use, after a checkpoint is loaded.
        """
        example, data = self.client.row("global").example, self._data
        data_format = (example.device, example.dtype, self.client.takes_integers)
        if data is None or self._data_format != data_format:
            with torch.inference_mode(False), self.settings.autocast():
                data = self._data = place_data(self.client, self.loaded)
                self._data_format, self._trigger_data = data_format, TriggeredData()
        return data

    def _find_own_samples(self) -> OwnSamples:
        """Return the passes over the clients' samples; new ones for new data."""
        data, own = self.data, self._own_samples
        if own is None or own.data is not data:
            own = self._own_samples = OwnSamples(self.client, data, data.batch)
        return own

    def apply_trigger(self, part: str, attack: Attack | None) -> ClientData | None:
        """Return the samples of a part with the attack's trigger; ``None`` without a trigger."""
        data = self.data
        if attack is None or not attack.triggers:
            return None
        return self._trigger_data.apply(data, part, attack)

    @property
    def server_states(self) -> dict[str, Tensor]:
        """The server's states by name, on the device of the global model."""
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
        """The store of the states that the clients keep between rounds.

        Its rows are read on the models' device, which another trainer may change.
        """
        if self._store is not None:
            self._store.move_defaults(self.client.row("global").data.device)
        else:
            self._store = self._build_store(self.client.store_defaults())
            if self._saved is not None:
                self._store.load_state_dict(self._saved)
                self._saved = None
            if self._new_clients is not None:
                clients, self._new_clients = self._new_clients, None
                for name, row in new_client_rows(self.client).items():
                    self._store.write(name, clients, row.expand(len(clients), -1))
        return self._store

    def _build_store(self, rows: Mapping[str, Tensor]) -> ClientStore:
        """Return a store in which each client has the same rows, by name, [length] each."""
        return ClientStore(
            self.loaded.num_clients,
            rows,
            self._storage.folder,
            self._storage.memory,
            self.processes.local_size,
        )

    def belong_to(self, client: Client, data: ClientData, seed: int) -> bool:
        """Return whether the states belong to a client and data; the data may be loaded again.

        Data of other owners, or of the same ones in another order, have other clients.
        """
        if client is not self.client:
            return False
        loaded = self.loaded
        if data is loaded:
            return True
        is_equal = states_identity(client, data, seed) == states_identity(client, loaded, seed)
        return is_equal and [*data.owners] == [*loaded.owners]

    def check_replaceable(self, client: Client) -> None:
        """Refuse to evaluate an algorithm on other data if this would discard its clients' states.

        Raises:
            ValueError: If this algorithm's clients have states.
        """
        has_states = self._saved is not None or not (self._store is None or self._store.is_empty)
        if has_states and client is self.client and client.state_defaults():
            raise ValueError(
                f"Expected the data on which {type(client).__name__} was fitted, because its"
                " clients have their own models, but got other data to evaluate: use another"
                " Federation for these data, or set `ckpt_path`."
            )

    @property
    def processes(self) -> Processes:
        """The processes that share the clients."""
        return self.settings.processes

    def forget_triggered_samples(self) -> None:
        """Make samples with a trigger anew, for a fit: its rounds number the trigger's versions."""
        self._trigger_data = TriggeredData()

    def renew(
        self,
        data: ClientData,
        settings: RunSettings,
        rule: BatchRule,
        augment: Callable[[Any], Any] | None,
    ) -> None:
        """Continue in another stage; the data of the same clients may be loaded again.

        Kept features are computed again under another precision.
        """
        kind = self.client.row("global").example.device.type
        if settings.autocast_dtype(kind) != self.settings.autocast_dtype(kind):
            self._data = None
        self.settings, self.rule, self.augment = settings, rule, augment
        if data is not self.loaded:
            self.loaded, self._data = data, None

    def count_round(self, clients: Tensor) -> None:
        """Count a round for the clients with a valid result, by their ids, int64 [clients]."""
        if self.participation is not None:
            ones = self.participation.new_ones(len(clients))
            self.participation.index_add_(0, clients, ones)

    @property
    def keeps_models(self) -> bool:
        """Whether each client keeps its own model, which only its own rounds train."""
        if self.client.num_centers:  # the rounds of all clients of a center train it
            return False
        return bool(self.client.state_defaults()) and self.client.evaluated[-1] != "global"

    @property
    def is_untrained(self) -> Tensor:
        """The mask of the clients with a model of their own that no round trained, bool [clients].

        Such a client took part in no round, or was broken in all its rounds. There are none if each
        client's model is a center, or comes from the global model before an evaluation, or if a
        checkpoint had no participation.
        """
        if self.participation is None or not self.keeps_models:
            return torch.zeros(self.loaded.num_clients, dtype=torch.bool)
        return self.participation == 0

    def restore(
        self,
        saved: Mapping[str, Any],
        participation: Tensor | None,
        new_clients: Tensor | None = None,
        absent: Mapping[str, Any] | None = None,
    ) -> None:
        """Restore the clients' states from a checkpoint, at their first use.

        Args:
            saved: The ``state_dict`` of the store.
            participation: See the attribute.
            new_clients: Ids of the clients that the checkpoint lacks, int64: their states begin at
                the global model. ``None`` without any.
            absent: See the attribute.

        Raises:
            ValueError: If the states belong to other clients or another algorithm. Then nothing
                changes.
        """
        clients = self.loaded.num_clients
        check_states(saved, clients, self.client.store_defaults())
        if participation is not None:
            _check_participation(participation, clients)
        with torch.inference_mode(False):  # later rounds count in place
            self.participation = None if participation is None else participation.clone()
        self._store, self._saved = None, saved
        self._new_clients, self.absent = None, absent
        if new_clients is not None and len(new_clients):
            self._new_clients = new_clients[self.processes.is_home(new_clients)]
        self._data = None  # the loaded body computes other features

    def begin(
        self,
        clients: Tensor,
        broadcast: ModelRows | None = None,
        remote: RemoteRows | None = None,
        steps: Mapping[str, Tensor] | None = None,
        lr: Mapping[str, Tensor] | None = None,
        center_losses: Tensor | None = None,
        preparation_steps: Mapping[str, Tensor] | None = None,
    ) -> ClientRound:
        """Begin a round, or an evaluation, of clients: see :meth:`Client.run_begin`.

        Args:
            clients: Client ids, int64 [clients].
            broadcast: The global model; its current state by default.
            remote: Rows of clients with another home process.
            steps: Number of steps of each client, by trained model, [clients, 1] each; ``None`` for
                an evaluation.
            lr: Learning rate, by trained model, [1] each.
            center_losses: The losses of the centers, [clients, centers]; ``None`` without centers.
            preparation_steps: Number of steps of the preparation, by its model, [clients, 1] each.
        """
        client, store, remote = self.client, self.store, remote or RemoteRows()
        broadcast = broadcast or client.model_rows("global")
        row = broadcast.parameters
        start = ClientRound(
            ids=to_device(clients, row),
            samples=to_device(self.data.train.sizes[clients], row, row.dtype)[:, None],
            validation_samples=to_device(self.data.val.sizes[clients], row, row.dtype)[:, None],
            broadcast=broadcast,
            states={name: remote.read(store, name, clients) for name in client.state_defaults()},
            server_states=self.server_states,
            optimizer_states={
                model: remote.read(store, optimizer_state_name(model), clients)
                for model in (client.optimizer_layouts if steps else {})
            },
            steps=dict(steps or {}),
            preparation_steps=dict(preparation_steps or {}),
            lr=dict(lr or {}),
            center_losses=center_losses,
            visit_samples=self._find_own_samples().visit,
        )
        if client.reads_class_counts:
            counts = self.loaded.class_counts(clients)
            start.class_counts = to_device(counts, row, row.dtype)
        if client.reads_validation and steps:
            inputs, targets = self.data.pad_part("val", clients)
            start.validation_inputs = tree_map(lambda leaf: leaf.flatten(1), inputs)
            start.validation_targets = tree_map(lambda leaf: leaf.flatten(1), targets)
        return client.run_begin(start)


def read_frozen_values(
    client: Client, data: ClientData, number: int, server_states: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the values of frozen parameters that are not the broadcast's, by name.

    Args:
        client: The algorithm.
        data: The samples of clients, before any attack on them.
        number: The client, or the server, by its number in the data.
        server_states: The server's states at the start of the round, by name.
    """
    counts = None
    if client.reads_class_counts:
        counts = data.class_counts(torch.tensor([number]))[0]
        counts = to_device(counts, client.row("global").data)
    return client.frozen_values(server_states, counts)


def new_client_rows(client: Client) -> dict[str, Tensor]:
    """Return the rows of a client that arrives now, by name, [length] each.

    Its kept models are the present global model, and other states have their defaults; an initial
    row is the present global model, too.
    """
    rows = client.store_defaults()
    for name in client.trained:
        if name in rows:
            rows[name] = client.row("global").data
        if f"{name}.statistics" in rows:
            rows[f"{name}.statistics"] = client.statistics("global").data
    return rows


def _check_participation(participation: object, clients: int) -> None:
    """Raise ``ValueError`` if the participation is not a tensor [clients]."""
    got = type(participation).__name__
    if isinstance(participation, Tensor):
        if participation.shape == (clients,):
            return
        got = f"shape {list(participation.shape)}"
    raise ValueError(
        f"Expected a checkpoint with the participation of {clients} clients but got one of {got}."
    )
