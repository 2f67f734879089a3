"""FLAME against Algorithm 1 in dense float64, and consequences of its closed forms."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from dense_admm import LeastSquares, algorithm_1
from every_state import after, after_each_round, cohorts, engines_agree
from exhaustive import exhaustive_but
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import (
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import Mean, Median
from pl_fed.clients import FLAME, PFedMeEpochs
from pl_fed.clients.flame import find_violated_conditions
from pl_fed.samplers import All, Uniform

SIZES = [8, 3, 12, 5, 7]
PROBLEM = LeastSquares.drawn(SIZES)
DATA = shared_out(PROBLEM.arrays, batch_size=100)  # a batch is all that a client has
START = np.array([0.5, -1.0, 2.0])
ENGINES = ["one_by_one", "stacked"]
all_engines = pytest.mark.parametrize("engine", ENGINES)


def linear(start=START):
    net = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(start)[None])
    return net


def flame(kind=FLAME, lr=0.2, local_steps=4, **kwargs):
    optimizer = kwargs.pop("optimizer", sgd(lr))
    criterion = HalfSquares()
    return kind(
        linear(), optimizer=optimizer, criterion=criterion, local_steps=local_steps, **kwargs
    )


def close(result, expected, tolerance=1e-12):
    expected = torch.as_tensor(np.asarray(expected), dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def check_against_algorithm_1(sampler, rounds, engine="stacked", lam=1.3, rho=0.4, **options):
    client = flame(lam=lam, rho=rho, **options)
    cohort_ids = cohorts(DATA, rounds, sampler)
    expected = algorithm_1(PROBLEM, START, cohort_ids, lam, rho, 0.2, 4, **options)
    result = after_each_round(client, DATA, rounds, sampler=sampler, engine=engine)
    for round, (actual, reference) in enumerate(zip(result, expected, strict=True)):
        assert actual["cohort"].tolist() == cohort_ids[round]
        close(actual["personal"], reference.theta)
        close(actual["local"], reference.local)
        close(actual["dual"], reference.dual)
        close(actual["w"], reference.w)


@exhaustive_but(
    "all-uniform-own-one_by_one",
    "all-samples-broadcast-stacked",
    "2-samples-own-stacked",
    "2-uniform-broadcast-one_by_one",
    "same 3-samples-broadcast-one_by_one",
    "same 3-uniform-own-stacked",
)
@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("pull_to", ["own", "broadcast"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("sampler", [All(), Uniform(2), Only(1, 3, 4)], ids=["all", "2", "same 3"])
def test_rounds_equal_algorithm_1(engine, pull_to, weights, sampler):
    """θ_i, w_i, π_i of all clients, and w, after each of six rounds."""
    check_against_algorithm_1(sampler, 6, engine, pull_to=pull_to, weights=weights)


@pytest.mark.exhaustive
@pytest.mark.slow
@given(
    st.floats(0.01, 3),
    st.floats(0.01, 3),
    st.integers(1, 5),
    st.sampled_from(["uniform", "samples"]),
)
@settings(max_examples=15, deadline=None)
def test_rounds_equal_algorithm_1_for_any_lambda_and_rho(lam, rho, cohort_size, weights):
    check_against_algorithm_1(Uniform(cohort_size), 3, lam=lam, rho=rho, weights=weights)


@all_engines
def test_round_of_two_clients_equals_a_hand_computed_round(engine):
    """y = 2, 6; λ = 1, α = 1/2, ρ = 1/4, η = 1/2: a step takes θ_i to the mean of y and w_i.

    Round 0 from 0: θ = 1, 3; w_i = θ_i (1/2) / (3/4) = 2/3, 2; π_i = 1/6, 1/2; u_i = 4/3, 4, whose
    mean is 8/3. Round 1: θ = (2 + 2/3) / 2, (6 + 2) / 2 = 4/3, 4; w_i = (θ_i/2 + 2/3 − π_i) · 4/3 =
    14/9, 26/9; π_i = π_i + (w_i − 8/3) / 4 = −1/9, 5/9; u_i = 10/9, 46/9, of mean 28/9.
    """
    settings = {"lam": 1.0, "rho": 0.25, "criterion": HalfSquares(), "local_steps": 1}
    client = FLAME(Point().double(), optimizer=sgd(0.5), **settings)
    first, second = after_each_round(client, shared_out(points([2.0], [6.0])), 2, engine=engine)
    close(first["personal"].flatten(), [1, 3])
    close(first["local"].flatten(), [2 / 3, 2])
    close(first["dual"].flatten(), [1 / 6, 1 / 2])
    close(first["w"], [8 / 3])
    close(second["personal"].flatten(), [4 / 3, 4])
    close(second["local"].flatten(), [14 / 9, 26 / 9])
    close(second["dual"].flatten(), [-1 / 9, 5 / 9])
    close(second["w"], [28 / 9])


OPTIONS = [
    {"weights": weights, "pull_to": pull_to, "lam": 0.7, "rho": 0.3}
    for weights in ("uniform", "samples")
    for pull_to in ("own", "broadcast")
]
NET_SIZES = [7, 3, 10, 2]


def alphas(weights, sizes):
    sizes = torch.tensor(sizes, dtype=torch.float64)
    return sizes / sizes.sum() if weights == "samples" else torch.full_like(sizes, 1 / len(sizes))


@exhaustive_but(
    "4-*'uniform'*'own'*",
    "4-*'samples'*'broadcast'*",
    "2-*'samples'*'own'*",
    "2-*'uniform'*'broadcast'*",
)
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cohort_size", [4, 2])
def test_lemma_3_and_the_mean_of_all_messages(options, cohort_size):
    """π_i = λ α_i (θ_i − w_i), whatever θ_i is: a net's, by minibatches and momentum.

    And w is the mean of the u_i of ALL clients, as (14) has it, for either choice of α_i.
    """
    data = shared_out(classes(NET_SIZES))
    client = FLAME(seeded(mlp), optimizer=sgd(0.1, momentum=0.5), local_epochs=2, **options)
    stiffness = 0.7 * alphas(options["weights"], NET_SIZES)[:, None]
    for state in after_each_round(client, data, 5, sampler=Uniform(cohort_size)):
        theta, local, dual = (state[name] for name in ("personal", "local", "dual"))
        close(dual, stiffness * (theta - local), 1e-13)
        close(state["w"], (local + dual / 0.3).mean(0), 1e-13)
    assert dual.abs().max() > 1e-3


@exhaustive_but("4-own", "2-broadcast")
@pytest.mark.slow
@pytest.mark.parametrize("pull_to", ["own", "broadcast"])
@pytest.mark.parametrize("cohort_size", [4, 2])
def test_messages_are_personal_models_where_rho_is_lam_alpha(pull_to, cohort_size):
    data = shared_out(classes(NET_SIZES))
    local_work = {"lam": 0.8, "pull_to": pull_to, "optimizer": sgd(0.1), "local_epochs": 2}

    def distances(rho):
        client = FLAME(seeded(mlp), rho=rho, **local_work)
        for state in after_each_round(client, data, 4, sampler=Uniform(cohort_size)):
            u = state["local"] + state["dual"] / rho
            yield float((u - state["personal"]).abs().max())

    assert max(distances(0.2)) < 1e-13
    assert min(distances(0.19)) > 1e-4


@exhaustive_but("stacked")
@pytest.mark.slow
@all_engines
def test_reference_settings_equal_mean_regularized_and_pfedme_with_a_full_step(engine):
    """ρ = λ α_i and the pull to w^t: θ_i ← steps on f_i + λ/2 ‖θ − w‖², w ← mean of the θ_i.

    A step of pFedMe's with η λ = 1. Neither for another ρ, nor for the pull to w_i.
    """
    lam, rho, rounds = 1.3, 0.26, 5
    theta, w = np.tile(START, (5, 1)), START
    for _ in range(rounds):
        for i in range(5):
            for _ in range(4):
                theta[i] -= 0.2 * (PROBLEM.gradient(i, theta[i]) + lam * (theta[i] - w))
        w = theta.mean(0)
    result = after(flame(lam=lam, rho=rho, pull_to="broadcast"), DATA, rounds, engine=engine)
    close(result["w"], w)
    close(result["personal"], theta)
    pfedme = after(flame(PFedMeEpochs, lam=lam, eta=1 / lam), DATA, rounds, engine=engine)
    close(result["w"], pfedme["w"])
    close(result["personal"], pfedme["personal"])
    for options in ({"rho": 0.3, "pull_to": "broadcast"}, {"rho": rho, "pull_to": "own"}):
        apart = after(flame(lam=lam, **options), DATA, rounds, engine=engine)["w"] - result["w"]
        assert apart.abs().max() > 1e-3


def test_momentum_and_weight_decay_equal_those_of_the_optimizer():
    """As in the reference code: v ← β v + (∇f + λ (θ − w) + μ θ), from v = 0 in each round."""
    lam, theta, w = 1.0, np.tile(START, (5, 1)), START
    for _ in range(3):
        for i in range(5):
            velocity = 0.0
            for _ in range(4):
                gradient = PROBLEM.gradient(i, theta[i]) + lam * (theta[i] - w) + 0.01 * theta[i]
                velocity = 0.5 * velocity + gradient
                theta[i] -= 0.1 * velocity
        w = theta.mean(0)
    optimizer = sgd(0.1, momentum=0.5, weight_decay=0.01)
    client = flame(optimizer=optimizer, lam=lam, rho=0.2, pull_to="broadcast")
    close(after(client, DATA, 3)["w"], w)


@pytest.mark.slow
def test_robust_rules_merge_messages_or_their_changes():
    """Full participation: the next w is the median of the u_i, else w moves by the changes'."""
    for sampler in (All(), Only(0, 2, 3)):
        states = list(after_each_round(flame(), DATA, 3, sampler=sampler, aggregator=Median()))
        for before, state in itertools.pairwise(states):
            u, old = (
                state_rows["local"] + state_rows["dual"] / 0.1 for state_rows in (state, before)
            )
            cohort = state["cohort"]
            if len(cohort) == 5:
                expected = u.quantile(0.5, dim=0)
            else:
                expected = before["w"] + (u - old)[cohort].quantile(0.5, dim=0) * 3 / 5
            close(state["w"], expected)


# Solving up to a tolerance


def full_gradient(i, theta, local, lam):
    return PROBLEM.gradient(i, theta) + lam * (theta - local)


@exhaustive_but("stacked-uniform")
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "weights"), [("one_by_one", "samples"), ("stacked", "uniform")])
def test_steps_end_at_the_first_iterate_within_the_tolerance(engine, weights):
    """(17) and (18): each client of a cohort stops at the first iterate within its ε_i."""
    lam, rho, decay, rate, sampler = 1.0, 0.3, 0.3, 0.2, Uniform(3)
    client = flame(
        lam=lam, rho=rho, weights=weights, tolerance=0.5, decay=decay, lr=rate, local_steps=25
    )
    alpha = PROBLEM.alpha(weights)
    theta, local, dual = np.tile(START, (5, 1)), np.tile(START, (5, 1)), np.zeros((5, 3))
    epsilon, num_steps = np.full(5, 0.5), []
    for state in after_each_round(client, DATA, 8, sampler=sampler, engine=engine):
        w, still = (local + dual / rho).mean(0), []
        for i in state["cohort"].tolist():
            epsilon[i] *= decay
            num_steps.append(0)
            for _ in range(25):
                gradient = full_gradient(i, theta[i], local[i], lam)
                if np.square(alpha[i] * gradient).sum() <= epsilon[i]:
                    break
                theta[i] = theta[i] - rate * gradient
                num_steps[-1] += 1
            still.append(1 - num_steps[-1] / 25)
            gradient = full_gradient(i, theta[i], local[i], lam)
            assert np.square(alpha[i] * gradient).sum() <= epsilon[i]
            local[i] = (lam * alpha[i] * theta[i] + rho * w - dual[i]) / (lam * alpha[i] + rho)
            dual[i] = dual[i] + rho * (local[i] - w)
        close(state["tolerance"].flatten(), epsilon)
        close(state["personal"], theta)
        close(state["local"], local)
        assert float(state["report"]["train/solved"]) == pytest.approx(np.mean(still))
    assert min(num_steps) == 0
    assert 1 < max(num_steps) < 24


@pytest.mark.slow
def test_tolerance_does_not_change_the_logged_loss():
    plain, solved = (
        after(flame(tolerance=tolerance), DATA, 1)["report"] for tolerance in (None, 1e-30)
    )
    assert float(plain["train/loss"]) == pytest.approx(float(solved["train/loss"]), rel=1e-14)
    assert "train/solved" not in plain
    assert float(solved["train/solved"]) == 0.0
    still = after(flame(tolerance=1e30), DATA, 2)
    close(still["personal"], np.tile(START, (5, 1)))
    expected = np.mean([PROBLEM.loss(i, START) for i in range(5)])
    assert float(still["report"]["train/loss"]) == pytest.approx(expected, rel=1e-12)


@table_test(
    "optimizer",
    [sgd(0.1, momentum=0.5), sgd(0.1, weight_decay=0.1), torch.optim.Adam],
    ids=["momentum", "weight decay", "Adam"],
)
def test_optimizers_that_move_without_a_gradient_are_refused_with_a_tolerance(optimizer):
    match = r"Expected argument `optimizer` to build torch\.optim\.SGD without momentum"
    with pytest.raises(ValueError, match=match):
        run_rounds(flame(tolerance=0.1, optimizer=optimizer), DATA, rounds=0)
    run_rounds(flame(optimizer=optimizer), DATA, rounds=0)


# The global model of the round before


@pytest.mark.slow
@all_engines
def test_lagged_global_model_is_the_model_before_the_server_step(engine):
    client = flame(lagged_global=True).double()
    federation = Federation(Uniform(3), engine=EngineOptions(engine), seed=0)
    federation.setup(client, shared_out(PROBLEM.arrays, 100, val_fraction=0.4), "fit")
    optimizer, losses = client.configure_optimizers(), []
    for round in range(4):
        before = client.row("global").data.clone()
        federation.run_round(round, optimizer)
        close(federation.server_states["lagged"], before, 1e-14)
        for metric in federation.metrics("val").values():
            metric.reset()
        with torch.no_grad():
            federation.evaluate("val", torch.arange(5))
        metrics = federation.metrics("val")
        assert tuple(metrics) == ("global", "lagged_global", "personal", "hybrid")
        losses.append([metrics[name].loss_sum.clone() for name in ("global", "lagged_global")])
    for (now, _), (_, later) in itertools.pairwise(losses):
        torch.testing.assert_close(now, later)
    assert not torch.allclose(*losses[-1])


@pytest.mark.slow
def test_lagged_global_model_changes_no_other_model():
    plain, lagged_result = (after(flame(lagged_global=lagged), DATA, 4) for lagged in (True, False))
    for name in ("w", "personal", "local", "dual"):
        assert torch.equal(plain[name], lagged_result[name])


# Theorem 1's conditions

COVERED = {"lam": 0.14, "rho": 0.112, "smoothness": 0.05}  # of five clients: λ α = 0.028


def warning_messages(**kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Federation(All(), seed=0).setup(flame(**kwargs), DATA, "fit")
    return [str(warning.message) for warning in caught]


def test_no_warning_under_theorem_1_or_without_smoothness():
    assert warning_messages(**COVERED) == []
    assert warning_messages(lam=100.0, rho=0.1) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"smoothness": 1.0}, [r"(1 − ρ²)/ρ² λ²α² − (Lα + ρ)/2 > 0, but it is -0.09428"]),
        ({"rho": 0.02, "lam": 0.2}, ["λ²α²(1 + ρ)/ρ² − (λα + ρ)/2 < 0", "ρ ≥ λα, but λα is 0.04"]),
    ],
)
def test_one_warning_names_all_violated_conditions_of_theorem_1(change, expected):
    (message,) = warning_messages(**{**COVERED, **change})
    assert message.startswith("Theorem 1 does not cover FLAME with lam = ")
    for words in expected:
        assert words in message
    assert message.count(", but ") == len(expected)


def test_weights_by_samples_are_checked_for_each_client_size():
    (message,) = warning_messages(**COVERED, weights="samples")
    assert f"alpha = {3 / 35:g}" in message


def test_three_conditions_equal_hand_computed_values():
    """λα = 1/10, ρ = 1/5: 11/40·... : a² (1 + ρ)/ρ² = 0.3, (a + ρ)/2 = 0.15."""
    result = find_violated_conditions(lam=1.0, rho=0.2, alpha=0.1, smoothness=1.0)
    assert result == ["λ²α²(1 + ρ)/ρ² − (λα + ρ)/2 < 0, but it is 0.15"]


# Refusals


@table_test(
    ("arguments", "match"),
    [
        ({"lam": 0.0}, "`lam` to be above 0, and finite, but got 0.0"),
        ({"rho": -1.0}, "`rho` to be above 0, and finite, but got -1.0"),
        ({"rho": float("inf")}, "`rho` to be above 0, and finite, but got inf"),
        ({"lam": float("nan")}, "`lam` to be above 0, and finite, but got nan"),
        ({"tolerance": 0.0}, "`tolerance` to be above 0, and finite, but got 0.0"),
        ({"smoothness": 0.0}, "`smoothness` to be above 0, and finite, but got 0.0"),
        ({"decay": 1.0}, r"`decay` to be in \(0, 1\) but got 1.0"),
        ({"pull_to": "w"}, "`pull_to` to be 'own' or 'broadcast' but got 'w'"),
        ({"weights": "size"}, "`weights` to be 'uniform' or 'samples' but got 'size'"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=f"Expected argument {match}"):
        FLAME(Point(), **arguments)


def test_a_mean_by_samples_is_refused():
    match = "Expected argument `weighting` of Mean to be 'uniform' for FLAME, .* 'samples'"
    with pytest.raises(ValueError, match=match):
        Federation(All(), Mean("samples"), seed=0).setup(flame(), DATA, "fit")


# Engines, chunks, and a stop

EVERYTHING = {"weights": "samples", "lagged_global": True, "tolerance": 0.01, "rho": 0.2}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_engines_and_chunks_agree_on_all_states(uncompiled):
    data = shared_out(classes([9, 5, 12, 4]))
    client = FLAME(seeded(mlp), optimizer=sgd(0.3), local_epochs=2, **EVERYTHING)
    first = engines_agree(client, data, 3, uncompiled, Uniform(3))
    assert 0 < float(first["report"]["train/solved"]) < 1
    assert {"local", "dual", "tolerance", "lagged"} <= set(first)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_resumed_run_equals_an_uninterrupted_run(tmp_path):
    data = shared_out(classes([12, 9, 15, 11]), val_fraction=0.3, test_fraction=0.3)
    result = []
    for stops in ((4,), (2, 4)):
        client = FLAME(seeded(mlp), optimizer=sgd(0.3), local_epochs=2, **EVERYTHING)
        for epochs in stops:
            federation = Federation(Uniform(2), seed=0)
            trainer = pl_fed.Trainer(
                federation,
                run_dir=tmp_path / str(len(stops)),
                max_epochs=epochs,
                precision="64-true",
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(client, data, ckpt_path="last" if epochs == 4 and len(stops) > 1 else None)
            client = copy.deepcopy(client)
        client_ids = torch.arange(4)
        rows = [federation.store.read(n, client_ids) for n in ("personal", "local", "dual")]
        rows.append(federation.store.read("tolerance", client_ids))
        rows.append(federation.server_states["lagged"])
        (metrics,) = trainer.test(client, data, verbose=False)
        result.append(([client.row("global").data.clone(), *rows], metrics))
    for first_row, resumed_row in zip(result[0][0], result[1][0], strict=True):
        assert torch.equal(first_row, resumed_row)
    assert result[0][1] == result[1][1]
    assert "test/lagged_global/accuracy" in result[0][1]
