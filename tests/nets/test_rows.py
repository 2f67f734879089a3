"""A model as a flat row: its layout, the tie to the module, and what is frozen."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pl_fed.nets.rows import (
    Row,
    RowLayout,
    buffers_outside_rows,
    copy_trainable,
    finite_rows,
    frozen_modules,
    running_statistics,
    trainable_parameters,
)


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def make_row(module):
    tensors = trainable_parameters(module)
    return Row(tensors, RowLayout.from_tensors(tensors.items()))


def flatten(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# Layout


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), max_size=2),
)
def test_views_tile_the_row_without_copies(shapes, leading):
    layout = RowLayout.from_tensors((str(i), torch.empty(shape)) for i, shape in enumerate(shapes))
    rows = torch.arange(float(torch.Size(leading).numel() * layout.numel))
    rows = rows.view(*leading, layout.numel)
    views = layout.views(rows)
    assert [tuple(view.shape) for view in views.values()] == [(*leading, *s) for s in shapes]
    pieces = [view.reshape(*leading, -1) for view in views.values()]
    assert torch.equal(torch.cat(pieces, dim=-1), rows)
    if not leading:
        assert all(map(torch.equal, views.values(), layout.pieces(rows)))
    for view in views.values():
        view.zero_()
    assert not rows.any()


def test_layout_has_the_order_of_parameters_and_buffers():
    assert RowLayout.from_parameters(net()).names == (
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias",
    )  # fmt: skip
    assert RowLayout.from_buffers(net()).names == ("1.running_mean", "1.running_var")


# The tie between a row and its module


def test_row_contains_the_parameters_of_the_module():
    module = net()
    before = flatten(module)
    assert torch.equal(make_row(module).data, before)
    assert torch.equal(flatten(module), before)


def test_row_and_module_share_memory():
    module = net()
    row = make_row(module)
    row.data.fill_(3.0)
    assert all((parameter == 3).all() for parameter in module.parameters())
    module(torch.randn(4, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert torch.equal(row.data, flatten(module))
    assert not (row.data == 3).all()


def test_parameters_stay_the_same_objects():
    module = net()
    before = list(module.parameters())
    make_row(module).data.zero_()
    assert all(a is b for a, b in zip(before, module.parameters()))
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in before)


def test_loading_a_state_keeps_the_shared_memory():
    module, other = net(), net()
    row = make_row(module)
    row.data.zero_()
    module.load_state_dict(other.state_dict())
    assert torch.equal(row.data, flatten(other))


def test_row_is_restored_after_a_change_of_dtype():
    module = net()
    row = make_row(module)
    before = row.data.double()
    module.double()
    assert row.data.dtype == torch.float64
    assert torch.equal(row.data, before)
    row.data.zero_()
    assert not flatten(module).any()


def test_row_of_no_tensors_is_empty():
    assert Row({}, RowLayout.from_tensors({}.items())).data.shape == (0,)


def test_copied_module_has_a_separate_row():
    module = net()
    make_row(module).data.fill_(1.0)
    copied = copy.deepcopy(module)
    make_row(copied).data.fill_(2.0)
    assert (flatten(module) == 1).all()
    assert (flatten(copied) == 2).all()


# What is trained, and what is frozen


def test_frozen_parameters_are_in_no_row():
    module = net()
    module[0].requires_grad_(False)
    assert list(trainable_parameters(module)) == ["1.weight", "1.bias", "2.weight", "2.bias"]


def test_shared_parameters_occur_once():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    assert list(trainable_parameters(module)) == ["0.weight", "0.bias", "1.bias"]


def test_net_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match=r"`net` to have at least one .* but got Sequential"):
        trainable_parameters(net().requires_grad_(False))


def test_parameters_of_two_dtypes_are_refused():
    module = net()
    module[0].half()
    with pytest.raises(ValueError, match=r"one dtype but got .*float16.*float32"):
        trainable_parameters(module)


def test_complex_parameters_are_told_to_be_kept_as_real_ones():
    net = nn.Linear(2, 2)
    net.modes = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"got complex ones \(modes\): keep real and imaginary"):
        trainable_parameters(net)


def test_frozen_modules_are_the_largest_frozen_parts():
    module = nn.Sequential(net(), nn.ReLU(), net())
    module[0].requires_grad_(False)
    module[2][1].requires_grad_(False)
    assert frozen_modules(module) == [module[0], module[2][1]]


def test_running_statistics_exclude_frozen_parts():
    body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False))
    module = nn.Sequential(body.requires_grad_(False), nn.BatchNorm1d(2, affine=False), net())
    assert list(running_statistics(module)) == [
        "1.running_mean", "1.running_var", "2.1.running_mean", "2.1.running_var",
    ]  # fmt: skip


def test_running_statistics_exclude_unsaved_and_integer_buffers():
    module = net()
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    module.register_buffer("table", torch.zeros(2, dtype=torch.int64))
    assert list(running_statistics(module)) == ["1.running_mean", "1.running_var"]


def test_copy_shares_exactly_the_frozen_tensors():
    module = net()
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    copied = copy_trainable(module)
    assert copied[0] is module[0]
    assert copied[2].weight is module[2].weight
    assert copied[2].bias is not module[2].bias
    assert copied[1] is not module[1]
    assert copied[1].running_mean is not module[1].running_mean


def test_copy_keeps_shared_parameters_shared():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    copied = copy_trainable(module)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not module[0].weight


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_rows_are_detected(broken):
    rows = torch.ones(4, 6)
    rows[2, 3] = broken
    assert finite_rows(rows).tolist() == [True, True, False, True]


def test_opposite_infinities_are_not_finite_and_large_numbers_are():
    largest = torch.finfo(torch.float32).max
    rows = torch.tensor([[torch.inf, -torch.inf], [largest, largest], [largest, -largest]])
    assert finite_rows(rows).tolist() == [False, True, True]


def test_empty_rows_are_finite():
    assert finite_rows(torch.empty(0, 3)).tolist() == []
    assert finite_rows(torch.empty(2, 0)).tolist() == [True, True]


def test_running_statistics_exclude_weights_of_a_loss():
    weight = torch.tensor([1.0, 2.0])
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.CrossEntropyLoss(weight))
    assert list(running_statistics(net)) == ["1.running_mean", "1.running_var"]
    assert "2.weight" not in buffers_outside_rows(net)
