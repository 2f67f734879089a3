"""Rounds that note each client's results, to compare federations with one client's data changed."""

import copy
from contextlib import nullcontext

import torch

from pl_fed import EngineOptions, Federation
from pl_fed.engine import LocalSettings
from pl_fed.rounds.settings import RunSettings

NEIGHBOURS = {  # changes of one client's inputs and classes
    "other samples": lambda x, y: (x.flip(0) * 3 - 1, (y + 1) % 3),
    "fewer samples": lambda x, y: (x[:1], y[:1]),
    "more samples": lambda x, y: (torch.cat([x + 0.5] * 3), y.repeat(3)),
    "one class": lambda x, y: (x, y * 0),
    "large samples": lambda x, y: (x * 1e30, y),
    "overflowing samples": lambda x, y: (x.sign() * 3e38, y),
}


class ObservedRounds:
    """Observed rounds: rounds without a trainer that note uploads, metrics and states by client.

    Args:
        client: The algorithm; it is copied.
        data: The data.
        engine: The name of the engine.
        chunk_size: The number of clients that the engine trains at once.
        **settings: Further arguments of the federation.
    """

    def __init__(self, client, data, engine="one_by_one", chunk_size=None, **settings):
        self.client = copy.deepcopy(client)
        options = {"seed": 0, "max_rejected": 1.0, "model_selection": None, **settings}
        self.federation = Federation(engine=EngineOptions(engine, chunk_size), **options)
        run_settings = RunSettings(LocalSettings(nullcontext), rounds=4)
        self.federation.setup(self.client, data, "fit", settings=run_settings)
        self.client.train()
        self.optimizer = self.client.configure_optimizers()
        self._seen = {}
        training = self.federation.session.rounds.local_training
        train = training.run

        def note(*arguments):
            trained = train(*arguments)
            self._seen = results_by_client(trained)
            return trained

        training.run = note

    def observe(self, round):
        """Run a round, and return the results of each client of the cohort."""
        self.federation.run_round(round, self.optimizer)
        return self._seen

    @property
    def released(self):
        """The global model, its running statistics, and the server's states."""
        rows = [self.client.row("global").data, self.client.statistics("global").data]
        return [*rows, *self.federation.server_states.values()]

    @property
    def clip_norm(self):
        """The released clipping norm; ``None`` without privacy."""
        privacy = self.federation.session.rounds.privacy
        return None if privacy is None else privacy.clip_norm

    def take(self, released, clip_norm):
        """Take over the released tensors and the clipping norm of another federation."""
        for own, tensor in zip(self.released, released, strict=True):
            own.copy_(tensor)
        if clip_norm is not None:
            self.federation.session.rounds.privacy.clip_norm = clip_norm


def results_by_client(trained):
    """Return the upload, metrics and states of each client of a cohort, by client and name."""
    results = {int(client): {} for client in trained.clients}
    for position, client in enumerate(trained.clients.tolist()):
        for name, values in trained.metrics.items():
            results[client][f"metric {name}"] = values[position].clone()
        results[client]["status"] = trained.status[position].clone()
        if trained.own.uploads is not None:
            results[client]["upload"] = trained.own.uploads[position].clone()
    for clients, states in trained.own.states:
        for position, client in enumerate(clients.tolist()):
            for name, rows in states.items():
                results[client][f"state {name}"] = rows[position].clone()
    return results


def list_differences(values, others, changed):
    """Return the clients and names of results that differ, but for the changed clients."""
    return [
        f"client {client}, {name}"
        for client in values.keys() & others.keys() - {*changed}
        for name, tensor in values[client].items()
        if not torch.equal(tensor, others[client][name])
    ]
