"""Intervals, paired tests and the cohorts that follow from a seed."""

import csv
import math

import pytest
import torch
from scipy import stats
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from experiments.evidence import (
    count_draws,
    draw_cohort,
    interval,
    paired_p_value,
    paired_rank_p_value,
)
from experiments.grid import build_trainer
from pl_fed.callbacks import PerClient
from pl_fed.clients import Ditto
from pl_fed.samplers import Uniform


def test_interval_of_three_seeds_is_students():
    found = interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)  # the 0.975 quantile of t with 2 degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    assert found.text(sign=True) == "+2.00 [−0.48, +4.48]"


def test_single_seed_has_no_interval():
    assert interval([1.5]).text() == "1.50"


def test_paired_p_values_are_scipys():
    first, second = [0.91, 0.93, 0.96, 0.99], [0.90, 0.91, 0.97, 0.95]
    assert paired_p_value(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert paired_rank_p_value(first, second) == stats.wilcoxon(first, second).pvalue


@pytest.mark.parametrize(("second", "p_value"), [([1.0, 2.0], 1.0), ([0.0, 1.0], 0.0)])
def test_equal_differences_need_no_distribution(second, p_value):
    assert paired_p_value([1.0, 2.0], second) == p_value


def test_one_seed_gives_no_paired_p_value():
    assert math.isnan(paired_p_value([1.0], [2.0]))
    assert paired_rank_p_value([1.0, 2.0], [1.0, 2.0]) == 1.0


def test_different_numbers_of_values_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_p_value([1.0, 2.0], [1.0])


def test_cohorts_are_those_of_a_run(tmp_path):
    sampler, rounds, seed = Uniform(2), 4, 3
    data = shared_out(classes([8] * 7), test_fraction=0.25)
    federation = pl_fed.Federation(sampler, seed=seed)
    trainer = build_trainer(federation, str(tmp_path), rounds, [PerClient(federation, tmp_path)])
    client = seeded(lambda: Ditto(mlp(), optimizer=sgd(0.1)))
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    with (tmp_path / "per_client.csv").open() as file:
        taken = [int(row["rounds"]) for row in csv.DictReader(file)]
    assert count_draws(sampler, 7, rounds, seed).tolist() == taken
    assert draw_cohort(sampler, 7, rounds - 1, seed).shape == torch.Size([2])
