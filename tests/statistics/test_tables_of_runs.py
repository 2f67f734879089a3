"""Tables of runs: repeated seeds, pairs by seed and client, diverged and missing runs."""

import math

import numpy as np
import pytest

from pl_fed.statistics import (
    Runs,
    arrange_scores,
    measure_cluster_effect,
    pair_runs,
    paired_t_test,
    resolve_repeated_seeds,
    t_interval,
    wilcoxon_test,
)

NAN = math.nan


def test_repeated_seeds_are_refused_with_their_group():
    runs = Runs(["FedAvg", "Ditto", "Ditto"], [0, 0, 0], [0.5, 0.8, 0.8])
    message = "got 2 rows of seed 0 in group 'Ditto'. Remove the repeated runs, or choose a rule"
    with pytest.raises(ValueError, match=message):
        resolve_repeated_seeds(runs)
    with pytest.raises(ValueError, match=message):
        pair_runs(runs, "FedAvg", "Ditto")
    clients = Runs(["Ditto"] * 2, [0, 0], [0.5, 0.5], clients=[7, 7])
    with pytest.raises(ValueError, match="in group 'Ditto' for client 7"):
        resolve_repeated_seeds(clients)


def test_rules_for_repeated_seeds():
    """The case of a study: three copies of seed 0 and one run of seed 1."""
    runs = Runs(["Ditto"] * 4, [0, 0, 1, 0], [0.8, 0.9, 0.5, 0.7])
    expected = {"mean": [0.8, 0.5], "first": [0.8, 0.5], "last": [0.7, 0.5]}
    for rule, values in expected.items():
        resolved = resolve_repeated_seeds(runs, rule)
        assert resolved.seeds == [0, 1]
        assert resolved.values == pytest.approx(values)
    doubled = t_interval(runs.values)
    honest = t_interval(resolve_repeated_seeds(runs, "mean").values)
    assert honest.high - honest.low > doubled.high - doubled.low
    with pytest.raises(ValueError, match="refuse, mean, first or last but got 'median'"):
        resolve_repeated_seeds(runs, "median")


def test_one_run_per_seed_stays_the_same_bit_for_bit():
    runs = Runs(["b", "a"], [3, 3], [0.1, 0.2], clients=["x", "y"])
    resolved = resolve_repeated_seeds(runs, "mean")
    assert (resolved.groups, resolved.seeds) == (["b", "a"], [3, 3])
    assert (resolved.values, resolved.clients) == ([0.1, 0.2], ["x", "y"])


def test_pairs_are_matched_by_seed_and_count_the_incomplete_ones():
    runs = Runs(
        ["Ditto", "Ditto", "Ditto", "FedAvg", "FedAvg", "FedAvg"],
        [2, 0, 1, 0, 3, 2],
        [0.9, 0.7, 0.8, 0.5, 0.1, 0.6],
    )
    pairs = pair_runs(runs, "Ditto", "FedAvg")
    assert pairs.seeds == (2, 0)
    assert pairs.differences.tolist() == [0.3, 0.2]
    assert (pairs.incomplete, pairs.diverged) == (2, 0)
    assert pairs.average_clients().differences.tolist() == [0.3, 0.2]


def test_pairs_by_client_become_pairs_by_seed():
    runs = Runs(
        ["a"] * 5 + ["b"] * 5,
        [0, 0, 1, 1, 1] * 2,
        [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        clients=[0, 1, 0, 1, 2] * 2,
    )
    pairs = pair_runs(runs, "a", "b")
    assert pairs.clients == (0, 1, 0, 1, 2)
    assert pairs.differences.tolist() == [1.0, 2.0, 2.0, 3.0, 4.0]
    by_seed = pairs.average_clients()
    assert (by_seed.seeds, by_seed.clients) == ((0, 1), None)
    assert by_seed.first.tolist() == [1.5, 4.0]
    assert by_seed.differences.tolist() == [1.5, 3.0]


def test_diverged_runs_are_refused_left_out_or_given_a_number():
    runs = Runs(["a", "a", "a", "b", "b", "b"], [0, 1, 2] * 2, [0.9, NAN, 0.7, 0.5, 0.6, math.inf])
    message = "got nan for seed 1 of group 'a', as of a run that diverged. Set `diverged` to"
    with pytest.raises(ValueError, match=message):
        pair_runs(runs, "a", "b")
    pairs = pair_runs(runs, "a", "b", diverged="leave_out")
    assert (pairs.seeds, pairs.diverged) == ((0,), 2)
    pairs = pair_runs(runs, "a", "b", diverged=0.1)
    assert pairs.first.tolist() == [0.9, 0.1, 0.7]
    assert pairs.second.tolist() == [0.5, 0.6, 0.1]
    for number in (NAN, -math.inf):
        with pytest.raises(ValueError, match="`diverged` to be a finite number"):
            pair_runs(runs, "a", "b", diverged=number)
    with pytest.raises(ValueError, match="refuse, leave_out or a number but got 'drop'"):
        pair_runs(runs, "a", "b", diverged="drop")
    with pytest.raises(ValueError, match="a seed on which no run diverged"):
        pair_runs(Runs(["a", "b"], [0, 0], [NAN, 1.0]), "a", "b", diverged="leave_out")


def test_mean_of_a_repeated_seed_stays_diverged():
    runs = Runs(["a", "a"], [0, 0], [NAN, 0.5])
    assert math.isnan(resolve_repeated_seeds(runs, "mean").values[0])


def test_scores_of_all_groups_on_common_seeds():
    runs = Runs(
        ["a", "a", "b", "b", "c", "c", "c"],
        [0, 1, 1, 0, 0, 1, 2],
        [0.1, 0.2, 0.4, 0.3, 0.5, NAN, 0.7],
    )
    scores = arrange_scores(runs, diverged=-math.inf)
    assert (scores.groups, scores.seeds, scores.incomplete) == (("a", "b", "c"), (0, 1), 1)
    assert scores.values.tolist() == [[0.1, 0.3, 0.5], [0.2, 0.4, -math.inf]]
    assert arrange_scores(runs, ["b", "a"]).values.tolist() == [[0.4, 0.2], [0.3, 0.1]]
    complete = arrange_scores(runs, diverged="leave_out")
    assert (complete.seeds, complete.diverged) == ((0,), 1)
    with pytest.raises(ValueError, match="seed 1 of group 'c'"):
        arrange_scores(runs)


def test_scores_are_means_over_clients():
    runs = Runs(["a"] * 3, [0, 0, 1], [1.0, 2.0, 5.0], clients=[0, 1, 0])
    assert arrange_scores(runs).values.tolist() == [[1.5], [5.0]]


def test_impossible_tables_are_refused():
    with pytest.raises(ValueError, match="equal lengths above 0 but got 1 groups, 2 seeds, 1 val"):
        Runs(["a"], [0, 1], [1.0])
    with pytest.raises(ValueError, match="0 groups, 0 seeds, 0 values, 0 clients"):
        Runs([], [], [], [])
    runs = Runs(["a", "b"], [0, 1], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"a group of the table \('a', 'b'\) but got 'c'"):
        pair_runs(runs, "a", "c")
    with pytest.raises(ValueError, match="'a' and 'b' to have equal seeds but they share none"):
        pair_runs(runs, "a", "b")
    with pytest.raises(ValueError, match="a seed that all of 2 groups have but got none"):
        arrange_scores(runs)


@pytest.mark.slow
def test_columns_of_a_data_frame_are_read_by_position():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"group": ["a", "b"], "seed": [0, 0], "value": [0.9, 0.4]}, [5, 9])
    pairs = pair_runs(Runs(frame["group"], frame["seed"], frame["value"]), "a", "b")
    assert pairs.differences.tolist() == [0.5]


def test_cluster_effect_of_independent_and_of_equal_clients():
    seeds = np.repeat(np.arange(40), 10)
    generator = np.random.default_rng(0)
    independent = measure_cluster_effect(generator.normal(size=400), seeds.tolist())
    assert abs(independent.correlation) < 0.06
    assert independent.effective_pairs > 250
    shared = generator.normal(size=40)[seeds]
    equal = measure_cluster_effect(shared, seeds.tolist())
    assert equal.correlation == pytest.approx(1.0)
    assert equal.design_effect == pytest.approx(10.0)
    assert equal.effective_pairs == pytest.approx(40.0)
    half = measure_cluster_effect(shared + generator.normal(size=400), seeds.tolist())
    assert half.correlation == pytest.approx(0.5, abs=0.15)


def test_cluster_effect_of_unequal_seeds_is_the_analysis_of_variance():
    """By hand: means 2 and 6 of 3 and 2 clients; between 19.2, within 4 / 3, typical size 2.4."""
    effect = measure_cluster_effect([1.0, 2.0, 3.0, 5.0, 7.0], [-1, -1, -1, -2, -2])
    assert effect.correlation == pytest.approx((19.2 - 4 / 3) / (19.2 + 1.4 * 4 / 3))
    assert effect.design_effect == pytest.approx(1 + (13 / 5 - 1) * effect.correlation)
    assert measure_cluster_effect([2.0] * 4, [0, 0, 1, 1]).correlation == 0.0


@pytest.mark.parametrize(
    ("values", "seeds", "message"),
    [
        ([1.0, 2.0], [0], "equal lengths but got 2 and 1"),
        ([1.0, 2.0], [0, 0], "at least two seeds"),
        ([1.0, 2.0], [0, 1], "a seed with at least two clients"),
    ],
)
def test_clusters_need_seeds_and_clients(values, seeds, message):
    with pytest.raises(ValueError, match=message):
        measure_cluster_effect(values, seeds)


@pytest.mark.slow
def test_dependent_clients_mislead_a_test_over_clients_and_not_over_seeds():
    """Why clients are reduced to seeds: 6 seeds of 20 clients that share the chance of the seed."""
    generator, over_clients, over_seeds = np.random.default_rng(0), 0, 0
    groups, seeds = ["a"] * 120 + ["b"] * 120, np.tile(np.repeat(np.arange(6), 20), 2).tolist()
    clients = np.tile(np.arange(20), 12).tolist()
    for _ in range(200):
        shared = np.repeat(generator.normal(size=6), 20)
        values = [*(shared + generator.normal(size=120)), *np.zeros(120)]
        pairs = pair_runs(Runs(groups, seeds, values, clients), "a", "b")
        by_seed = pairs.average_clients()
        over_clients += wilcoxon_test(pairs.first, pairs.second).p_value <= 0.05
        over_seeds += paired_t_test(by_seed.first, by_seed.second).p_value <= 0.05
    assert over_clients / 200 > 0.3
    assert over_seeds / 200 < 0.11


def test_number_for_diverged_clients_counts_for_each_of_them():
    clients = [*range(10)] * 2
    values = [*[0.9] * 9, math.nan, *[0.5] * 10]
    runs = Runs(["a"] * 10 + ["b"] * 10, [0] * 20, values, clients)
    scores = arrange_scores(runs, diverged=0.1)
    assert scores.values.tolist() == [[pytest.approx(0.82), 0.5]]
    pairs = pair_runs(runs, "a", "b", diverged=0.1).average_clients()
    assert pairs.first.tolist() == [pytest.approx(0.82)]
