"""Yogi by hand, against numpy, and as an optimizer of torch."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test
from torch import nn

from pl_fed.optimizers import Yogi


def run(optimizer, weight, gradients):
    for gradient in gradients:
        weight.grad = torch.as_tensor(gradient, dtype=weight.dtype).clone()
        optimizer.step()
    return weight.detach()


def run_numpy(weight, gradients, lr, beta_1, beta_2, eps, accumulator):
    w, m, v = np.array(weight), np.zeros(len(weight)), np.full(len(weight), accumulator)
    for g in gradients:
        m = beta_1 * m + (1 - beta_1) * g
        v = v - (1 - beta_2) * g**2 * np.sign(v - g**2)
        w = w - lr * m / (np.sqrt(v) + eps)
    return w


def test_two_steps_by_hand():
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = Yogi([weight], lr=1.0, betas=(0.5, 0.75), eps=0.5, initial_accumulator=0.0)
    # m = 1, v = 0 + 4/4 = 1: w = 1 - 1 / 1.5
    run(optimizer, weight, [[2.0]])
    assert weight.item() == pytest.approx(1 / 3)
    # m = 0.25, v = 1 - 0.25/4 = 0.9375, for v is larger than 0.25: it shrinks by g²/4, not by v/4
    run(optimizer, weight, [[-0.5]])
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(0.25)
    assert optimizer.state[weight]["exp_avg_sq"].item() == pytest.approx(0.9375)
    assert weight.item() == pytest.approx(1 / 3 - 0.25 / (0.9375**0.5 + 0.5))


def test_accumulator_starts_at_eps_squared():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Yogi([weight], eps=0.1)
    run(optimizer, weight, [[0.0]])
    assert optimizer.state[weight]["exp_avg_sq"].item() == pytest.approx(0.01)
    assert Yogi([weight]).defaults["initial_accumulator"] == pytest.approx(1e-6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 1000),
    lr=st.floats(0.001, 1),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    eps=st.floats(1e-4, 1),
    accumulator=st.none() | st.floats(0, 2),
)
def test_against_numpy(seed, lr, betas, eps, accumulator):
    numbers = np.random.default_rng(seed)
    start, gradients = numbers.normal(size=4), numbers.normal(size=(12, 4))
    weight = nn.Parameter(torch.from_numpy(start.copy()))
    final = run(Yogi([weight], lr, betas, eps, accumulator), weight, gradients)
    first = eps**2 if accumulator is None else accumulator
    expected = run_numpy(start, gradients, lr, *betas, eps, first)
    np.testing.assert_allclose(final.numpy(), expected, rtol=1e-9, atol=1e-11)


def test_the_gradient_is_not_changed():
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([1.0, -2.0, 0.0])
    Yogi([weight]).step()
    assert torch.equal(weight.grad, torch.tensor([1.0, -2.0, 0.0]))


def test_second_moments_are_never_negative():
    weight = nn.Parameter(torch.zeros(50))
    optimizer = Yogi([weight], betas=(0.9, 0.0))
    gradients = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    run(optimizer, weight, gradients * torch.logspace(3, -3, 30).unsqueeze(1))
    assert (optimizer.state[weight]["exp_avg_sq"] >= 0).all()
    assert weight.isfinite().all()


def test_restored_state_continues_bit_for_bit(tmp_path):
    gradients = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    weight = nn.Parameter(torch.zeros(5))
    optimizer = Yogi([weight], lr=0.1)
    run(optimizer, weight, gradients[:3])
    torch.save([optimizer.state_dict(), weight.detach()], tmp_path / "optimizer.pt")
    uninterrupted = run(optimizer, weight, gradients[3:]).clone()

    state, row = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    weight = nn.Parameter(row)
    optimizer = Yogi([weight], lr=9.0)
    optimizer.load_state_dict(state)
    assert torch.equal(run(optimizer, weight, gradients[3:]), uninterrupted)


def test_groups_keep_their_own_learning_rate():
    slow, fast = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Yogi([{"params": [slow]}, {"params": [fast], "lr": 1.0}], lr=0.1)
    slow.grad = fast.grad = torch.ones(1)
    optimizer.step()
    torch.testing.assert_close(fast.detach(), 10 * slow.detach())


def test_parameters_without_gradient_stay_constant():
    constant, moving = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    moving.grad = torch.ones(1)
    optimizer = Yogi([constant, moving])
    optimizer.step()
    assert constant.item() == 1
    assert constant not in optimizer.state


def test_closure_is_run_and_its_loss_returned():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = Yogi([weight], lr=0.05)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(200)]
    assert losses[0] == 9
    assert losses[-1] < 1e-3


def test_schedule_changes_the_learning_rate():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Yogi([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    weight.grad = torch.ones(1)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_copy_takes_equal_steps():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Yogi([weight])
    run(optimizer, weight, [[1.0, 2.0]])
    twin = copy.deepcopy(optimizer)
    twin_weight = twin.param_groups[0]["params"][0]
    weights, twin_weights = (
        run(o, w, [[3.0, 4.0]]) for o, w in ((optimizer, weight), (twin, twin_weight))
    )
    assert torch.equal(weights, twin_weights)


def test_sparse_gradients_are_refused():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        Yogi([weight]).step()


@table_test(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "`lr` to be greater than 0 but got 0.0"),
        ({"lr": float("nan")}, "`lr` to be greater than 0 but got nan"),
        ({"betas": (1.0, 0.9)}, r"`betas` to be both in \[0, 1\) but got \(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, r"`betas` to be both in \[0, 1\) but got \(0.9, -0.1\)"),
        ({"eps": 0.0}, "`eps` to be greater than 0 but got 0.0"),
        ({"initial_accumulator": -1.0}, "`initial_accumulator` to be at least 0 but got -1.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"Expected argument {message}"):
        Yogi([nn.Parameter(torch.zeros(1))], **arguments)
