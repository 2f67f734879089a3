"""CRFL: by hand, against numpy, in a federation, and its refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from small_federations import classes, mlp, seeded, sgd, shared_out
from torch.testing import assert_close

from pl_fed import Federation
from pl_fed.aggregators import CRFL, Chain, Clipping, Mean, Median, WeakDP
from pl_fed.clients import FedAvg
from pl_fed.random import key, normal_row
from pl_fed.rounds.settings import RunSettings
from pl_fed.types import RoundContext

MODEL = torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64)  # of norm 13


def context(round, **fields):
    return RoundContext(
        clients=torch.arange(2), round=round, num_rounds=round + 1, broadcast=MODEL, **fields
    )


@pytest.mark.parametrize(
    ("round", "expected"), [(9, [0.692308, 0.923077, 2.769231]), (199, [3.0, 4.0, 12.0])]
)
def test_model_is_clipped_as_by_hand(round, expected):
    """In the paper's round 10 the bound is 3; in its round 200 it is 15."""
    update = CRFL()(torch.zeros(2, 3).double(), torch.ones(2), context(round))
    expected_model = torch.tensor(expected, dtype=torch.float64)
    assert_close(MODEL + update, expected_model, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_numpy(kind):
    draw = torch.Generator().manual_seed(0)
    aggregator = CRFL(start=1.0, growth=0.5, max_norm=2.5, std=0.3)
    for round in range(5):
        rows = hostile_uploads(kind, 8, 3, seed=round)
        broadcast = 2 * torch.randn(40, generator=draw, dtype=torch.float64)
        now = RoundContext(seed=4, round=round, num_rounds=5, broadcast=broadcast)
        model = broadcast.numpy() + rows.numpy().mean(0)
        bound = min(2.5, 1.0 + 0.5 * (round + 1))
        model /= max(1, np.linalg.norm(model) / bound)
        if round < 4:
            model += 0.3 * normal_row(key(4, "crfl", round), 40).numpy()
        update = aggregator(rows, torch.ones(8), now)
        assert_close(update, torch.from_numpy(model) - broadcast, rtol=0, atol=1e-12)


def test_last_round_has_no_noise():
    rows, quiet, noisy = torch.zeros(2, 3), CRFL(std=0.0), CRFL(std=1.0)
    for rounds, has_noise in ((8, False), (9, True), (float("inf"), True), (0, True)):
        now = replace(context(7), num_rounds=rounds)
        same = torch.equal(quiet(rows, torch.ones(2), now), noisy(rows, torch.ones(2), now))
        assert same != has_noise


def test_other_aggregators_merge_the_uploads():
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    update = CRFL(max_norm=100.0, start=100.0, aggregator=Median())(rows, torch.ones(5), context(0))
    assert_close(update, Median()(rows, torch.ones(5), context(0)))


def test_huge_uploads_leave_a_model_within_the_bound():
    rows = torch.full((2, 3), 1e30)
    model = MODEL + CRFL(start=2.9)(rows, torch.ones(2), context(0))
    assert model.norm() == pytest.approx(3.0, rel=1e-5)


def test_context_without_the_model_is_refused():
    with pytest.raises(ValueError, match=r"Expected `context.broadcast` to be the global model"):
        CRFL()(torch.zeros(2, 3), torch.ones(2), RoundContext())


def run(aggregator, rounds=3, **settings):
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    federation = Federation(aggregator=aggregator, seed=0, **settings)
    federation.setup(
        client, shared_out(classes([9, 4, 6])), "fit", settings=RunSettings(rounds=rounds)
    )
    client.train()
    optimizer = client.configure_optimizers()
    norms = []
    for round in range(rounds):
        federation.run_round(round, optimizer)
        norms.append(float(client.row("global").data.norm()))
    return norms


@pytest.mark.slow
def test_models_of_a_federation_have_the_bounded_norm_and_the_last_one_has_no_noise():
    norms = run(CRFL(start=0.2, growth=0.0, std=0.001))
    assert norms == pytest.approx([0.2] * 3, rel=0.05)
    assert norms[-1] == pytest.approx(0.2, rel=1e-5)
    assert norms[0] != pytest.approx(0.2, rel=1e-5)
    assert norms[1] != pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize(
    "aggregator", [CRFL(), WeakDP(aggregator=CRFL()), Chain([Clipping()], CRFL())]
)
def test_other_server_optimizers_are_refused(aggregator):
    name = type(getattr(aggregator, "then", aggregator)).__name__
    with pytest.raises(ValueError, match=f"plain SGD with learning rate 1 for {name}"):
        run(aggregator, server_optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    run(Mean(), rounds=1, server_optimizer=lambda p: torch.optim.SGD(p, lr=0.5))


@pytest.mark.parametrize(
    ("name", "value"), [("start", 0.0), ("growth", -0.1), ("max_norm", 0.0), ("std", -1.0)]
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be"):
        CRFL(**{name: value})
