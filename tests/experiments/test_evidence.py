"""Intervals, paired tests and the cohorts that follow from a seed."""

import csv
import itertools
import math

import pytest
import torch
from scipy import stats
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from experiments.evidence import (
    Pairs,
    correct_by_holm,
    count_draws,
    count_tests,
    draw_cohort,
    format_p_value,
    interval,
    paired_p_value,
    paired_rank_p_value,
    rank_direction,
    swap_p_value,
    tabulate_pairs,
)
from experiments.grid import build_trainer
from pl_fed.callbacks import PerClient
from pl_fed.clients import Ditto
from pl_fed.samplers import BySize, Uniform


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


def test_equal_steps_of_accuracies_stay_ties():
    """0.3 − 0.2 and 0.2 − 0.1 differ by a rounding error, which must not decide about ranks."""
    first, second = [0.3, 0.2, 0.1, 0.9, 0.8], [0.2, 0.1, 0.2, 0.6, 0.4]
    exact = stats.wilcoxon([1, 1, -1, 3, 4]).pvalue
    assert paired_rank_p_value(first, second) == exact
    assert paired_p_value([0.3, 0.2], [0.2, 0.1]) == 0.0


def test_holms_correction_multiplies_by_the_number_of_remaining_tests():
    nan = math.nan
    corrected = correct_by_holm([0.01, nan, 0.04, 0.03, 0.005])
    assert corrected[:1] + corrected[2:] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert math.isnan(corrected[1])
    assert correct_by_holm([0.9, 0.8]) == [1.0, 1.0]


def test_ranks_can_point_to_the_other_side_than_the_mean():
    """Seven clients gain a little and one loses much: W⁺ = 28 and W⁻ = 8."""
    first, second = [0.51] * 7 + [0.0], [0.5] * 7 + [0.9]
    assert rank_direction(first, second) == 7 * 4 - 8
    assert rank_direction(second, first) == 8 - 7 * 4
    assert rank_direction(first, first) == 0
    pair = Pairs([], [0.4], [0.5], first, second, paper=-0.1)
    assert pair.clients_up_and_down == "88 % / 12 %"


def deviation(values):
    return values.std(-1, correction=0)


def test_swaps_are_those_of_the_full_enumeration():
    first = torch.tensor([[0.1, 0.9, 0.4], [0.7, 0.2, 0.2]], dtype=torch.float64)
    second = torch.tensor([[0.5, 0.6, 0.2], [0.4, 0.8, 0.3]], dtype=torch.float64)
    observed = abs(float((deviation(first) - deviation(second)).mean()))
    swaps = torch.tensor(list(itertools.product([True, False], repeat=6))).view(-1, 2, 3)
    swapped = deviation(first.where(swaps, second)) - deviation(second.where(swaps, first))
    exact = float((swapped.mean(-1).abs() >= observed - 1e-10).double().mean())
    assert 0.05 < exact < 0.95
    found = swap_p_value(first, second, deviation, draws=20_000)
    assert found == pytest.approx(exact, abs=0.02)
    assert swap_p_value(second, first, deviation, draws=20_000) == pytest.approx(exact, abs=0.02)


def test_swaps_of_means_flip_signs():
    """Five equal steps: of 32 swaps, two are as extreme."""
    first = torch.arange(5, dtype=torch.float64)[None]
    found = swap_p_value(first + 1, first, lambda values: values.mean(-1))
    assert found == pytest.approx(2 / 32, abs=0.01)
    assert swap_p_value(first, first, deviation) == 1.0
    with pytest.raises(ValueError, match="equal shape"):
        swap_p_value(first, first[:, 1:], deviation)


def test_swaps_are_about_uniform_without_a_difference():
    draw = torch.Generator().manual_seed(0)
    p_values = [
        swap_p_value(
            *torch.randn(2, 2, 20, generator=draw, dtype=torch.float64), deviation, draws=199
        )
        for _ in range(200)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize(
    ("p_value", "text"), [(math.nan, "–"), (0.0009, "< 0.001"), (0.004, "0.004"), (0.25, "0.25")]
)
def test_p_values_have_at_most_three_decimals(p_value, text):
    assert format_p_value(p_value) == text


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
