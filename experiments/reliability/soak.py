"""Soak: memory, open files and threads do not grow with the rounds."""

import os
import random
import threading
from pathlib import Path

from experiments.reliability.federations import (
    ALGORITHMS,
    Rounds,
    draw_samples,
    make_client,
    make_data,
)
from pl_fed.samplers import Uniform

CLIENTS, WARM_UP, ROUNDS = 12, 100, 300
MOST = 2_000_000  # bytes: 10 KB a round


def run(draw: random.Random, _: Path) -> tuple[str, str]:
    """Return an algorithm, and the resources that grew."""
    name = draw.choice(list(ALGORITHMS))
    engine, chunk_size = draw.choice([("one_by_one", 1), ("stacked", 4)])
    data = make_data([draw_samples(6, seed) for seed in range(CLIENTS)])
    client = make_client(ALGORITHMS[name])
    rounds = Rounds(client, data, engine, chunk_size, sampler=Uniform(4))
    for round in range(WARM_UP):
        rounds.run(round)
    before = _measure()
    for round in range(WARM_UP, ROUNDS):
        rounds.run(round)
    memory, files, threads = (after - own for after, own in zip(_measure(), before))
    grew = []
    if memory > MOST:
        grew.append(f"{memory / 1e6:.1f} MB in {ROUNDS - WARM_UP} rounds")
    if files > 0:
        grew.append(f"{files} open files")
    if threads > 0:
        grew.append(f"{threads} threads")
    return f"{name}, {engine}", ", ".join(grew)


def _measure() -> tuple[int, int, int]:
    """Return the resident memory in bytes, and the numbers of open files and threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return memory, len(os.listdir("/proc/self/fd")), threading.active_count()
