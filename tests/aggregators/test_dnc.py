"""DnC against its paper, written with numpy's singular value decomposition, and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import table_test
from torch.testing import assert_close

from pl_fed.aggregators import Chain, Clipping, DnC, Mean
from pl_fed.random import generator
from pl_fed.types import RoundContext


def context(n, byzantine, **fields):
    return RoundContext(num_byzantine=byzantine, clients=torch.arange(n), **fields)


def make_uploads(attack, n, d=60, seed=0):
    """The first fifth is hostile."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64) + 0.3
    hostile, honest = rows[: n // 5], rows[n // 5 :]
    if attack == "far":
        hostile[:] = 1e3
    elif attack == "very far":
        hostile[:] = 1e30
    elif attack == "a little is enough":
        hostile[:] = honest.mean(0) - 1.5 * honest.std(0)
    elif attack == "opposite":
        hostile[:] = -2 * honest.mean(0)
    return rows


def paper_dnc(rows, byzantine, coordinate_sets, fraction):
    """Algorithm 2, line by line, on the coordinates that each iteration draws."""
    good = set(range(len(rows)))
    for coordinates in coordinate_sets:
        columns = rows[:, coordinates]
        centred = columns - columns.mean(0)
        direction = np.linalg.svd(centred)[2][0]
        scores = (centred @ direction) ** 2
        good &= set(scores.argsort(kind="stable")[: int(len(rows) - fraction * byzantine)].tolist())
    return rows[sorted(good)].mean(0), good


@pytest.mark.parametrize("attack", ["none", "far", "a little is enough", "opposite"])
@pytest.mark.parametrize("n", [10, 25])
@pytest.mark.parametrize(("iterations", "fraction"), [(1, 1.0), (1, 1.5), (3, 1.0), (2, 0.5)])
def test_results_equal_the_paper(attack, n, iterations, fraction):
    rows, byzantine = make_uploads(attack, n), n // 5
    now = context(n, byzantine, seed=7, round=4)
    coordinate_sets = [
        torch.randperm(60, generator=generator(7, "dnc", 4, i))[:20].numpy()
        for i in range(iterations)
    ]
    expected, good = paper_dnc(rows.numpy(), byzantine, coordinate_sets, fraction)
    assert good, "else the paper says nothing"
    notes = []
    now = replace(now, note=lambda *entry: notes.append(entry))
    result = DnC(iterations, fraction, 20)(rows, torch.ones(n), now)
    assert_close(result, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)
    assert notes == [("dropped", n - len(good))]


@pytest.mark.parametrize("attack", ["none", "far", "a little is enough", "opposite"])
@pytest.mark.parametrize("coordinates", [None, 60, 10_000])
def test_results_on_all_coordinates_equal_the_paper(attack, coordinates):
    rows = make_uploads(attack, 20)
    expected, _ = paper_dnc(rows.numpy(), 4, [np.arange(60)], 1.0)
    result = DnC(num_coordinates=coordinates)(rows, torch.ones(20), context(20, 4))
    assert_close(result, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attack", ["far", "very far", "a little is enough", "opposite"])
def test_forged_uploads_are_left_out(attack):
    rows = make_uploads(attack, 20, d=400)
    merged = DnC(num_coordinates=100)(rows, torch.ones(20), context(20, 4))
    assert_close(merged, rows[4:].mean(0))


def test_result_equals_a_hand_computed_example():
    """The mean is (0, 1), and the most variance along the second axis: scores 1, 1, 1, 9."""
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
    merged = DnC()(rows, torch.ones(4), context(4, 1))
    assert merged.tolist() == [0.0, 0.0]
    # two are left out, and of the three equal scores that of the largest id
    notes = []
    now = replace(
        context(4, 2), clients=torch.tensor([3, 9, 4, 5]), note=lambda *w: notes.append(w)
    )
    assert DnC()(rows, torch.ones(4), now).tolist() == [0.5, 0.0]
    assert notes == [("dropped", 2)]


def test_number_of_uploads_left_out_has_no_rounding_error():
    """0.1 · 3 is a little more than 0.3 in floating point, and three of ten are three."""
    notes = []
    now = replace(context(20, 10), note=lambda *words: notes.append(words))
    DnC(num_coordinates=None, filter_fraction=0.1 * 3)(torch.randn(20, 4), torch.ones(20), now)
    assert notes == [("dropped", 3)]


def test_ties_are_broken_by_the_smallest_client_ids():
    """Of three that are equal, and equally far off, two are left out."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(8, 33, generator=draw, dtype=torch.float64)
    rows[[1, 4, 6]] = 20 * torch.randn(33, generator=draw, dtype=torch.float64)
    for clients, smallest_id in (
        (range(8), 1),
        (range(7, -1, -1), 6),
        ([5, 9, 1, 2, 0, 3, 7, 8], 4),
    ):
        now = replace(context(8, 2), clients=torch.tensor(list(clients)))
        good = [k for k in range(8) if k not in (1, 4, 6) or k == smallest_id]
        assert_close(DnC()(rows, torch.ones(8), now), rows[good].mean(0))


def test_no_byzantine_client_gives_the_mean():
    rows = make_uploads("far", 10)
    assert_close(DnC()(rows, torch.ones(10), context(10, 0)), rows.mean(0))
    assert_close(DnC(num_byzantine=0)(rows, torch.ones(10), context(10, 3)), rows.mean(0))


@pytest.mark.slow
def test_most_frequently_good_uploads_count_if_none_is_always_good():
    """Each upload is an outlier on another coordinate; an iteration draws one coordinate."""
    rows, rounds = 100 * torch.eye(4, dtype=torch.float64), 0
    for round in range(60):
        draws = [
            int(torch.randperm(4, generator=generator(0, "dnc", round, i))[0]) for i in range(9)
        ]
        bad = torch.tensor(draws).bincount(minlength=4)
        merged = DnC(9, 1.0, 1)(rows, torch.ones(4), context(4, 1, round=round))
        assert_close(merged, rows[bad == bad.min()].mean(0))
        rounds += int(bad.min() > 0)
    assert rounds > 5, "rounds in which no upload is always good"


@pytest.mark.slow
def test_coordinates_are_drawn_by_seed_round_and_iteration():
    """DnC drops an outlier on one coordinate if it draws that coordinate."""
    rows = torch.zeros(5, 40, dtype=torch.float64)
    rows[4, 0] = 0.001
    rows[0, 1:] = torch.linspace(0.1, 1.0, 39)
    hits = [
        float(DnC(num_coordinates=2)(rows, torch.ones(5), context(5, 1, round=round))[0]) == 0
        for round in range(200)
    ]
    expected = [
        set(torch.randperm(40, generator=generator(0, "dnc", round, 0))[:2].tolist()) == {0}
        for round in range(200)
    ]
    assert not any(hits)
    assert not any(expected), "the other coordinate always has more variance"
    selected = [bool(DnC(num_coordinates=1)(rows, torch.ones(5), context(5, 1, round=r))[0] == 0)
            for r in range(200)]  # fmt: skip
    repeated = [
        torch.randperm(40, generator=generator(0, "dnc", r, 0))[0].item() == 0 for r in range(200)
    ]
    assert selected == repeated
    assert 0 < sum(selected) < 20


@table_test(("n", "byzantine", "fraction"), [(2, 2, 1.0), (4, 3, 1.3), (1, 1, 0.1)])
def test_too_few_uploads_are_an_error_that_names_the_numbers(n, byzantine, fraction):
    num_dropped = math.ceil(fraction * byzantine)
    match = (
        f"more than {num_dropped} rows, "
        f"because DnC .* c = {fraction} and f = {byzantine}, but got {n}"
    )
    with pytest.raises(ValueError, match=match):
        DnC(filter_fraction=fraction)(torch.zeros(n, 2), torch.ones(n), context(n, byzantine))


def test_clipping_reveals_the_upload_hidden_by_a_longer_upload():
    """As the docstring says: nothing is promised."""
    rows = make_uploads("none", 20)
    rows[0], rows[1] = 0, 0
    rows[0, 0], rows[1, 1] = 1e30, 1e12
    merged = DnC()(rows, torch.ones(20), context(20, 2))
    assert merged.norm() > 1e9
    merged = Chain([Clipping()], DnC())(rows, torch.ones(20), context(20, 2))
    assert merged.norm() < rows[2:].norm(dim=1).max()
    assert DnC().breakdown(20) == Chain([Clipping()], Mean()).breakdown(20) == 0


@table_test(
    ("arguments", "error"),
    [
        ({"num_iterations": 0}, ValueError),
        ({"filter_fraction": 0.0}, ValueError),
        ({"num_coordinates": 0}, ValueError),
        ({"num_coordinates": 0.5}, TypeError),
        ({"num_byzantine": -1}, ValueError),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, error):
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=rf"Expected argument `{name}` to be .* but got {value}\."):
        DnC(**arguments)
