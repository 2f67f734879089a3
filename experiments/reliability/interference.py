"""Non-interference: the data of one client reach other clients by the released models alone.

Two federations differ in the data of one client. Given the same released models, the uploads,
states and metrics of all other clients must be equal bit for bit.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.reliability.federations import (
    ALGORITHMS,
    Rounds,
    draw_samples,
    make_client,
    make_data,
)
from pl_fed import Adversary, DifferentialPrivacy
from pl_fed.aggregators import Median
from pl_fed.attacks import FlippedLabels, Outliers, RandomLabels
from pl_fed.clients import Client
from pl_fed.data import FederatedData
from pl_fed.preflight.privacy_rules import refuse_algorithm
from pl_fed.samplers import All, Cyclic, Poisson, Sampler, Uniform
from pl_fed.types import Population

CLIENTS, SAMPLES, ROUNDS = 6, 6, 2
Results = dict[int, dict[str, Tensor]]  # by client and name
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
NEIGHBOURS: dict[str, Change] = {
    "other samples": lambda x, y: (x.flip(0) * 3 - 1, (y + 1) % 3),
    "fewer samples": lambda x, y: (x[:1], y[:1]),
    "more samples": lambda x, y: (torch.cat([x + 0.5] * 3), y.repeat(3)),
    "one class": lambda x, y: (x, y * 0),
    "large samples": lambda x, y: (x * 1e30, y),
    "overflowing samples": lambda x, y: (x.sign() * 3e38, y),
}
SAMPLERS: tuple[Callable[[], Sampler], ...] = (
    All,
    lambda: Uniform(4),
    lambda: Poisson(0.7),
    lambda: Cyclic(2),
)
ATTACKS = (RandomLabels, FlippedLabels, Outliers)
PRIVACY: tuple[dict[str, Any], ...] = ({"target_quantile": 0.5}, {"buckets": 3})


class ObservedRounds(Rounds):
    """Observed rounds: rounds that note each client's upload, metrics and states.

    Args:
        client: The algorithm; it is copied.
        data: The data.
        engine: The name of the engine.
        chunk_size: The number of clients that the engine trains at once.
        **settings: Further arguments of the federation.
    """

    def __init__(
        self,
        client: Client,
        data: FederatedData,
        engine: str = "one_by_one",
        chunk_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(client, data, engine, chunk_size, **settings)
        self._seen: Results = {}
        training = self.federation.session.rounds.local_training
        train = training.run

        def note(*arguments: Any) -> Any:
            trained = train(*arguments)
            self._seen = _results_by_client(trained)
            return trained

        training.run = note  # type: ignore[method-assign]

    def observe(self, round: int) -> Results:
        """Run a round, and return the results of each client of the cohort."""
        self.run(round)
        return self._seen

    @property
    def clip_norm(self) -> float | None:
        """The released clipping norm; ``None`` without privacy."""
        privacy = self.federation.session.rounds.privacy
        return None if privacy is None else privacy.clip_norm

    def take(self, released: list[Tensor], clip_norm: float | None) -> None:
        """Take over the released tensors and the clipping norm of another federation."""
        for own, tensor in zip(self.released, released, strict=True):
            own.copy_(tensor)
        if clip_norm is not None:
            self.federation.session.rounds.privacy.clip_norm = clip_norm


def list_differences(values: Results, others: Results, position: int) -> list[str]:
    """Return the clients and names of results that differ, but for one client."""
    return [
        f"client {client}, {name}"
        for client in values.keys() & others.keys() - {position}
        for name, tensor in values[client].items()
        if not torch.equal(tensor, others[client][name])
    ]


def run(draw: random.Random, _: Path) -> tuple[str, str]:
    """Return a federation and a change of one client's data, and the values that it reached."""
    name, position = _draw_algorithm(draw), draw.randrange(CLIENTS)
    neighbour, change = draw.choice(list(NEIGHBOURS.items()))
    engine, chunk_size = draw.choice([("one_by_one", 1), ("stacked", 3), ("stacked", 6)])
    settings, words = _draw_settings(draw)
    description = f"{neighbour} of client {position}, {name}, {engine}, {words}"
    federations = [
        ObservedRounds(
            make_client(ALGORITHMS[name]),
            _make_data(position, own_change),
            engine,
            chunk_size,
            **settings(),
        )
        for own_change in (None, change)
    ]
    reached = []
    for round in range(ROUNDS):
        values, others = (federation.observe(round) for federation in federations)
        differences = list_differences(values, others, position)
        reached += [f"round {round}, {difference}" for difference in differences]
        plain, changed = federations
        changed.take(plain.released, plain.clip_norm)
    return description, ", ".join(reached[:5])


def _draw_algorithm(draw: random.Random) -> str:
    """Return an algorithm in which no client reads the states of others."""
    while True:
        name = draw.choice(list(ALGORITHMS))
        client = make_client(ALGORITHMS[name])
        client.population = Population(CLIENTS, CLIENTS, CLIENTS * SAMPLES)
        if refuse_algorithm(client) is None:
            return name


def _draw_settings(draw: random.Random) -> tuple[Callable[[], dict[str, Any]], str]:
    """Return a function that makes the arguments of a federation, and their description."""
    if draw.random() < 0.1:
        options = draw.choice(PRIVACY)

        def private() -> dict[str, Any]:
            privacy = DifferentialPrivacy(0.05, 0.01, noise_multiplier=1.0, noise_seed=0, **options)
            median = {"aggregator": Median()} if "buckets" in options else {}
            return {"privacy": privacy, "sampler": Poisson(0.7), **median}

        return private, f"privacy {options}"
    sampler, attack = draw.choice(SAMPLERS), draw.choice([None, *ATTACKS])
    ids = draw.choice([[0], [1, 2], [5]])

    def public() -> dict[str, Any]:
        adversary = Adversary() if attack is None else Adversary(attack(), ids=ids)
        return {"sampler": sampler(), "adversary": adversary}

    attack_name = "no attack" if attack is None else f"{attack.__name__} at {ids}"
    return public, f"{type(sampler()).__name__}, {attack_name}"


def _make_data(position: int, change: Change | None) -> FederatedData:
    samples = [draw_samples(SAMPLES, seed) for seed in range(CLIENTS)]
    if change is not None:
        samples[position] = change(*samples[position])
    return make_data(samples, last=position)


def _results_by_client(trained: Any) -> Results:
    """Return the upload, metrics and states of each client of a cohort."""
    results: Results = {int(client): {} for client in trained.clients}
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
