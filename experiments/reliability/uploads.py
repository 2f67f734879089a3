"""Hostile uploads: clients send broken or extreme uploads to each aggregator.

With a broken upload, the round must be the round without this client; an upload of another
precision is cast. With extreme finite uploads, the model stays finite, and moves no farther than
the aggregator promises by its breakdown point.
"""

import inspect
import math
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pl_fed.aggregators
from experiments.reliability.federations import (
    Cohorts,
    Rounds,
    draw_samples,
    make_client,
    make_data,
)
from pl_fed import Adversary
from pl_fed.aggregators import Aggregator, Chain, Mean, PreAggregator
from pl_fed.clients import FLAME, Client, Ditto, FedAvg, Scaffold

SIZES = (9, 4, 6, 11, 5, 8, 7, 6, 5, 9, 8)
COHORT = (5, 0, 3, 2, 4, 6, 7, 8, 9, 10)
HOSTILE, ROUND, ROUNDS = 3, 0, 2  # one more round shows the memory of an aggregator
TOLERANCE = 1e-5

BROKEN: dict[str, Callable[[Tensor], Any]] = {
    "NaN": lambda row: row * math.nan,
    "infinity": lambda row: row * math.inf,
    "one NaN": lambda row: torch.where(torch.arange(row.shape[1]) == 0, math.nan, row),
    "one infinity": lambda row: torch.where(torch.arange(row.shape[1]) == 3, -math.inf, row),
    "too short": lambda row: row[:, :-1],
    "too long": lambda row: torch.cat([row, row[:, :1]], 1),
    "one dimension": lambda row: row[0],
    "no dimension": lambda row: row.sum(),
    "transposed": lambda row: row.T,
    "no row": lambda row: row[:0],
    "two rows": lambda row: torch.cat([row, row]),
    "nothing": lambda _: None,
    "complex": lambda row: row * 1j,
    "integers": lambda row: (row * 1e6).long(),
    "booleans": lambda row: row > 0,
    "bytes": lambda row: row.to(torch.uint8),
    "overflow of float16": lambda row: (row * 0 + 1e6).half(),
    "sparse": lambda row: row.to_sparse(),
    "a list": lambda row: row.tolist(),
    "a number": lambda _: 0.5,
    "a string": lambda _: "abc",
    "an array": lambda row: row.numpy(),
    "a dictionary": lambda row: {"row": row},
    "no storage": lambda row: row.to("meta"),
}
CAST: dict[str, Callable[[Tensor], Any]] = {
    "float16": lambda row: row.half(),
    "bfloat16": lambda row: row.bfloat16(),
    "float64": lambda row: row.double(),
    "with a gradient": lambda row: row.clone().requires_grad_(),
}
EXTREME: dict[str, Callable[[Tensor], Tensor]] = {
    "wrong sign": lambda row: -row,
    "wrong sign, large": lambda row: row * -1e4,
    "huge": lambda row: row.sign() * 1e20,
    "largest": lambda row: row.sign() * 3.4e38,
    "largest of one sign": lambda row: row * 0 + 3.4e38,
    "one large number": lambda row: torch.where(torch.arange(row.shape[1]) == 2, 1e30, row),
    "large and alternating": lambda row: 1e15 * (-1.0) ** torch.arange(row.shape[1])[None],
    "denormal": lambda row: row * 0 + 1e-42,
    "zeros": lambda row: row * 0,
    "negative zeros": lambda row: row.abs() * -0.0,
    "equal rows": lambda row: row * 0 + 0.01,
    "equal large rows": lambda row: row * 0 - 1e6,
}
KINDS: tuple[type[Client], ...] = (FedAvg, Ditto, Scaffold, FLAME)


class HostileUpload:
    """Hostile upload: replaces the uploads of hostile clients in one round."""

    replace: Callable[[Tensor], Any] | None = None
    hostile_clients: Collection[int] = (HOSTILE,)
    is_hostile = False

    def end_round(self, client: Any) -> Any:
        """Return the upload; that of a hostile client is replaced."""
        upload = super().end_round(client)  # type: ignore[misc]
        (number,) = client.ids.tolist()
        if self.is_hostile and self.replace is not None and number in self.hostile_clients:
            return self.replace(upload.clone())
        return upload


def list_aggregators() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return functions that make the arguments of a federation, by the aggregator's name."""
    defences: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, kind in inspect.getmembers(pl_fed.aggregators, inspect.isclass):
        if inspect.isabstract(kind) or kind is Chain:
            continue
        if issubclass(kind, Aggregator):
            defences[name] = lambda kind=kind: {"aggregator": kind()}
        elif issubclass(kind, PreAggregator):
            defences[f"Mean after {name}"] = lambda kind=kind: {
                "aggregator": Mean(),
                "pre_aggregators": [kind()],
            }
    return defences


def run(draw: random.Random, _: Path) -> tuple[str, str]:
    """Return an upload and an aggregator, and the fault."""
    aggregator, defence = draw.choice(list(list_aggregators().items()))
    name, replace = draw.choice(list((BROKEN | CAST).items()))
    kind = draw.choice(KINDS)
    description = f"{name} to {aggregator}, {kind.__name__}"
    hostile, report = _run(kind, replace, [COHORT] * ROUNDS, defence())
    if odd := [name for name, tensor in hostile.items() if not tensor.isfinite().all()]:
        return description, f"not finite: {odd}"
    rejected = int(report["train/rejected"])
    if name in CAST:
        return description, "" if rejected == 0 else "an upload of another precision was left out"
    if rejected != 1:
        return description, f"{rejected} uploads were left out"
    others = tuple(client for client in COHORT if client != HOSTILE)
    expected, _ = _run(kind, None, [others, COHORT], defence())
    far = {
        name: float((hostile[name].double() - tensor.double()).abs().max())
        for name, tensor in expected.items()
        if tensor.numel() and not torch.allclose(hostile[name], tensor, TOLERANCE, TOLERANCE)
    }
    return description, f"differs from the run without the client: {far}" if far else ""


def run_extreme(draw: random.Random, _: Path) -> tuple[str, str]:
    """Return uploads and an aggregator, and the fault."""
    aggregator, defence = draw.choice(list(list_aggregators().items()))
    name, replace = draw.choice(list(EXTREME.items()))
    kind = draw.choice(KINDS)
    hostile_clients = draw.sample(COHORT, draw.choice([1, 1, 2, 3]))
    description = f"{name} of {hostile_clients} to {aggregator}, {kind.__name__}"
    settings = {**defence(), "adversary": Adversary(expected=len(hostile_clients))}
    is_robust = False
    try:
        rounds = _build(kind, replace, [COHORT] * ROUNDS, settings, hostile_clients)
        merge = rounds.federation.server.aggregator
        is_robust = len(hostile_clients) <= merge.breakdown(len(COHORT))
        uploads, before = _note_uploads(rounds), rounds.released[0].clone()
        rounds.client.is_hostile = True
        rounds.run(ROUND)
        moved = float((rounds.released[0].double() - before.double()).norm())
        rounds.client.is_hostile = False
        rounds.run(ROUND + 1)
    except ValueError as error:
        is_refused = str(error).startswith("Expected") and not is_robust
        return description, "" if is_refused else str(error)[:300]
    if odd := [name for name, tensor in rounds.tensors().items() if not tensor.isfinite().all()]:
        return description, f"not finite: {odd}"
    lengths = [float(row.norm()) for client, row in uploads[ROUND] if client not in hostile_clients]
    limit = len(COHORT) * max(lengths) * (1 + TOLERANCE)
    if is_robust and moved > limit:
        return description, f"moved the model by {moved:.3g}, more than {limit:.3g}"
    return description, ""


def _note_uploads(rounds: Rounds) -> list[list[tuple[int, Tensor]]]:
    """Return a list to which each round adds the clients and their uploads in float64."""
    training, uploads = rounds.federation.session.rounds.local_training, []
    train = training.run

    def note(*arguments: Any) -> Any:
        trained = train(*arguments)
        uploads.append(list(zip(trained.clients.tolist(), trained.own.uploads.double())))
        return trained

    training.run = note  # type: ignore[method-assign]
    return uploads


def _build(
    kind: type[Client],
    replace: Callable[[Tensor], Any] | None,
    cohorts: list[tuple[int, ...]],
    defence: dict[str, Any],
    hostile_clients: Collection[int] = (HOSTILE,),
) -> Rounds:
    """Return the rounds of a federation with hostile clients."""
    attributes = {"replace": staticmethod(replace), "hostile_clients": hostile_clients}
    hostile = type("Hostile", (HostileUpload, kind), attributes)
    client = make_client(hostile if replace else kind, local_steps=2)
    data = make_data([draw_samples(size, seed) for seed, size in enumerate(SIZES)], root_samples=6)
    return Rounds(client, data, sampler=Cohorts(cohorts), **defence)


def _run(
    kind: type[Client],
    replace: Callable[[Tensor], Any] | None,
    cohorts: list[tuple[int, ...]],
    defence: dict[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors after all rounds, and the report of the hostile round."""
    rounds = _build(kind, replace, cohorts, defence)
    reports = []
    for round in range(ROUNDS):
        rounds.client.is_hostile = round == ROUND
        reports.append(rounds.run(round))
    return rounds.tensors(), reports[ROUND]
