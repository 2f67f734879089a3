"""Rounds whose cohort is too small for the aggregator: none of it happens, and they are counted."""

import math

import pytest
import torch
from further_cases import covering
from small_federations import VariedCohorts, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test

from pl_fed.aggregators import Aggregator, Bulyan, CenteredClipping, Krum, Mean
from pl_fed.attacks import Fang
from pl_fed.clients import Ditto, FedAvg, Scaffold
from pl_fed.functional.binomial import binomial_probabilities
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.rounds.small_cohorts import SmallCohorts
from pl_fed.samplers import Poisson, Uniform
from pl_fed.types import RoundContext

FULL, SMALL, EMPTY = [*range(8)], [2, 5], []


def make_data():
    return shared_out(classes([5] * 8))


def run(cohorts, client=FedAvg, aggregator=None, rounds=None, **settings):
    """Run a round for each cohort."""
    return run_rounds(
        client(seeded(mlp), optimizer=sgd(0.1), local_steps=2),
        make_data(),
        rounds or len(cohorts),
        sampler=VariedCohorts(*map(list, cohorts)),
        aggregator=aggregator or Bulyan(num_byzantine=1),
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("small", "client"),
    covering([SMALL, EMPTY], [FedAvg, Ditto, Scaffold]),
    ids=[f"small{k}-{name}" for k in range(2) for name in ("FedAvg", "Ditto", "Scaffold")],
)
def test_round_with_too_small_a_cohort_changes_nothing_and_is_counted(client, small):
    """Neither the model nor any state of a client or of the server."""
    before, skipped = run([FULL], client), run([FULL, small], client)
    assert torch.equal(before.w, skipped.w)
    for first, second in ((before.states, skipped.states), (before.server_states,) * 2):
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert "train/small_cohort" not in skipped.reports[0]
    assert skipped.reports[1]["train/small_cohort"] == 1
    assert math.isnan(skipped.reports[1]["train/benign_distance"])
    assert run([FULL, small, FULL], client).w.ne(before.w).any(), "the run goes on"


def test_attackers_that_simulate_the_merge_do_not_end_the_run():
    outcome = run([FULL, SMALL], attack=Fang(), ids=[2])
    assert outcome.reports[1]["train/small_cohort"] == 1


def test_run_ends_with_the_sentence_of_the_aggregator_if_asked():
    with pytest.raises(ValueError, match="`uploads` to have at least 7 rows for Bulyan but got 2"):
        run([FULL, SMALL], small_cohort="raise")
    assert run([FULL, EMPTY], small_cohort="raise").reports[1]["train/small_cohort"] == 1


class NeedsThree(Aggregator):
    """An aggregator of a user: it has a memory, and its own sentence."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def max_byzantine(self, num_uploads):
        return 0

    def forward(self, uploads, weights, context):
        self.calls += 1
        context.note("calls", float(self.calls))
        if len(uploads) < 3:
            raise ValueError("Expected argument `uploads` to be three.")
        return uploads.mean(0)


def test_refused_round_does_not_touch_the_memory_of_the_aggregator():
    reports = run([FULL, SMALL, FULL], aggregator=NeedsThree()).reports
    assert [report.get("train/small_cohort") for report in reports] == [None, 1, None]
    assert [report.get("train/calls") for report in reports] == [1, None, 2]
    assert "train/small_cohort" not in run([SMALL], aggregator=CenteredClipping()).reports[0]


def test_private_round_with_an_empty_cohort_makes_its_noisy_step():
    privacy = DifferentialPrivacy(delta=1e-3, clip_norm=1.0, noise_multiplier=1.0, noise_seed=0)
    settings = {"sampler": Poisson(1e-9), "aggregator": Mean(), "privacy": privacy, "rounds": 1}
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    private = run_rounds(client, make_data(), **settings)
    assert private.reports[0]["train/cohort"] == 0
    assert "train/small_cohort" not in private.reports[0]
    assert private.w.ne(client.row("global").data.double()).any()


def test_binomial_distribution():
    torch.testing.assert_close(
        binomial_probabilities(3, 0.2),
        torch.tensor([0.512, 0.384, 0.096, 0.008], dtype=torch.float64),
    )
    assert binomial_probabilities(2, 1).tolist() == [0, 0, 1]
    assert float(binomial_probabilities(10**6, 1e-3).sum()) == pytest.approx(1, abs=1e-8)
    assert Uniform(3).size_probabilities(10) is None


def make_small_cohorts(rule, aggregator, share):
    return SmallCohorts(
        rule,
        lambda: aggregator,
        lambda n: RoundContext(0, 0, math.floor(share * n), clients=torch.arange(n)),
    )


def test_probability_is_that_of_all_refused_sizes():
    """Bulyan needs 4 f + 3 uploads: with f = ⌊n / 5⌋, it refuses 1, 2, 5, 6 and 10 of 12."""
    small = make_small_cohorts("skip", Bulyan(), 0.2)
    p = binomial_probabilities(12, 0.5)
    expected = sum(math.comb(12, n) for n in (0, 1, 2, 5, 6, 10)) / 2**12
    assert small.sum_refused(p) == pytest.approx(expected, abs=1e-12)
    sentence = small.describe(p, 100)
    assert f"too small for Bulyan, with probability {expected:.3g}" in sentence
    assert f"{100 * expected:.3g} of 100 are expected, and `train/small_cohort` counts" in sentence
    small = make_small_cohorts("raise", Krum(num_byzantine=1), 0.2)
    p = binomial_probabilities(8, 0.75)
    assert "one that is too small ends the run (probability 1)" in small.describe(p, math.inf)
    assert make_small_cohorts("skip", Mean(), 0.2).describe(binomial_probabilities(4, 1), 5) is None


@table_test("wrong", ["ignore", None, True])
def test_unknown_rule_is_refused(wrong):
    with pytest.raises(ValueError, match="`small_cohort` to be 'skip' or 'raise' but got"):
        run([FULL], small_cohort=wrong)
