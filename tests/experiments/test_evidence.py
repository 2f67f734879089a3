"""Cohorts that follow from a seed."""

import csv

import pytest
import torch
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from experiments.evidence import count_draws, draw_cohort
from experiments.grid import build_trainer
from pl_fed.callbacks import PerClient
from pl_fed.clients import Ditto
from pl_fed.samplers import BySize, Uniform


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Uniform(2), BySize(2)])
def test_cohorts_are_those_of_a_run(tmp_path, sampler):
    rounds, seed = 4, 3
    data = shared_out(classes([8, 8, 8, 8, 8, 8, 40]), test_fraction=0.25)
    federation = pl_fed.Federation(sampler, seed=seed)
    trainer = build_trainer(federation, str(tmp_path), rounds, [PerClient(federation, tmp_path)])
    client = seeded(lambda: Ditto(mlp(), optimizer=sgd(0.1)))
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    with (tmp_path / "per_client.csv").open() as file:
        taken = [int(row["rounds"]) for row in csv.DictReader(file)]
    sizes = data.clients.train.sizes
    assert count_draws(sampler, 7, rounds, seed, sizes).tolist() == taken
    assert draw_cohort(sampler, 7, rounds - 1, seed, sizes).shape == torch.Size([2])
    by_number = count_draws(sampler, 7, rounds, seed).tolist()
    assert (by_number == taken) == isinstance(sampler, Uniform)
