"""Cohorts that follow from a seed, without any training."""

import torch
from torch import Tensor

from experiments.rankings import *  # noqa: F403
from pl_fed.random import generator
from pl_fed.samplers import Sampler


def count_draws(
    sampler: Sampler, num_clients: int, rounds: int, seed: int, sizes: Tensor | None = None
) -> Tensor:
    """Return the number of rounds in which each client takes part, int64 [num_clients].

    They follow from the seed and the sizes alone, without any training.

    Args:
        sampler: The sampler of the run.
        num_clients: Number of clients.
        rounds: Number of rounds of the run.
        seed: The seed of the run.
        sizes: Numbers of training samples, int64 [num_clients], for a sampler that reads them.
    """
    counts = torch.zeros(num_clients, dtype=torch.int64)
    for round in range(rounds):
        counts[draw_cohort(sampler, num_clients, round, seed, sizes)] += 1
    return counts


def draw_cohort(
    sampler: Sampler, num_clients: int, round: int, seed: int, sizes: Tensor | None = None
) -> Tensor:
    """Return the ids of the clients of a round, int64 [cohort]."""
    if sizes is None:
        sizes = torch.ones(num_clients, dtype=torch.int64)
    return sampler.draw_round(round, num_clients, sizes, generator(seed, "cohort", round))
