"""What the clients hold: their data, what they keep between rounds, and their models' rows."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pl_fed.attacks import Attack
from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.engine import EngineChoice
from pl_fed.engine.features import moved
from pl_fed.rounds.identity import identity_of
from pl_fed.rounds.server import Server
from pl_fed.rounds.sharing import Guests
from pl_fed.state import ClientStore


class Holdings:
    """Clients' data and states, where the client's models are; made when first asked for.

    Args:
        client: The algorithm.
        data: The clients' data, as they were loaded.
        server: The server, which keeps states too.
        engine: Gives the context in which a frozen body computes features.
        folder: Folder for the clients' states, on disk; see :class:`ClientStore`.
        memory: Memory for them, likewise.
        sharers: Processes on this node, likewise.
    """

    def __init__(
        self,
        client: Client,
        data: ClientData,
        server: Server,
        engine: EngineChoice,
        folder: str | None,
        memory: int | float,
        sharers: int,
    ) -> None:
        self.client = client
        self.loaded = data
        self._server = server
        self._engine = engine
        self._where = (folder, memory, sharers)
        self._moved: ClientData | None = None
        self._triggered: dict[str, ClientData] = {}  # by part, of what is moved
        self._store: ClientStore | None = None
        self._saved: Mapping[str, Any] | None = None

    @property
    def data(self) -> ClientData:
        """The clients' data, where the client's models are, in their precision.

        If the net keeps features, they stand for the inputs: computed when first asked for, by the
        body of the checkpoint if there is one.
        """
        like, data = self.client.row("global").example, self._moved
        if data is None or data.x.device != like.device or data.x.dtype != like.dtype:
            with torch.inference_mode(False), self._engine.autocast():
                data = self._moved = moved(self.client, self.loaded)
                self._triggered = {}
        return data

    def shown(self, part: str, attack: Attack | None) -> ClientData | None:
        """Return a part's samples as the attacker shows them to models, if it does."""
        data = self.data
        if attack is None or not attack.triggers:
            return None
        if part not in self._triggered:
            with torch.inference_mode(False):
                self._triggered[part] = data.shown(part, attack.trigger)
        return self._triggered[part]

    @property
    def server_states(self) -> dict[str, Tensor]:
        """What the server keeps beside the global model, where that is."""
        server = self._server
        if not server.states and not self._has_server_states:
            return server.states
        like = self.client.row("global").data
        with torch.inference_mode(False):
            if not server.states:
                first = self.client.server_states()
                server.states = {name: each.detach().clone() for name, each in first.items()}
            server.states = {name: each.to(like) for name, each in server.states.items()}
        return server.states

    @cached_property
    def _has_server_states(self) -> bool:
        """Whether the algorithm has the server keep anything beside the global model."""
        return bool(self.client.server_states())

    @property
    def store(self) -> ClientStore:
        """What the clients keep between rounds."""
        if self._store is None:
            states = dict(self.client.states())
            for model in self.client.trains:
                if model != "global":
                    states[f"{model}_statistics"] = self.client.statistics(model).data
            with torch.inference_mode(False):
                self._store = ClientStore(self.loaded.num_clients, states, *self._where)
            if self._saved is not None:
                self._store.load_state_dict(self._saved)
                self._saved = None
        return self._store

    def are_of(self, client: Client, data: ClientData, seed: int) -> bool:
        """Return whether a client and data are these, the data perhaps made anew."""
        if client is not self.client:
            return False
        one, other = (identity_of(client, each, seed) for each in (data, self.loaded))
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

    def exchange(self, data: ClientData) -> None:
        """Take other data of the same clients, as they were loaded."""
        self.loaded, self._moved = data, None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what a store gave for a checkpoint, when the models are where they will be."""
        self._store, self._saved = None, saved
        self._moved = None  # and features by the body that will be loaded

    def begin(
        self,
        clients: Tensor,
        broadcast: Tensor | None = None,
        statistics: Tensor | None = None,
        guests: Guests | None = None,
        work: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Bring together the rows of clients: what they got, what they keep, and their own models.

        Args:
            clients: Their ids, int64 [clients].
            broadcast: The global model's row; as it is now by default.
            statistics: Its running statistics, likewise.
            guests: Rows of clients that are at home elsewhere.
            work: Rows about the local work, if a round begins.

        Returns:
            What :meth:`Client.begin` was given, after it.
        """
        client, store, guests = self.client, self.store, guests or Guests()
        if broadcast is None or statistics is None:
            broadcast, statistics = client.row("global").data, client.statistics("global").data
        rows = {name: guests.read(store, name, clients) for name in store.defaults}
        rows |= {"broadcast": broadcast, "broadcast_statistics": statistics, **self.server_states}
        rows["samples"] = self.data.train.sizes[clients, None].to(broadcast)
        rows["validation_samples"] = self.data.val.sizes[clients, None].to(broadcast)
        rows["client"] = clients[:, None].to(broadcast.device)
        rows |= work or {}
        for model in dict.fromkeys((*client.trains, *client.evaluates())):
            for name, row in ((model, broadcast), (f"{model}_statistics", statistics)):
                if model != "global" and name not in rows:
                    rows[name] = row.expand(len(clients), -1).clone()
        client.begin(rows)
        return rows
