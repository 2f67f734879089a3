"""The matching of a checkpoint's clients with those of other data: new, missing and grown clients.

A client of the data gets the states of the checkpoint's client with the same owners. Data without
owners match by id, but only if the samples of all common ids are the same: a partitioner that
splits by labels gives other samples to other numbers of clients.

- A new client starts as a client that never took part, but from the present global model.
- The states of a missing client stay in later checkpoints, under the name of its owners. Its data
  may return.
- A server state that is the mean of a state over all clients (SCAFFOLD's c) becomes the mean over
  the present clients.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.text import escape_controls

_OPTION = "federation.match_clients"
_NAMED = 5  # names in a message


@dataclass(frozen=True)
class ClientRecords:
    """Client records: the owners and samples of clients, to find them in a checkpoint.

    Attributes:
        owners: The names of the owners of each client; empty if the data record none.
        digests: A digest of each client's samples and of their parts, int64 [clients].
        sizes: The number of each client's samples, int64 [clients].
        keeps_parts: Whether later samples leave the parts of earlier ones as they are.
    """

    owners: list[list[str]]
    digests: Tensor
    sizes: Tensor
    keeps_parts: bool

    @classmethod
    def collect(cls, data: ClientData) -> "ClientRecords":
        """Return the records of the clients of some data."""
        return cls(
            [list(names) for names in data.owners],
            data.client_digests,
            data.train.sizes + data.val.sizes + data.test.sizes,
            data.keeps_parts,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the records for a checkpoint."""
        return {
            "owners": json.dumps(self.owners),
            "digests": self.digests,
            "sizes": self.sizes,
            "keeps_parts": self.keeps_parts,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ClientRecords":
        """Return the records that :meth:`state_dict` returned."""
        try:
            owners = json.loads(state["owners"])
            return cls(owners, state["digests"], state["sizes"], state["keeps_parts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "Expected a checkpoint with complete records of its clients but got"
                f" {type(error).__name__}: {error}."
            ) from error

    def select(self, clients: Tensor) -> "ClientRecords":
        """Return the records of some clients, by their ids, int64 [n]."""
        owners = [self.owners[client] for client in clients.tolist()] if self.owners else []
        digests, sizes = self.digests[clients], self.sizes[clients]
        return ClientRecords(owners, digests, sizes, self.keeps_parts)

    def join(self, others: "ClientRecords") -> "ClientRecords":
        """Return these records and others behind them."""
        return ClientRecords(
            self.owners + others.owners,
            torch.cat([self.digests, others.digests]),
            torch.cat([self.sizes, others.sizes]),
            self.keeps_parts and others.keeps_parts,
        )

    def describe(self, clients: Tensor) -> str:
        """Return the number of some clients, with the first names, or their ids."""
        ids = clients.tolist()
        if not ids:
            return "0"
        first = ids[:_NAMED]
        names = [", ".join(self.owners[k]) for k in first] if self.owners else map(str, first)
        more = ", ..." if len(ids) > _NAMED else ""
        return f"{len(ids)} ({', '.join(map(escape_controls, names))}{more})"


@dataclass(frozen=True)
class ClientMatching:
    """Client matching: the client of a checkpoint for each client of the data.

    Attributes:
        saved: The records of the checkpoint's clients: present ones, then those missing before.
        present: The records of the data's clients.
        places: The place in ``saved`` of each client of the data, int64 [clients]; −1 for a new
            client.
    """

    saved: ClientRecords
    present: ClientRecords
    places: Tensor

    @classmethod
    def find(cls, saved: ClientRecords, present: ClientRecords) -> "ClientMatching":
        """Match clients by their owners; or by id, if the data record no owners.

        Raises:
            ValueError: If clients cannot be matched, or none matches.
        """
        if bool(saved.owners) != bool(present.owners):
            with_owners = "with" if present.owners else "without"
            other = "without" if present.owners else "with"
            raise ValueError(
                f"Expected a checkpoint of clients {with_owners} owners of their samples for"
                f" `{_OPTION}` but got one of clients {other} owners: use the data source of its"
                " run."
            )
        if not present.owners:
            return cls(saved, present, _match_ids(saved, present))
        places = _find_places(saved.owners, "checkpoint")
        _find_places(present.owners, "data")  # refuses an owner of several clients
        found = [places.get(tuple(sorted(names)), -1) for names in present.owners]
        matching = cls(saved, present, torch.tensor(found))
        if not len(matching.matched):
            first, other = (", ".join(records.owners[0]) for records in (present, saved))
            raise ValueError(
                f"Expected a checkpoint with some clients of the data for `{_OPTION}` but got one"
                f" with none of them: owners are, for example, {escape_controls(other)} in the"
                f" checkpoint and {escape_controls(first)} in the data."
            )
        return matching

    @property
    def matched(self) -> Tensor:
        """The ids of the data's clients that the checkpoint has, int64."""
        return (self.places >= 0).nonzero().flatten()

    @property
    def new(self) -> Tensor:
        """The ids of the data's clients that the checkpoint lacks, int64."""
        return (self.places < 0).nonzero().flatten()

    @property
    def renumbered(self) -> Tensor:
        """The ids of the data's clients that were another client's in the checkpoint, int64."""
        ids = torch.arange(len(self.places))
        is_other = (self.places >= 0) | (ids < len(self.saved.sizes))
        return (is_other & (self.places != ids)).nonzero().flatten()

    @property
    def missing(self) -> Tensor:
        """The places in ``saved`` of the clients that the data lack, int64."""
        is_missing = torch.ones(len(self.saved.sizes), dtype=torch.bool)
        is_missing[self.places[self.matched]] = False
        return is_missing.nonzero().flatten()

    @property
    def changed(self) -> Tensor:
        """The ids of matched clients with other samples or parts than in the checkpoint, int64."""
        matched = self.matched
        before = self.saved.digests[self.places[matched]]
        return matched[before != self.present.digests[matched]]

    def describe(self) -> str:
        """Return the numbers of matched, new and missing clients as text."""
        key = "owner" if self.present.owners else "id"
        sentences = [
            f"Clients of the checkpoint, matched by {key}: {len(self.matched)}. New clients, which"
            f" start from the global model: {self.present.describe(self.new)}. Missing clients,"
            f" whose states stay in later checkpoints: {self.saved.describe(self.missing)}."
        ]
        changed = self.changed
        if len(changed):
            grown = self.present.sizes[changed] - self.saved.sizes[self.places[changed]]
            sentences.append(
                f"Matched clients with other samples or parts: {self.present.describe(changed)},"
                f" with {int(grown.sum()):+d} samples."
            )
        return " ".join(sentences)

    def check_aggregator(self, aggregator: Aggregator) -> None:
        """Refuse an aggregator with a memory of clients by ids that belong to other clients now."""
        if aggregator.remembers_clients and len(self.renumbered):
            raise ValueError(
                f"Expected a checkpoint whose clients have the same ids for the aggregator"
                f" {type(aggregator).__name__}, which remembers clients by id, but got other ids of"
                f" {self.present.describe(self.renumbered)}: give new clients names behind those of"
                " earlier ones, or start a new run."
            )

    def warn_of_parts(self) -> str | None:
        """Return a warning if earlier training samples may be test samples now, or ``None``."""
        if not len(self.changed) or (self.saved.keeps_parts and self.present.keeps_parts):
            return None
        return (
            f"The samples of {len(self.changed)} matched clients were divided anew into train, val"
            " and test: test samples may be training samples of the checkpoint's rounds, which"
            " makes results too good. Set `data.stable_cut: true` from the first run on, or use"
            " data with official parts."
        )

    def convert(self, state: Mapping[str, Any], client: Client) -> dict[str, Any]:
        """Return the state of a federation in a checkpoint, for the clients of the data.

        Args:
            state: The result of :meth:`pl_fed.Federation.state_dict`.
            client: The algorithm.

        Raises:
            ValueError: If the algorithm or the server cannot continue with other clients.
        """
        self._check_algorithm(state, client)
        absent = state.get("absent") or {}
        store = _join_stores(
            state["store"], absent.get("store", {}), len(state["clients"]["sizes"])
        )
        present_ids = torch.full((len(self.saved.sizes),), -1)
        present_ids[self.places[self.matched]] = self.matched
        missing_ids = torch.full_like(present_ids, -1)
        missing_ids[self.missing] = torch.arange(len(self.missing))
        participation, missing_participation = self._divide_participation(state, absent)
        converted = {
            **state,
            "store": {name: _renumber(rows, present_ids) for name, rows in store.items()},
            "participation": participation,
            "server": {**state["server"], "states": self._move_means(state, store, client)},
        }
        converted.pop("absent", None)
        if len(self.missing):
            converted["absent"] = {
                "clients": self.saved.select(self.missing).state_dict(),
                "participation": missing_participation,
                "store": {name: _renumber(rows, missing_ids) for name, rows in store.items()},
            }
        return converted

    def _check_algorithm(self, state: Mapping[str, Any], client: Client) -> None:
        """Refuse algorithms with a server that keeps something of each client, or loses a mean."""
        name = type(client).__name__
        others = len(self.new) or len(self.missing)
        if client.new_client_reason and (others or len(self.renumbered)):
            raise ValueError(
                f"Expected a checkpoint of the same clients for {name} but got one with"
                f" {self.saved.describe(self.missing)} others and without"
                f" {self.present.describe(self.new)}, and other ids of"
                f" {self.present.describe(self.renumbered)}: {client.new_client_reason}."
            )
        if len(self.missing) and client.mean_of == "clients":
            raise ValueError(
                f"Expected data with all clients of the checkpoint for {name} but got data without"
                f" {self.saved.describe(self.missing)}: its global model is the mean of the rows"
                " of all clients, and would keep their part. Keep their data, or start a new run."
            )
        saved_states = state["server"]["states"]
        for server_state, row in client.server_state_defaults().items() if saved_states else ():
            saved = saved_states.get(server_state)
            if saved is None or saved.shape != row.shape:
                got = "none" if saved is None else str(saved.numel())
                raise ValueError(
                    f"Expected a checkpoint whose server state `{server_state}` has {row.numel()}"
                    f" numbers but got {got}: it depends on the clients, so {name} cannot continue"
                    " with others."
                )

    def _divide_participation(
        self, state: Mapping[str, Any], absent: Mapping[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the rounds of each client of the data and of each missing client, if known."""
        rounds = state.get("participation")
        if rounds is None:
            return None, None
        if absent:
            before = absent.get("participation")
            missing = len(absent["clients"]["sizes"])
            before = rounds.new_zeros(missing) if before is None else before
            rounds = torch.cat([rounds, before])
        present = rounds.new_zeros(len(self.places))
        present[self.matched] = rounds[self.places[self.matched]]
        return present, rounds[self.missing]

    def _move_means(
        self, state: Mapping[str, Any], store: Mapping[str, Any], client: Client
    ) -> dict[str, Tensor]:
        """Return the server's states, with the means over the present clients.

        The mean changes by the exact rows of the clients that come and go. Earlier effects of
        robust aggregators and broken uploads stay.
        """
        states = dict(state["server"]["states"])
        num_before = len(state["clients"]["sizes"])
        is_saved = torch.zeros(len(self.saved.sizes), dtype=torch.bool)
        is_saved[:num_before] = True  # those before were in the mean, the others had left it
        for name, mean in client.state_means.items():
            if mean not in states:
                continue
            total = states[mean].double() * num_before
            default = store[name]["default"].double()
            gone = self.missing[is_saved[self.missing]]
            back = self.places[self.matched]
            back = back[~is_saved[back]]
            total = total - _sum_rows(store[name], gone, len(is_saved)).to(total)
            total = total + _sum_rows(store[name], back, len(is_saved)).to(total)
            total = total + (default * len(self.new)).to(total)
            states[mean] = (total / len(self.places)).to(states[mean])
        return states


def find_matching(state: Mapping[str, Any], data: ClientData) -> ClientMatching:
    """Return the matching of the clients in a federation's state with those of the data.

    Args:
        state: The result of :meth:`pl_fed.Federation.state_dict`.
        data: The data.

    Raises:
        ValueError: If clients cannot be matched, or the state has only some of its clients.
    """
    if "clients" not in state:
        raise ValueError(
            f"Expected a checkpoint with records of its clients for `{_OPTION}` but got one of an"
            " earlier version of pl_fed: continue its run once with the same clients and samples."
        )
    if state.get("subset"):
        raise ValueError(
            f"Expected a checkpoint of the same clients, because only some of them are loaded, but"
            f" got one of others: continue its run with `{_OPTION}` first."
        )
    saved = ClientRecords.from_state(state["clients"])
    if state.get("absent"):
        saved = saved.join(ClientRecords.from_state(state["absent"]["clients"]))
    return ClientMatching.find(saved, ClientRecords.collect(data))


def _find_places(owners: Sequence[Sequence[str]], source: str) -> dict[tuple[str, ...], int]:
    """Return the position of each client by the names of its owners."""
    places: dict[tuple[str, ...], int] = {}
    for place, names in enumerate(owners):
        if places.setdefault(tuple(sorted(names)), place) != place:
            raise ValueError(
                f"Expected clients with different owners for `{_OPTION}` but got several clients"
                f" of {escape_controls(', '.join(names))} in the {source}."
            )
    return places


def _match_ids(saved: ClientRecords, present: ClientRecords) -> Tensor:
    """Return the places of clients by their ids, for data without owners."""
    number = min(len(saved.sizes), len(present.sizes))
    differs = saved.digests[:number] != present.digests[:number]
    if differs.any():
        first = int(differs.nonzero()[0])
        raise ValueError(
            f"Expected data whose clients keep their samples for `{_OPTION}`, because these data"
            f" record no owners and clients match by id, but got other samples of client {first}:"
            " a partitioner that splits by labels would mix up the clients; use data with owners."
        )
    places = torch.full((len(present.sizes),), -1)
    places[:number] = torch.arange(number)
    return places


def _join_stores(
    present: Mapping[str, Any], absent: Mapping[str, Any], num_present: int
) -> dict[str, dict[str, Any]]:
    """Return saved rows of present clients, and of absent clients with the numbers after them."""
    joined = {}
    for name, saved in present.items():
        other = absent.get(name)
        if other is not None:
            clients = torch.cat([saved["clients"], other["clients"] + num_present])
            saved = {**saved, "clients": clients, "rows": [*saved["rows"], *other["rows"]]}
        joined[name] = dict(saved)
    return joined


def _renumber(saved: Mapping[str, Any], ids: Tensor) -> dict[str, Any]:
    """Return the saved rows of the clients with a new id of at least 0, under the new ids.

    Args:
        saved: The saved rows of one state.
        ids: The new id of each client, int64 [clients]; −1 for none.
    """
    new_ids = ids[saved["clients"]]
    pieces = zip(new_ids.split([len(rows) for rows in saved["rows"]]), saved["rows"])
    rows = [piece if (own >= 0).all() else piece[own >= 0] for own, piece in pieces]
    clients = new_ids[new_ids >= 0]
    return {**saved, "clients": clients, "rows": [piece for piece in rows if len(piece)]}


def _sum_rows(saved: Mapping[str, Any], clients: Tensor, num_clients: int) -> Tensor:
    """Return the sum of clients' rows of one state, float64 [numel]; unwritten rows count, too.

    Args:
        saved: The saved rows of one state.
        clients: The places of the clients, int64 [n].
        num_clients: The number of all clients with a place.
    """
    ids = torch.full((num_clients,), -1)
    ids[clients] = clients
    selected = _renumber(saved, ids)
    total: Tensor = saved["default"].double() * (len(clients) - len(selected["clients"]))
    for piece in selected["rows"]:
        total = total + piece.double().sum(0)
    return total
