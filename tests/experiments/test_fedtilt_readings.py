"""FedTilt's runs read in four ways: dealt errors, the last cohort, agreement and paired tests."""

import math

import pytest
import torch

from experiments.evidence import draw_cohort
from experiments.fedtilt import agreement
from experiments.fedtilt.paper import METRICS, Figures
from experiments.fedtilt.readings import (
    NUM_CLIENTS,
    READINGS,
    ROUNDS,
    SAMPLER,
    TEN_GROUPS,
    ClientResults,
    count_never_drawn,
    deal_errors,
    draw_cohort_figures,
    measure_cohort_noise,
    rate_cohorts_in_band,
)
from experiments.fedtilt.run import OWN_TENTH

IMAGES = 60


def make_rows(setting, method, seed, errors, **others):
    """Returns rows of clients.csv; all models of a client make the same errors."""
    rows = []
    for client, wrong in enumerate(errors):
        row = {"setting": setting, "split": OWN_TENTH, "method": method, "seed": str(seed)}
        row |= {"client": str(client), "rounds": "1", "test_samples": str(IMAGES)}
        for model in ("global", "personal", "stepped"):
            row[f"{model}_accuracy"] = str(1 - wrong / IMAGES)
            row[f"{model}_class_std"] = str(wrong / IMAGES / 4)
        rows.append(row | others)
    return rows


def spread_errors(shift=0):
    """Returns 0 to 3 errors of each client, the more the higher its id is by modulo 4."""
    return [(client + shift) % 4 for client in range(NUM_CLIENTS)]


@pytest.mark.parametrize(
    ("wrong", "std"),
    [(0, 0.0), (1, (9 / 36) ** 0.5 / 10), (59, (9 / 36) ** 0.5 / 10), (60, 0.0)],
)
def test_dealt_errors_have_exact_spreads(wrong, std):
    """One of 60 images in ten groups: one accuracy is 5/6 and nine are 1, in any deal."""
    stds = deal_errors(torch.tensor([wrong]), torch.tensor([IMAGES]), 10, seed=0)
    assert float(stds) == pytest.approx(std, abs=1e-12)


def test_dealt_errors_are_hypergeometric():
    """The mean of s² over deals is p(1 − p)/m · (n − m)/(n − 1), groups of m of n images."""
    errors, sizes = torch.full((300,), 9), torch.full((300,), IMAGES)
    squares = torch.stack([deal_errors(errors, sizes, 10, seed).square() for seed in range(4)])
    expected = 0.15 * 0.85 / 6 * 54 / 59
    assert float(squares.mean()) == pytest.approx(expected, rel=0.04)


def test_deal_depends_on_seed_and_client_alone():
    errors, sizes = torch.tensor([5, 9, 5]), torch.tensor([66, 69, 66])
    stds = deal_errors(errors, sizes, 10, seed=1)
    assert torch.equal(stds, deal_errors(errors, sizes, 10, seed=1))
    assert torch.equal(stds[:1], deal_errors(errors[:1], sizes[:1], 10, seed=1))
    many = torch.full((30,), 5), torch.full((30,), 66)
    assert len(deal_errors(*many, 10, seed=1).unique()) > 1, "clients differ"
    assert not torch.equal(deal_errors(*many, 10, seed=1), deal_errors(*many, 10, seed=2))


def test_figures_of_a_reading_are_those_of_its_clients():
    rows = make_rows("mnist/clean", "FedTilt", 3, spread_errors())
    (run,) = ClientResults(rows[::-1]).select("mnist/clean", "FedTilt")
    figures = run.figures("personal", READINGS[0]).tolist()
    spread = 100 / IMAGES * (5 / 4) ** 0.5  # of 0, 1, 2, 3
    assert figures == pytest.approx([97.5, spread, 2.5 / 4, spread / 4])
    cohort = draw_cohort(SAMPLER, NUM_CLIENTS, ROUNDS - 1, 3)
    errors = torch.tensor(spread_errors(), dtype=torch.float64)[cohort]
    last = run.figures("personal", READINGS[2]).tolist()
    assert len(cohort) == 10
    assert last[0] == pytest.approx(100 - 100 * float(errors.mean()) / IMAGES)
    assert last[3] == pytest.approx(25 * float(errors.std(correction=0)) / IMAGES)


def test_only_the_split_of_own_samples_is_read():
    rows = make_rows("mnist/clean", "Ditto", 0, [1, 2], split="whole classes")
    assert not ClientResults(rows).runs
    assert agreement.describe_own(ClientResults([])) == ""


def test_clients_that_are_never_drawn():
    assert [count_never_drawn(seed) for seed in (0, 1)] == [0, 1]


def test_random_cohorts_leave_out_untrained_clients():
    rows = make_rows("mnist/clean", "FedTilt", 0, [1] * NUM_CLIENTS)
    for row in rows[:40]:
        row |= {"personal_accuracy": "0.1", "rounds": "0"}
    (run,) = ClientResults(rows).select("mnist/clean", "FedTilt")
    drawn = draw_cohort_figures(run, draws=20)
    torch.testing.assert_close(drawn[:, 0], torch.full((20,), 100 - 100 / 60).double())
    paper = Figures(99.25, 1.27, 4.37, 4.23)
    assert rate_cohorts_in_band(run, paper, band=5.0, draws=20) == 1.0
    assert rate_cohorts_in_band(run, paper, band=0.5, draws=20) == 0.0
    assert measure_cohort_noise([run], draws=20)["accuracy"] == pytest.approx(0)


def test_agreement_is_counted_by_data_set():
    rows = make_rows("mnist/clean", "FedTilt", 0, spread_errors())  # 97.5 %, the paper's 98.53
    rows += make_rows("fmnist/clean", "FedTilt", 0, [0] * NUM_CLIENTS)  # 100 %, the paper's 96.35
    compared = agreement.compare(ClientResults(rows), TEN_GROUPS)
    assert list(compared) == [("mnist/clean", "FedTilt"), ("fmnist/clean", "FedTilt")]
    count = agreement.count_agreeing
    assert count(compared, "mnist", ["FedTilt"], ["accuracy"]) == "1 of 1"
    assert count(compared, "fmnist", ["FedTilt"], ["accuracy", "accuracy_std"]) == "1 of 2"
    assert count(compared, "mnist", ["Ditto"], METRICS) == "–"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Precision loss")  # equal differences of σ
def test_pairs_are_runs_of_equal_seeds():
    results = ClientResults(
        row
        for seed in range(3)
        for row in make_rows("mnist/clean", "FedTilt", seed, spread_errors(seed))
        + make_rows("mnist/clean", "Ditto", seed + 1, [4 + seed] * NUM_CLIENTS)
    )
    tests = agreement.compare_pairs(results)
    table = agreement.tabulate_pairs(tests)
    assert [pair[0].seed for pair in results.pairs("mnist/clean", "FedTilt", "Ditto")] == [1, 2]
    accuracy = next(line for line in table.splitlines() if "| accuracy |" in line)
    p_value = 2 * math.atan(1 / 6) / math.pi  # of t = 6 with one degree of freedom
    assert accuracy == (  # differences 4.17 and 5.83; two of four tests have equal differences
        "| MNIST, clean: FedTilt − Ditto | accuracy | −0.72 | +5.00 [−5.59, +15.59] | 2"
        f" | {2 * p_value:.2f} | < 0.001 |"
    )
    assert len(tests) == len(METRICS), "there are no runs of FedAvg"
    assert agreement.count_disadvantages(tests, "FedTilt") == "2 of 4"
    assert agreement.count_small([0.001, 0.02, math.nan]) == "2 of 2"
    assert agreement.count_small([0.03, 0.04]) == "0 of 2"


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_report_needs_no_complete_runs(seeds):
    rows = []
    for seed in range(seeds):
        rows += make_rows("mnist/clean", "FedTilt", seed, spread_errors(seed))
        rows += make_rows("mnist/clean", "FedAvg", seed, spread_errors(seed))
    rows += make_rows("fmnist/gaussian", "Ditto", 0, spread_errors())
    text = agreement.describe_own(ClientResults(rows))
    assert f"({2 * seeds + 1} runs; seeds: {', '.join(map(str, range(seeds)))})" in text
    assert "| Fashion-MNIST: all clients, ten groups | – | – | – |" in text
    assert text.count("| MNIST, clean: FedTilt, no training | 98.53 |") == len(READINGS)
    assert "nan" not in text
