"""SCAFFOLD against Algorithm 1 in numpy, on linear regressions with unlike clients."""

import functools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import (
    Cohorts,
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    reals,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

import pl_fed
from pl_fed import Federation
from pl_fed.clients import FedAvg, Scaffold
from pl_fed.optimizers import LocalCosine
from pl_fed.preflight.rules import check_local_schedule
from pl_fed.types import Batch

SIZES = [7, 3, 10, 2]
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]
all_controls = pytest.mark.parametrize("control", ["path", "start"])


def regressions(sizes=SIZES):
    """Samples with inputs and slopes that differ between clients."""
    draw = np.random.default_rng(1)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    scales = np.linspace(0.5, 1.5, len(sizes))[owner, None]
    x = draw.normal(size=(len(owner), 2)) * scales
    slopes = draw.normal(size=(len(sizes), 2))[owner] * 3
    return reals(x, (x * slopes).sum(1, keepdims=True), owner)


def line():
    return nn.Linear(2, 1, bias=False)


def start():
    return seeded(line).double().weight.detach().numpy()[0].copy()


def gradient(w, x, y):
    """Of the mean of ½ (⟨w, x⟩ − y)²."""
    return x.T @ (x @ w - y) / len(x)


def algorithm_1(data, cohorts, rates, control, passes=2, server_lr=1.0, decay=0.0, batch=4):
    """Every letter as in the paper; the client's own minibatches, in their order."""
    minibatches = []
    for k in range(len(data.clients.train.sizes)):
        index = data.clients.train.samples(k)
        x, y = data.clients.inputs[index].numpy(), data.clients.targets[index].numpy()[:, 0]
        starts = range(0, len(x), batch)
        minibatches.append([(x[i : i + batch], y[i : i + batch]) for i in starts])
    number, x = len(minibatches), start()
    c, c_i = np.zeros(2), np.zeros((number, 2))
    for cohort, rate in zip(cohorts, rates):
        dy, dc = np.zeros(2), np.zeros(2)
        for i in cohort:
            y, steps = x.copy(), passes * len(minibatches[i])
            for minibatch in minibatches[i] * passes:
                y -= rate * (gradient(y, *minibatch) + decay * y - c_i[i] + c)
            if control == "start":
                new = (
                    np.mean([gradient(x, *minibatch) for minibatch in minibatches[i]], 0)
                    + decay * x
                )
            else:
                new = c_i[i] - c + (x - y) / (steps * rate)
            dy, dc = dy + (y - x) / len(cohort), dc + (new - c_i[i]) / len(cohort)
            c_i[i] = new
        x, c = x + server_lr * dy, c + len(cohort) / number * dc
    return x, c, c_i


def halve_per_round(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@exhaustive_but(
    "0.7-0.1-one_by_one-path",
    "0.7-0.1-one_by_one-start",
    "1.0-0.0-stacked-path",
    "0.7-0.1-stacked-start",
    "1.0-0.0-stacked_compiled-path",
)
@pytest.mark.slow
@all_controls
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("server_lr", "decay"), [(1.0, 0.0), (0.7, 0.1)])
def test_rounds_equal_algorithm_1(uncompiled, control, engine, server_lr, decay):
    """Clients of one to three steps a pass, a learning rate that is halved, a changing cohort."""
    data, cohorts = shared_out(regressions(), batch_size=4), [(0, 1, 3), (0, 2, 3), (1, 2, 3)]
    client = Scaffold(
        seeded(line),
        control,
        criterion=HalfSquares(),
        optimizer=sgd(0.2, weight_decay=decay),
        lr_scheduler=halve_per_round,
        local_epochs=2,
    )
    settings = {"server_optimizer": functools.partial(torch.optim.SGD, lr=server_lr)}
    settings |= {"engine": engine, "chunk_size": 2, "shuffle": False, "sampler": Cohorts(*cohorts)}
    results = run_rounds(client, data, rounds=3, **settings)
    rates = (0.2, 0.1, 0.05)
    w, c, c_i = algorithm_1(data, cohorts, rates, control, server_lr=server_lr, decay=decay)
    np.testing.assert_allclose(results.w.numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(results.server_states["control"].numpy(), c, rtol=1e-10)
    np.testing.assert_allclose(results.states["own_control"].numpy(), c_i, rtol=1e-10)
    np.testing.assert_allclose(c, c_i.mean(0), rtol=1e-10)  # as the paper remarks


@exhaustive_but("stacked-start", "one_by_one-path")
@pytest.mark.slow
@all_controls
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_first_round_equals_fedavg(control, engine):
    settings = {"optimizer": sgd(0.1, weight_decay=0.1), "local_epochs": 2}
    data = shared_out(classes(SIZES))
    results = run_rounds(Scaffold(seeded(mlp), control, **settings), data, 1, engine=engine)
    expected = run_rounds(FedAvg(seeded(mlp), **settings), data, 1, engine=engine)
    assert torch.equal(results.w, expected.w)
    torch.testing.assert_close(
        results.reports[0]["train/loss"], expected.reports[0]["train/loss"], rtol=0, atol=1e-12
    )
    assert results.states["own_control"].any(1).all()
    second = run_rounds(Scaffold(seeded(mlp), control, **settings), data, 2, engine=engine)
    assert (second.w - run_rounds(FedAvg(seeded(mlp), **settings), data, 2).w).abs().max() > 1e-4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_scaffold_converges_where_fedavg_stalls():
    """Many local steps on unlike quadratics: FedAvg's fixed point is not the minimum."""
    arrays = regressions()
    arrays.targets.mul_(3)
    data = shared_out(arrays, batch_size=10)
    hessian, linear = np.zeros((2, 2)), np.zeros(2)
    for k in range(len(SIZES)):
        index = data.clients.train.samples(k)
        x, y = data.clients.inputs[index].numpy(), data.clients.targets[index].numpy()[:, 0]
        hessian, linear = hessian + x.T @ x / len(x), linear + x.T @ y / len(x)
    best = np.linalg.solve(hessian, linear)
    settings = {"criterion": HalfSquares(), "optimizer": sgd(0.2), "local_steps": 5}

    def error(client, rounds):
        w = run_rounds(client, data, rounds=rounds, engine="stacked").w
        return np.abs(w.numpy() - best).max()

    assert error(Scaffold(seeded(line), "path", **settings), 25) < 1e-4
    assert error(Scaffold(seeded(line), "start", **settings), 25) < 1e-4
    assert error(FedAvg(seeded(line), **settings), 15) > 0.3


@exhaustive_but("path")
@pytest.mark.slow
@all_controls
def test_control_variates_converge_to_the_gradients_at_the_minimum(control):
    """Of ½ (w − y)², with a cohort of two of three: w = mean y, c_i = w − y_i, c = 0."""
    client = Scaffold(Point(), control, criterion=HalfSquares(), optimizer=sgd(0.3), local_steps=3)
    data, cohorts = shared_out(points([0.0], [3.0], [9.0])), [(0, 1), (1, 2), (0, 2)] * 15
    results = run_rounds(client, data, rounds=45, sampler=Cohorts(*cohorts), engine="stacked")
    assert results.w.tolist() == pytest.approx([4.0], abs=1e-6)
    assert results.states["own_control"].flatten().tolist() == pytest.approx([4, 1, -5], abs=1e-5)
    assert results.server_states["control"].tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.slow
@all_controls
def test_learning_rate_zero_changes_no_control_variate(control):
    def warm_up(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: float(round > 0))

    settings = {"optimizer": sgd(0.1), "lr_scheduler": warm_up, "local_steps": 2}
    client = Scaffold(seeded(mlp), control, **settings)
    first, second = (run_rounds(client, shared_out(classes(SIZES)), rounds) for rounds in (1, 2))
    assert not first.states["own_control"].any()
    assert not first.server_states["control"].any()
    assert second.states["own_control"].isfinite().all()
    assert second.states["own_control"].any()


@all_controls
def test_reported_loss_is_the_corrected_loss(control):
    """F(y) + (y − x)(c − c_i) = ½ (2 − 7)² + (2 − 1) (4 − 3), whatever the slope is."""
    client = Scaffold(Point(), control, criterion=HalfSquares(), optimizer=sgd(0.1))
    client.row("global").data.fill_(2.0)
    round = client.new_round()
    round.broadcast.parameters.fill_(1.0)
    round.server_states["control"].fill_(4.0)
    round.states["own_control"].fill_(3.0)
    client.run_begin(round)
    with client.reading(round.client_rows(0)):
        loss = client.training_step(Batch(torch.zeros(1, 1), torch.tensor([[7.0]])), 0)
    assert loss.item() == 12.5 + 1.0
    loss.backward()
    assert client.global_model.value.grad.tolist() == [-5.0 + 1.0]
    if control == "start":
        assert client.slope_model.value.grad.tolist() == [1.0 - 7.0]  # at x, not at y


@exhaustive_but("path")
@pytest.mark.slow
@all_controls
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_resumed_run_equals_an_uninterrupted_run(control, tmp_path):
    """By a trainer, with a learning rate that is halved: controls and rates go on."""
    results = []
    for name, stops in (("whole", (3,)), ("halves", (1, 3))):
        for epochs in stops:
            client = Scaffold(
                seeded(mlp),
                control,
                optimizer=sgd(0.2),
                lr_scheduler=halve_per_round,
                local_epochs=2,
            )
            federation = Federation(Only(0, 2), seed=0)
            trainer = pl_fed.Trainer(
                federation,
                run_dir=tmp_path / name,
                max_epochs=epochs,
                precision="64-true",
                accelerator="cpu",
                limit_val_batches=0,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            resumed = "last" if epochs != stops[0] else None
            trainer.fit(client, shared_out(classes(SIZES)), ckpt_path=resumed)
        own = federation.store.read("own_control", torch.arange(4))
        mean_control = federation.server_states["control"]
        results.append((client.row("global").data, mean_control, own))
    for first_row, resumed_row in zip(*results, strict=True):
        assert torch.equal(first_row, resumed_row)
        assert first_row.any()


@table_test(
    ("optimizer", "description"),
    [
        (sgd(0.1, momentum=0.9), r"SGD\(momentum=0.9\)"),
        (sgd(0.1, maximize=True), r"SGD\(maximize=True\)"),
        (lambda params: torch.optim.Adam(params, lr=0.1), r"Adam\(\)"),
    ],
)
def test_optimizers_other_than_plain_sgd_are_refused(optimizer, description):
    client = Scaffold(seeded(mlp), optimizer=optimizer)
    with pytest.raises(
        ValueError, match=f"`optimizer` to build torch.optim.SGD .* but got {description}"
    ):
        Federation(seed=0, sampler=Only(0)).setup(client, shared_out(classes(SIZES)), "fit")


def test_unknown_control_is_refused():
    with pytest.raises(ValueError, match="`control` to be 'path' or 'start' but got 'middle'"):
        Scaffold(seeded(mlp), "middle")


@pytest.mark.parametrize("control", ["path", "start"])
def test_only_the_global_model_is_evaluated(control):
    assert Scaffold(seeded(mlp), control=control).evaluated == ("global",)


def test_gradients_of_a_pass_are_not_weighed_by_a_schedule():
    for control in ("start", "path"):
        client = Scaffold(seeded(mlp), control=control, optimizer=sgd(0.1))
        client.local_schedule = LocalCosine(sgd(0.1)(client.global_model.parameters()))
        is_refused = control == "start"
        with pytest.raises(ValueError, match="LocalCosine") if is_refused else nullcontext():
            check_local_schedule(client, batches_per_step=1)
