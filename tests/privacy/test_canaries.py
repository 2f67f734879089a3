"""The audit by canaries finds broken mechanisms, and confirms the claimed ε of the right one."""

import math
from statistics import NormalDist

import pytest
import torch
from exhaustive import exhaustive_for
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rounds import build, model_row, private, run
from small_federations import classes, mlp, seeded, sgd, shared_out

pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")

import dp_accounting

from pl_fed import Adversary, EngineOptions
from pl_fed.aggregators import Median
from pl_fed.attacks import Canaries
from pl_fed.clients import FedAvg
from pl_fed.functional.auditing import canary_direction, empirical_epsilon, normal_epsilon

# the estimate is of a fitted normal distribution: few canaries would overstate it, and in few
# dimensions the canaries would be each other's noise
NUM_CANARIES, NUM_CLIENTS, WIDTH, DELTA, ROUNDS = 400, 410, 600, 1e-2, 8


@settings(deadline=None, max_examples=20)
@given(distance=st.floats(0.1, 5), delta=st.sampled_from([1e-5, 1e-2]))
def test_equal_variances_agree_with_the_gaussian_mechanism(distance, delta):
    first, second = NormalDist(0, 1), NormalDist(distance, 1)
    expected = dp_accounting.get_epsilon_gaussian(1 / distance, delta)
    for pair in ((first, second), (second, first)):
        assert normal_epsilon(*pair, delta) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_broken_update_confirms_no_mechanism():
    rows = torch.stack([canary_direction(0, k, 50) for k in range(5)])
    assert math.isnan(empirical_epsilon(torch.full((50,), math.nan), rows, DELTA))


def test_unequal_variances_agree_with_a_sum():
    first, second = NormalDist(0.3, 0.5), NormalDist(-0.2, 1.3)
    epsilon = normal_epsilon(first, second, 1e-2)
    grid = torch.linspace(-20, 20, 2_000_001, dtype=torch.float64)
    p, q = (
        (-((grid - d.mean) ** 2) / (2 * d.variance)).exp() / (d.stdev * math.sqrt(2 * math.pi))
        for d in (first, second)
    )
    excess = float((p - math.exp(epsilon) * q).clamp(min=0).sum() * (grid[1] - grid[0]))
    assert excess == pytest.approx(1e-2, rel=1e-4)


def audit(change=lambda privacy: None, noise=1.5, seed=0, buckets=None):
    """Return the empirical and the claimed ε of a run with canaries."""
    client = FedAvg(seeded(lambda: mlp(width=WIDTH)), optimizer=sgd(0.1))
    adversary = Adversary(Canaries(), ids=list(range(NUM_CANARIES)), knowledge="own")
    federation, optimizer = build(
        client,
        private(clip_norm=0.5, noise_multiplier=noise, delta=DELTA, buckets=buckets),
        shared_out(classes([4] * NUM_CLIENTS)),
        ROUNDS,
        adversary=adversary,
        engine=EngineOptions("stacked"),
        seed=seed,
        aggregator=Median() if buckets else None,
    )
    privacy = federation.session.rounds.privacy
    change(privacy)
    start = model_row(federation).clone()
    for round in range(ROUNDS):
        run(federation, optimizer, round)
    released = model_row(federation) - start
    rows = torch.stack([canary_direction(seed, k, len(start)) for k in range(NUM_CANARIES)])
    return empirical_epsilon(released, rows, DELTA), privacy.epsilon()


@exhaustive_for("1-None")
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "buckets"), [(0, None), (1, None), (0, 8)])
def test_empirical_epsilon_is_below_the_claimed_one(seed, buckets):
    empirical, claimed = audit(seed=seed, buckets=buckets)
    assert empirical <= claimed


def leave_out_noise(privacy):
    privacy._draw_noise = lambda numel, _: torch.zeros(numel, dtype=torch.float64)


def weigh_by_samples(privacy):
    """Weigh the canaries' uploads by 20 samples, after clipping to norm 1 sample."""
    protect = privacy.protect

    def weighted(uploads, share, note):
        clipped = uploads * (0.5 / uploads.norm(dim=1).clamp(min=0.5))[:, None]
        excess = clipped[share.cohort < NUM_CANARIES].sum(0) * 19
        return protect(uploads, share, note) + excess / privacy.denominator

    privacy.protect = weighted


@exhaustive_for("leave_out_noise-8")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "buckets"), [(leave_out_noise, None), (weigh_by_samples, None), (leave_out_noise, 8)]
)
def test_audit_finds_a_broken_mechanism(change, buckets):
    empirical, claimed = audit(change, buckets=buckets)
    assert empirical > 1.5 * claimed
