"""Verdicts on the papers' rankings, and the committed pages that show them."""

import pytest
import torch
from scipy import stats

from experiments.ditto import page as ditto_page
from experiments.ditto.results import HERE, Results, choose_lam, name_ditto
from experiments.ditto.studies import COHORT, draw_byzantine
from experiments.flame import page as flame_page
from experiments.flame.results import Results as FlameResults
from experiments.papers import Comparison, format_interval, format_mean_and_std, markdown
from experiments.rankings import (
    NOISE,
    REVERSED,
    SUPPORTED,
    Pairs,
    count_same_signs,
    count_tests,
    count_verdicts,
    judge,
    judge_groups,
    tabulate_pairs,
    tabulate_rankings,
)

ZEROS = [0.0] * 3


@pytest.mark.parametrize(
    ("difference", "p_value", "paper", "verdict"),
    [
        (0.1, 0.049, 0.2, SUPPORTED),
        (-0.1, 0.049, 0.2, REVERSED),
        (-0.1, 0.049, -0.2, SUPPORTED),
        (0.1, 0.051, 0.2, NOISE),
        (0.1, 0.001, 0.3 - 0.2 - 0.1, ""),  # no order in the paper, up to rounding
        (0.1, 0.001, None, ""),
        (0.1, float("nan"), 0.2, ""),
    ],
)
def test_verdict_needs_a_small_p_value_and_the_papers_order(difference, p_value, paper, verdict):
    assert judge(difference, p_value, paper) == verdict


def test_verdicts_correct_for_all_comparisons_of_all_groups():
    """One test is significant alone, and not among as many that its product with p reaches 0.05."""
    steady = [1.0, 1.1, 1.3]
    p_value = stats.ttest_1samp(steady, 0).pvalue
    assert p_value < 0.025
    group = [Pairs(["a"], steady, ZEROS, paper=1.0)]
    assert judge_groups({"one": group})["one"].seeds == [SUPPORTED]
    others = int(0.05 / p_value)
    many = [Pairs([str(n)], [1.0, -1.0, 0.5], ZEROS, paper=1.0) for n in range(others)]
    verdicts = judge_groups({"one": group, "many": many})
    assert verdicts["one"].seeds == [NOISE]
    assert verdicts["one"].clients == [""]
    assert verdicts["many"].seeds == [NOISE] * others
    assert judge_groups({"one": group, "many": many[:-1]})["one"].seeds == [SUPPORTED]


def test_counts_of_verdicts_and_signs():
    verdicts = [NOISE, SUPPORTED, "", REVERSED, NOISE]
    assert count_verdicts(verdicts) == "1 supported, 2 within noise, 1 reversed"
    assert count_verdicts([""]) == "–"
    assert count_same_signs([0.1, -0.1, 0.1, 0.2], [0.3, 0.1, 0.0, None]) == "1 of 2"
    assert count_same_signs([0.1], [None]) == "–"


def test_mean_of_a_ranking_is_over_comparisons_and_then_over_seeds():
    groups = {
        "Ditto − FedAvg": [
            Pairs(["clean"], [2.0, 2.0, 5.0], ZEROS, paper=1.0),
            Pairs(["attack"], [0.0, 2.0, 1.0], ZEROS, paper=3.0),
            Pairs(["single seed"], [9.0], [0.0], paper=-9.0),
        ]
    }
    p_value = stats.ttest_1samp([1.0, 2.0, 3.0], 0).pvalue
    assert tabulate_rankings(groups, digits=2).splitlines()[2:] == [
        "| Ditto − FedAvg | +2.00 | +2.00 [−0.48, +4.48] |"
        f" {p_value:.3f} | 2 of 3 | 2 within noise |"
    ]


def test_unpaired_comparison_is_welchs():
    first, second = [0.9, 0.8, 0.95, 0.7, 0.85], [0.5, 0.6, 0.7, 0.4, 0.8]
    means, stds = [], []
    for values in (first, second):
        tensor = torch.tensor(values, dtype=torch.float64)
        means.append(float(tensor.mean()))
        stds.append(float(tensor.std(correction=0)))
    difference, p_value = ditto_page.Unpaired([], means, stds, 5, None).test
    welch = stats.ttest_ind(first, second, equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert p_value == pytest.approx(welch.pvalue)
    assert (difference.low, difference.high) == pytest.approx((low, high))


def ditto_rows():
    """Return the rows of two seeds. Client 0 is best with λ = 2; client 1 cannot choose."""
    rows, clients = [], []
    for seed in ("0", "1"):
        for lam, accuracies, losses in (
            (0.1, (0.1, 0.2), (0.9, 0.1)),
            (1.0, (0.5, 0.6), (0.8, 0.9)),
            (2.0, (0.7, 0.8), (0.1, 0.2)),
        ):
            run = {"condition": "clean", "method": name_ditto(lam), "seed": seed}
            fedavg = 0.3 + int(seed) / 10
            row = {"test/global/accuracy_weighted": fedavg, "test/personal/accuracy_weighted": 0.55}
            rows.append({**run, **{name: str(value) for name, value in row.items()}})
            for client, (accuracy, loss) in enumerate(zip(accuracies, losses)):
                own = {"client": client, "test_samples": 10, "val_loss": loss}
                own |= {"accuracy": accuracy, "val_samples": 5 if client == 0 else 1}
                clients.append({**run, **{name: str(value) for name, value in own.items()}})
    return rows, clients


def test_ditto_is_compared_by_each_clients_own_lam():
    results = Results(*ditto_rows())
    chosen = choose_lam(list(results.clients.values())[:3], "clean")
    assert [row["accuracy"] for row in chosen] == ["0.7", "0.6"]
    paper = {("clean", "dynamic_lambda"): (0.9, 0.1), ("clean", "global"): (0.8, 0.2)}
    groups = ditto_page.pair_methods(
        results, paper, ["global", "Ditto, lambda=1", "median"], "accuracy_weighted"
    )
    assert list(groups) == ["FedAvg and Ditto's global model", "Ditto, λ = 1"]
    ((over_fedavg,), (over_fixed,)) = groups.values()
    assert over_fedavg.first == pytest.approx([0.65, 0.65])
    assert over_fedavg.second == pytest.approx([0.3, 0.4])
    assert over_fedavg.paper == pytest.approx(0.1)
    assert not over_fedavg.first_clients
    assert over_fixed.paper is None
    assert over_fixed.first_clients == [0.7, 0.6, 0.7, 0.6]
    assert over_fixed.second_clients == [0.5, 0.6, 0.5, 0.6]


def test_byzantine_clients_are_those_of_the_authors_code():
    """Their seed is 1234567; 20 % of 23 devices are four."""
    assert draw_byzantine(23, 0.2) == [1, 4, 8, 15]
    assert [len(draw_byzantine(23, share)) for share in (0.1, 0.2, 0.5, 0.8)] == [2, 4, 11, 18]
    assert COHORT == 10


def test_flame_is_compared_with_both_dittos_by_the_papers_only_one():
    setting, columns = "mnist/label_q2", [("FLAME PM", "Ditto PM"), ("FLAME PM", "pFedMe PM")]
    labels = {"data": "mnist", "split": "label_q2"}
    rows, clients = [], []
    for method, accuracies in (("FLAME", (0.9, 0.8)), ("Ditto", (0.95, 0.9))):
        for seed, accuracy in enumerate(accuracies):
            row = {**labels, "method": method, "seed": str(seed)}
            rows.append({**row, "test/personal/accuracy": str(accuracy)})
            clients += [{**row, "personal_accuracy": str(accuracy + c)} for c in (0.01, -0.01)]
    paper = [
        {"setting": setting, "column": "FLAME PM", "mean": "0.9"},
        {"setting": setting, "column": "Ditto PM", "mean": "0.7"},
    ]
    groups = flame_page.pair_columns(FlameResults(rows, clients), paper, columns)
    assert list(groups) == ["FLAME PM − Ditto PM"], "pFedMe has no runs"
    (pair,) = groups["FLAME PM − Ditto PM"]
    assert pair.names == ["FLAME PM − Ditto PM", "MNIST: label skew, 2 classes"]
    assert (pair.first, pair.second) == ([0.9, 0.8], [0.95, 0.9])
    assert pair.second_clients == pytest.approx([0.96, 0.94, 0.91, 0.89])
    assert pair.paper == pytest.approx(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "vehicle" else ())
        for name in ditto_page.BANDS
    ],
)
def test_ditto_pages_show_the_current_tables(name):
    """The test fails for new rows: run python -m experiments ditto/NAME --report."""
    assert (HERE / name / "table.md").read_text() == ditto_page.make_page(name)


@pytest.mark.slow
def test_flame_page_shows_the_current_tables():
    """The test fails for new rows: run python -m experiments flame/table3 --report."""
    assert (flame_page.HERE / "table3.md").read_text() == flame_page.make_page()


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


@pytest.mark.parametrize(("band", "agrees"), [(0.021, True), (0.019, False)])
def test_comparison_shows_difference_and_agreement(band, agrees):
    comparison = Comparison(paper=0.9, std=0.01, ours=[0.87, 0.89], band=band)
    assert comparison.difference == pytest.approx(-0.02)
    assert comparison.agrees is agrees
    assert comparison.cells(2) == ["0.90 ± 0.01", "0.88 ± 0.01", f"−0.02 {'✓' if agrees else '✗'}"]
    assert format_mean_and_std([], 2) == "–"
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
