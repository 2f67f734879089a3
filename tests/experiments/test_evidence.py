"""Tables of paired comparisons, and the cohorts that follow from a seed."""

import csv

import pytest
import torch
from scipy import stats
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from experiments.evidence import (
    Pairs,
    count_draws,
    count_tests,
    draw_cohort,
    format_interval,
    tabulate_pairs,
)
from experiments.grid import build_trainer
from pl_fed.callbacks import PerClient
from pl_fed.clients import Ditto
from pl_fed.samplers import BySize, Uniform


def test_ranks_can_point_to_the_other_side_than_the_mean():
    """Seven clients gain a little and one loses much: W⁺ = 28 and W⁻ = 8."""
    first, second = [0.51] * 7 + [0.0], [0.5] * 7 + [0.9]
    pair = Pairs([], [0.4], [0.5], first, second, paper=-0.1)
    assert pair.clients_up_and_down == "88 % / 12 %"
    assert pair.client_test.statistic == 7 * 4 - 8
    assert pair.difference.estimate == -0.1


@pytest.mark.parametrize("number", [13, 14, 50, 51])
@pytest.mark.parametrize("ties", ["none", "ties", "zero"])
def test_tests_over_clients_are_those_of_the_committed_tables(number, ties):
    """They were made by scipy 1.17, which chooses between exact and approximate p-values."""
    draw = torch.Generator().manual_seed(number)
    values = (torch.randn(number, generator=draw).double() + 0.4).round(decimals=6)
    values = (values.round(decimals=1) if ties == "ties" else values).tolist()
    values[0] = 0.0 if ties == "zero" else values[0]
    test = Pairs([], [1.0], [0.0], values, [0.0] * number).client_test
    assert test.exact == (number <= (50 if ties == "none" else 13))
    if not test.exact:
        assert test.p_value == pytest.approx(stats.wilcoxon(values, method="asymptotic").pvalue)
    elif ties == "none":
        assert test.p_value == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)


def test_values_of_no_seed_are_a_dash():
    assert format_interval([]) == "–"
    assert format_interval([0.5]) == "0.5000"


def test_table_of_pairs_corrects_seeds_and_clients_separately():
    clients = [0.9] * 8, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    pairs = [
        Pairs(["Ditto − FedAvg"], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]),
        Pairs(["Ditto − local"], [0.5], [0.25], *clients),
        Pairs(["Ditto − Ditto"], [0.5, 0.5], [0.5, 0.5], *clients),
    ]
    p_value = 2 * stats.ttest_1samp([1.0, 2.0, 3.0], 0).pvalue
    over_clients = f"8 | 100 % / 0 % | {2 * stats.wilcoxon([1, 2, 3, 4, 5, 6, 7, 8]).pvalue:.3f}"
    assert tabulate_pairs(["methods"], pairs, digits=2).splitlines()[2:] == [
        f"| Ditto − FedAvg | +2.00 [−0.48, +4.48] | 3 | {p_value:.2f} | – | – | – |",
        f"| Ditto − local | +0.25 | 1 | – | {over_clients} |",
        f"| Ditto − Ditto | +0.00 [+0.00, +0.00] | 2 | 1.00 | {over_clients} |",
    ]
    assert count_tests(pairs) == "All 3 comparisons: 2 tests over seeds, 2 tests over clients"
    assert "clients" not in tabulate_pairs(["methods"], pairs[:1])
    assert count_tests(pairs[:1]) == "All 1 comparisons: 1 tests over seeds"


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
