"""Masked means, the weights of cross entropy, and the squared distance with its gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pl_fed.functional.losses import RowDistance, masked_mean, sample_weights, squared_distance
from pl_fed.nets.rows import RowLayout

VALUES = torch.tensor([1.0, 2.0, 6.0, 9.0])
quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def test_masked_mean_is_over_unmasked_values():
    assert masked_mean(VALUES, torch.tensor([True, False, True, False])) == 3.5


def test_mean_without_a_mask_is_over_all_values():
    assert masked_mean(VALUES, None) == 4.5


def test_empty_mask_gives_zero_loss_and_gradient():
    values = VALUES.clone().requires_grad_()
    mean = masked_mean(values, torch.zeros(4, dtype=torch.bool))
    mean.backward()
    assert mean == 0
    assert torch.equal(values.grad, torch.zeros(4))


def test_weighted_mean_divides_by_the_weights():
    weights = torch.tensor([0.5, 1.0, 1.5, 4.0])
    assert masked_mean(VALUES, None, weights) == 18 / 7
    assert masked_mean(VALUES, torch.tensor([True, False, True, False]), weights) == 3.5
    assert masked_mean(VALUES, torch.tensor([True, True, False, False]), weights) == 2.0


@pytest.mark.parametrize("hidden", [torch.inf, torch.nan])
def test_masked_values_do_not_matter(hidden):
    values = torch.tensor([1.0, 3.0, hidden], requires_grad=True)
    mean = masked_mean(values, torch.tensor([True, True, False]))
    mean.backward()
    assert mean == 2
    assert values.grad.tolist() == [0.5, 0.5, 0.0]


@quick
@given(st.integers(0, 2**31), st.integers(1, 12), st.booleans(), st.booleans())
def test_mean_with_padding_and_weights_equals_that_of_torch(seed, size, weighted, ignoring):
    """Cross entropy of some samples, and of the same with padding behind a mask."""
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(size + 5, 4, generator=draw, dtype=torch.float64)
    targets = torch.randint(4, (size + 5,), generator=draw)
    weight = torch.rand(4, generator=draw, dtype=torch.float64) + 0.1 if weighted else None
    options = {"weight": weight, "ignore_index": 2 if ignoring else -100}
    expected = nn.CrossEntropyLoss(**options)(outputs[:size], targets[:size])
    losses = nn.CrossEntropyLoss(**options, reduction="none")(outputs, targets)
    weights = sample_weights(nn.CrossEntropyLoss(**options), targets)
    actual = masked_mean(losses, torch.arange(size + 5) < size, weights)
    if expected.isnan():  # torch divides 0 by 0 where all are ignored
        assert actual == 0
    else:
        torch.testing.assert_close(actual, expected)


def test_every_pixel_of_a_target_map_counts():
    outputs, targets = torch.randn(3, 4, 2, 2), torch.tensor([[[0, 1], [2, 3]]] * 3)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), ignore_index=3)
    losses = F.cross_entropy(outputs, targets, criterion.weight, ignore_index=3, reduction="none")
    actual = masked_mean(losses.flatten(1).mean(1), None, sample_weights(criterion, targets))
    torch.testing.assert_close(actual, criterion(outputs, targets))


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.L1Loss()], ids=str)
def test_other_losses_count_every_sample_once(criterion):
    assert sample_weights(criterion, torch.zeros(3, dtype=torch.int64)) is None


def test_probabilities_as_targets_count_once_as_in_torch():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    assert sample_weights(criterion, torch.full((3, 2), 0.5)) is None


# The squared distance


LAYOUT = RowLayout.from_tensors(
    {"a": torch.empty(2, 3), "b": torch.empty(4), "c": torch.empty(1, 1)}.items()
)


def parts(row):
    return [row[:6].view(2, 3), row[6:10].view(4), row[10:].view(1, 1)]


def test_squared_distance_is_over_all_tensors():
    assert squared_distance(parts(torch.arange(11.0)), parts(torch.ones(11))) == 286


def row_and_leaves():
    row = torch.randn(11, dtype=torch.float64)
    return row, [part.clone().requires_grad_() for part in parts(row)]


def test_squared_distance_of_rows_has_twice_the_difference_as_gradient():
    (row, leaves), centre = row_and_leaves(), torch.randn(11, dtype=torch.float64)
    distance = RowDistance.apply(row, centre, LAYOUT, *leaves)
    torch.testing.assert_close(distance, squared_distance(leaves, parts(centre)))
    (distance * 1.5).backward()
    for leaf, expected in zip(leaves, parts(3 * (row - centre))):
        torch.testing.assert_close(leaf.grad, expected)


def test_row_distance_beside_another_loss_has_the_gradients_of_the_formula():
    (row, leaves), centre = row_and_leaves(), torch.randn(11, dtype=torch.float64)
    plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for actual, distance in (
        (leaves, RowDistance.apply(row, centre, LAYOUT, *leaves)),
        (plain, squared_distance(plain, parts(centre))),
    ):
        (sum(leaf.sin().sum() for leaf in actual) + 0.7 * distance).backward()
    for leaf, expected in zip(leaves, plain):
        torch.testing.assert_close(leaf.grad, expected.grad)


def test_centre_gets_no_gradient():
    centre = torch.zeros(11, requires_grad=True)
    leaves = [part.requires_grad_() for part in parts(torch.ones(11))]
    squared_distance(leaves, parts(centre)).backward()
    assert centre.grad is None


def test_row_distance_can_be_differentiated_twice():
    """The gradient of ‖∇(x³ + 0.7 ‖x − c‖²)‖², which needs the pull's second derivative."""
    (row, leaves), centre = row_and_leaves(), torch.randn(11, dtype=torch.float64)
    plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for actual, distance in (
        (leaves, RowDistance.apply(row, centre, LAYOUT, *leaves)),
        (plain, squared_distance(plain, parts(centre))),
    ):
        loss = sum(leaf.pow(3).sum() for leaf in actual) + 0.7 * distance
        first = torch.autograd.grad(loss, actual, create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
    for leaf, expected in zip(leaves, plain):
        torch.testing.assert_close(leaf.grad, expected.grad)


def test_centre_may_be_a_view_of_many_rows():
    (row, leaves), centres = row_and_leaves(), torch.randn(3, 11, dtype=torch.float64)
    distance = RowDistance.apply(row, centres[1], LAYOUT, *leaves)
    (first, *_) = torch.autograd.grad(distance, leaves, create_graph=True)
    torch.testing.assert_close(first, parts(2 * (row - centres[1]))[0])
    torch.testing.assert_close(distance, (row - centres[1]).square().sum())
