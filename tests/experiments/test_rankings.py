"""Verdicts on the papers' rankings, and the committed pages that show them."""

from pathlib import Path

import pytest
import torch
from scipy import stats

from experiments.ditto import draws
from experiments.ditto import rankings as ditto_rankings
from experiments.ditto import report as ditto_report
from experiments.ditto.results import Results, choose_lam
from experiments.ditto.run import COHORT, TABLES, byzantine, ditto
from experiments.evidence import (
    NOISE,
    REVERSED,
    SUPPORTED,
    Pairs,
    count_same_signs,
    count_verdicts,
    draw_cohort,
    judge,
    judge_groups,
    tabulate_rankings,
)
from experiments.flame import figures, rankings
from experiments.flame import report as flame_report
from experiments.flame.results import Results as FlameResults
from pl_fed.samplers import BySize

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
    difference, p_value = ditto_rankings.Unpaired([], tuple(means), tuple(stds), 5, None).test
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
            run = {"condition": "clean", "method": ditto(lam), "seed": seed}
            fedavg = 0.3 + int(seed) / 10
            row = {"global_accuracy_weighted": fedavg, "personal_accuracy_weighted": 0.55}
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
    groups = ditto_rankings.pair_methods(
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


@pytest.mark.slow
def test_clients_of_table_draws_take_part_as_often_as_cohorts_have_places():
    for table, config in TABLES.items():
        counts = draws.count_table_draws(table, 0)
        assert counts.sum() == COHORT * config["trainer"]["max_epochs"]
        assert counts.min() > 0
    assert draws.describe_draws("vehicle", ["0", "1"]).startswith(
        "**Clients that never took part: 0 of 23 with each of the 2 seeds.**"
    )


def test_draws_repeat_the_cohorts_of_the_notes():
    """The notes on the smaller federation count the attackers of its cohorts."""
    sizes = draws.read_sizes("fashion_small")
    attackers = {*byzantine("fashion_small", 0.2)}
    counts = [
        len(attackers & {*draw_cohort(BySize(COHORT), len(sizes), round, 0, sizes).tolist()})
        for round in range(1000)
    ]
    assert counts[-1] == 5
    assert counts.count(5) == 27
    assert sum(count > 5 for count in counts) == 4


@pytest.mark.slow
def test_committed_sizes_are_those_of_the_data(real_data):
    if not (real_data and (Path(real_data) / "Vehicle").is_dir()):
        pytest.skip("PL_FED_DATA names no folder with Vehicle")
    assert draws.measure_sizes("vehicle", 0) == draws.read_sizes("vehicle").tolist()


def test_flame_is_compared_with_both_dittos_by_the_papers_only_one():
    setting, columns = "mnist/label_q2", [("FLAME PM", "Ditto PM"), ("FLAME PM", "pFedMe PM")]
    rows, clients = [], []
    for method, accuracies in (("FLAME", (0.9, 0.8)), ("Ditto", (0.95, 0.9))):
        for seed, accuracy in enumerate(accuracies):
            row = {"setting": setting, "method": method, "seed": str(seed)}
            rows.append({**row, "personal_accuracy": str(accuracy)})
            clients += [{**row, "personal_accuracy": str(accuracy + c)} for c in (0.01, -0.01)]
    paper = [
        {"setting": setting, "column": "FLAME PM", "mean": "0.9"},
        {"setting": setting, "column": "Ditto PM", "mean": "0.7"},
    ]
    groups = rankings.pair_columns(FlameResults(rows, clients), paper, columns)
    assert list(groups) == ["FLAME PM − Ditto PM"], "pFedMe has no runs"
    (pair,) = groups["FLAME PM − Ditto PM"]
    assert pair.names == ["FLAME PM − Ditto PM", "MNIST: label skew, 2 classes"]
    assert (pair.first, pair.second) == ([0.9, 0.8], [0.95, 0.9])
    assert pair.second_clients == pytest.approx([0.96, 0.94, 0.91, 0.89])
    assert pair.paper == pytest.approx(0.2)


def test_curves_with_more_clients_per_round_leave_out_fewer():
    counts = figures.count_draws_of_curves()
    assert [int(draws.sum()) for draws in counts] == [300, 900, 1500]
    absent = [int((draws == 0).sum()) for draws in counts]
    assert absent[0] > absent[1] >= absent[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "vehicle" else ())
        for name in ditto_report.BANDS
    ],
)
def test_ditto_pages_show_the_current_tables(name):
    """The test fails for new rows: run python -m experiments.ditto.report with the table."""
    assert (ditto_report.HERE / name / "table.md").read_text() == ditto_report.page(name)


@pytest.mark.slow
def test_flame_page_shows_the_current_tables():
    """The test fails for new rows: run python -m experiments.flame.report."""
    assert (flame_report.HERE / "table3.md").read_text() == flame_report.page()
