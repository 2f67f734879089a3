"""Box SGD: a step of gradient descent, and the projection on the box."""

import numpy as np
import pytest
import torch
from tables import table_test

from pl_fed.optimizers import BoxSGD


def test_steps_equal_numpy():
    draw = np.random.default_rng(0)
    start, gradients = draw.uniform(size=12), draw.normal(size=(60, 12))
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = BoxSGD([weight], lr=0.3, low=-0.5, high=0.75)
    expected, touched = start.copy(), np.zeros(12, dtype=bool)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        expected = np.clip(expected - 0.3 * gradient, -0.5, 0.75)
        touched |= (expected == -0.5) | (expected == 0.75)
        np.testing.assert_allclose(weight.data.numpy(), expected, rtol=0, atol=1e-12)
    assert touched.all()


def test_minimum_outside_of_the_box_ends_at_its_border_and_comes_back():
    weight = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    optimizer = BoxSGD([weight], lr=0.5)
    for minimum, border in ((3.0, 1.0), (-2.0, 0.0), (0.25, 0.25)):
        for _ in range(60):
            optimizer.zero_grad()
            loss = (weight - minimum).square().sum() / 2
            assert optimizer.step(lambda loss=loss: loss.backward()) is None
        assert weight.item() == pytest.approx(border, abs=1e-12)


def test_a_parameter_without_a_gradient_stays():
    weight = torch.nn.Parameter(torch.tensor([5.0]))
    BoxSGD([weight]).step()
    assert weight.item() == 5.0


@table_test(
    "arguments, match",
    [
        ({"lr": -1.0}, "`lr`"),
        ({"low": float("nan")}, "`low`"),
        ({"low": 1.0, "high": 0.0}, "`high` to be at least `low` = 1.0 but got 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        BoxSGD([torch.zeros(1)], **arguments)
