"""The aggregators that count with byzantine uploads: by hand, and against the papers' formulas.

The oracles are plain numpy in float64, written from the formulas: no products of uploads, no pieces
of columns.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from scipy.stats import chisquare
from tables import table_test
from torch.testing import assert_close

import pl_fed.aggregators.smea
from pl_fed.aggregators import (
    CAF,
    MDA,
    SMEA,
    Bulyan,
    ByzantineAwareAggregator,
    CenteredClipping,
    Chain,
    Clipping,
    GeometricMedian,
    KLoss,
    KNorm,
    Krum,
    MeaMed,
    TrimmedMean,
)
from pl_fed.random import generator
from pl_fed.samplers import BySize
from pl_fed.types import RoundContext


def make_context(n, f=0, **more):
    losses = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    fields = {"clients": torch.arange(n), "start_losses": losses, **more}
    return RoundContext(num_byzantine=f, **fields)


def merge(aggregator, rows, f=0, **fields):
    rows = torch.as_tensor(rows)
    return aggregator(rows, torch.ones(len(rows)), make_context(len(rows), f, **fields))


def krum_order(rows, f, squared=True, at_least=0):
    n = len(rows)
    neighbours = max(at_least, n - f - 2)
    scores = []
    for i in range(n):
        distances = sorted(np.linalg.norm(rows[i] - rows[j]) for j in range(n) if j != i)
        scores.append(sum(x**2 if squared else x for x in distances[:neighbours]))
    return sorted(range(n), key=lambda i: (scores[i], i))


def krum(rows, f, selected=1, squared=True):
    return rows[krum_order(rows, f, squared)[:selected]].mean(axis=0)


def mean_around_median(rows, count):
    result = []
    for column in rows.T:
        middle = np.median(column)
        result.append(np.mean(sorted(column, key=lambda x: abs(x - middle))[:count]))
    return np.array(result)


def bulyan(rows, f):
    remaining, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        chosen.append(remaining.pop(krum_order(rows[remaining], f, at_least=1)[0]))
    return mean_around_median(rows[chosen], len(chosen) - 2 * f)


def best_set(rows, f, badness):
    sets = itertools.combinations(range(len(rows)), len(rows) - f)
    return rows[list(min(sets, key=lambda s: badness(rows[list(s)])))].mean(axis=0)


def mda(rows, f):
    return best_set(rows, f, lambda subset: np.linalg.norm(subset[:, None] - subset, axis=2).max())


def smea(rows, f):
    return best_set(rows, f, lambda subset: np.linalg.norm(subset - subset.mean(axis=0), ord=2))


def caf(rows, f):
    counts, best_centre, smallest = np.ones(len(rows)), rows.mean(axis=0), np.inf
    while counts.sum() > len(rows) - 2 * f:
        centre = np.average(rows, axis=0, weights=counts)
        away = rows - centre
        covariance = (counts[:, None] * away).T @ away / counts.sum()
        values, vectors = np.linalg.eigh(covariance)
        if values[-1] < smallest:
            smallest, best_centre = values[-1], centre
        pulls = (away @ vectors[:, -1]) ** 2
        counts = counts * np.maximum(0, 1 - pulls / pulls[counts > 0].max())
    return best_centre


def k_norm(rows, f):
    order = np.argsort(np.linalg.norm(rows, axis=1), kind="stable")
    return rows[order[: len(rows) - f]].mean(axis=0)


def k_loss(rows, f):
    return rows[np.argsort(make_context(len(rows)).start_losses.numpy())[len(rows) - f - 1]]


def centered_clipping(rows, tau, steps, centre):
    for _ in range(steps):
        pulls = []
        for row in rows:
            length = np.linalg.norm(row - centre)
            pulls.append((row - centre) * min(1, tau / length))
        centre = centre + np.mean(pulls, axis=0)
    return centre


ORACLES = {
    "Krum": (Krum(), krum),
    "multi-Krum": (Krum(None), lambda rows, f: krum(rows, f, len(rows) - f)),
    "multi-Krum, not squared": (
        Krum(5, squared=False),
        lambda rows, f: krum(rows, f, 5, squared=False),
    ),
    "Bulyan": (Bulyan(), bulyan),
    "MeaMed": (MeaMed(), lambda rows, f: mean_around_median(rows, len(rows) - f)),
    "MDA": (MDA(), mda),
    "SMEA": (SMEA(), smea),
    "CAF": (CAF(), caf),
    "KNorm": (KNorm(), k_norm),
    "KLoss": (KLoss(), k_loss),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_results_equal_the_formulas(name):
    """CAF without far uploads: in numpy's covariance, 1e30 leaves no digits to the others."""
    aggregator, oracle = ORACLES[name]
    for kind, (n, f) in itertools.product(KINDS, [(7, 0), (7, 1), (12, 2), (15, 3)]):
        if (kind, name) != ("far", "CAF"):
            rows = hostile_uploads(kind, n, f)
            expected = oracle(rows.numpy(), f)
            result = merge(aggregator, rows, f)
            largest, case = np.abs(expected).max(), (kind, n, f)
            assert np.abs(result.numpy() - expected).max() <= 1e-9 * largest, case
            in_float32 = merge(aggregator, rows.float(), f).double()
            assert (in_float32 - result).abs().max() <= 1e-5 * largest, case


@pytest.mark.parametrize("kind", ["random", "together", "mirrored", "a little"])
def test_caf_drops_at_most_twice_the_byzantine_uploads(kind):
    notes = {}
    rows = hostile_uploads(kind, 12, 3)
    merge(CAF(), rows, 3, note=lambda word, number: notes.update({word: float(number)}))
    assert 0 <= notes["dropped"] <= 6


@pytest.mark.parametrize("f", [1, 2, 3])
@pytest.mark.parametrize("own", [True, False])
def test_num_byzantine_of_the_aggregator_overrides_that_of_the_server(f, own):
    rows = hostile_uploads("mirrored", 15, f)
    for kind in (Krum, Bulyan, MeaMed, MDA, SMEA, CAF, KNorm, KLoss):
        result = merge(kind(num_byzantine=f), rows, 0 if own else 5)
        assert torch.equal(result, merge(kind(), rows, f))


@pytest.mark.parametrize(("tau", "steps"), [(2.0, 1), (2.0, 4), (100.0, 1), (0.1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_centered_clipping_equals_the_formula(tau, steps, kind):
    aggregator, centre = CenteredClipping(tau, steps), np.zeros(40)
    for round_number in range(3):
        rows = hostile_uploads(kind, 9, 3, seed=round_number)
        centre = centered_clipping(rows.numpy(), tau, steps, centre)
        result = merge(aggregator, rows).numpy()
        assert np.abs(result - centre).max() <= 1e-12 * max(1, np.abs(centre).max())


# By hand.


@pytest.mark.slow
def test_krum_without_neighbours_selects_the_first_sampled_client_like_dittos_code():
    """n = 10 and f = 8: no neighbour, all scores are 0, and multi-Krum averages n − f = 2."""
    rows, weights = torch.eye(10).double(), torch.ones(10)
    draws = []
    for round in range(600):
        context = RoundContext(round=round, num_byzantine=8, clients=torch.arange(10) * 3)
        (first_id,) = Krum(without_neighbours="first")(rows, weights, context).nonzero().flatten()
        order = torch.randperm(10)
        again = replace(context, clients=context.clients[order])
        first = Krum(without_neighbours="first")(rows[order], weights[order], again)
        assert first.nonzero() == first_id, "for any order of the uploads"
        two = Krum(None, without_neighbours="first")(rows, weights, context)
        assert sorted(two.tolist()) == [0.0] * 8 + [0.5] * 2
        assert two[first_id] == 0.5
        draws.append(int(first_id))
    assert chisquare(torch.tensor(draws).bincount(minlength=10)).pvalue > 0.001
    with pytest.raises(ValueError, match="at least 11 rows for Krum"):
        merge(Krum(), rows, 8)


@pytest.mark.slow
def test_first_client_of_dittos_code_is_sampled_by_size():
    """The sampler draws the cohort by size; the order within the cohort ignores size."""
    sizes = torch.from_numpy(np.random.RandomState(0).lognormal(3, 1, 100) + 10).round().long()
    krum, tenths = Krum(without_neighbours="first"), sizes.argsort(descending=True).view(10, 10)
    counts = torch.zeros(100)
    for round in range(2000):
        cohort = BySize(10).sample(100, sizes, generator(0, "cohort", round))
        context = RoundContext(round=round, num_byzantine=8, clients=cohort)
        counts[int(krum(cohort[:, None].double(), sizes[cohort], context))] += 1
    expected = 2000 * sizes.double() / sizes.sum()
    assert chisquare(counts[tenths].sum(1), expected[tenths].sum(1)).pvalue > 0.001


def test_krum_with_a_neighbour_ignores_the_option_for_no_neighbours():
    rows = torch.tensor([[9.0], [0.0], [1.0]])
    assert merge(Krum(without_neighbours="first"), rows).tolist() == [0.0]


def test_krum_without_squares_selects_another_upload():
    """Two neighbours each. From 0: 2 and 2; from 5: 0.5 and 3.4."""
    rows = torch.tensor([[0.0], [2.0], [-2.0], [5.0], [5.5], [8.4]])
    assert merge(Krum(squared=True), rows, 2).tolist() == [0.0]
    assert merge(Krum(squared=False), rows, 2).tolist() == [5.5]


def test_multi_krum_selects_n_minus_f_uploads():
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [90.0]])
    assert merge(Krum(num_selected=None), rows, 1).tolist() == [1.5]


def test_bulyan_equals_a_hand_computed_example():
    """θ = 5: 3, 4, 2, 1 and 9 or 5 go last; of 1, 2, 3, 4, 5 the β = 3 around 3 are 2, 3, 4."""
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [9.0], [90.0]])
    assert merge(Bulyan(), rows, 1).tolist() == [3.0]


def test_mean_around_the_median_equals_a_hand_computed_example():
    rows = torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 4.0], [4.0, 8.0], [90.0, 16.0]])
    assert merge(MeaMed(), rows, 1).tolist() == [1.75, 3.75]
    expected = [(1 + 2 + (0 + 4) / 2) / 3, (1 + 2 + 4) / 3]
    assert merge(MeaMed(), rows, 2).tolist() == pytest.approx(expected)
    assert merge(MeaMed(), rows, 0).tolist() == pytest.approx([97 / 5, 31 / 5])


def test_mean_around_the_median_averages_two_equally_far_values():
    rows = torch.tensor([[0.0], [3.0], [4.0], [5.0], [8.0]])
    assert merge(MeaMed(), rows, 1).tolist() == [4.0]
    assert merge(MeaMed(), -rows, 1).tolist() == [-4.0]


@pytest.mark.parametrize("change", [-1e-15, 0.0, 1e-15])
def test_rounding_decides_neither_the_mean_around_the_median_nor_the_diameter(change):
    """Nearest-neighbour mixing gives clients with the same neighbours the same row."""
    rows = torch.tensor([[0.1], [0.1], [0.7], [0.7 + change]], dtype=torch.float64)
    assert merge(MeaMed(), rows, 1).item() == pytest.approx(0.4, abs=1e-12)
    assert merge(MDA(), rows[[0, 2, 3, 1]], 1).item() == pytest.approx(0.5, abs=1e-12)


def test_k_norm_equals_a_hand_computed_example():
    rows = torch.tensor([[3.0, 4.0], [0.0, -2.0], [6.0, 0.0], [1.0, 0.0]])
    assert merge(KNorm(), rows, 2).tolist() == [0.5, -1.0]
    assert merge(KNorm(), rows, 3).tolist() == [1.0, 0.0]
    assert merge(KNorm(), rows, 0).tolist() == [2.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k_norm_breaks_ties_of_clipped_uploads_by_the_smallest_client_id(dtype):
    rows = torch.tensor([[3, 5], [1, 2], [5, 1], [2, 7], [6, 1], [7, 3]], dtype=dtype)
    clipped = rows / rows.norm(dim=1, keepdim=True)
    merged = merge(Chain([Clipping(1.0)], KNorm(3)), rows)
    assert_close(merged, clipped[:3].mean(0))


def test_k_norm_breaks_ties_by_the_smallest_client_id():
    rows = torch.tensor([[1.0], [-1.0]])
    for clients, expected in (([0, 1], 1.0), ([1, 0], -1.0)):
        assert merge(KNorm(), rows, 1, clients=torch.tensor(clients)).tolist() == [expected]


def test_k_loss_equals_a_hand_computed_example():
    rows, losses = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0.5, 4.0, 0.75])
    for f, expected in ((0, 2.0), (1, 3.0), (2, 1.0)):
        assert merge(KLoss(), rows, f, start_losses=losses).tolist() == [expected]


def test_k_loss_breaks_ties_by_the_smallest_client_id():
    rows, losses = torch.tensor([[1.0], [2.0]]), torch.tensor([7.0, 7.0])
    for clients, expected in (([0, 1], 2.0), ([1, 0], 1.0)):
        fields = {"start_losses": losses, "clients": torch.tensor(clients)}
        assert merge(KLoss(), rows, 0, **fields).tolist() == [expected]


@pytest.mark.parametrize("losses", [[1.0, 2.0], [1.0, 2.0, torch.nan]])
def test_k_loss_needs_losses(losses):
    with pytest.raises(ValueError, match=r"start_losses` to be finite numbers.* for KLoss"):
        merge(KLoss(), torch.ones(3, 1), start_losses=torch.tensor(losses))


def test_minimum_diameter_equals_a_hand_computed_example():
    rows = torch.tensor([[0.0], [4.0], [6.0], [9.0], [90.0]])
    assert merge(MDA(), rows, 1).tolist() == [4.75]
    assert merge(MDA(), rows, 2).tolist() == [pytest.approx(19 / 3)]


def test_minimum_diameter_breaks_ties_by_the_smallest_client_ids():
    rows = torch.tensor([[2.0], [1.0], [0.0]])
    assert merge(MDA(), rows, 1).tolist() == [1.5]
    assert merge(MDA(), rows, 1, clients=torch.tensor([2, 1, 0])).tolist() == [0.5]


def test_too_many_byzantine_uploads_for_minimum_diameter_are_refused():
    with pytest.raises(ValueError, match=r"at most 20 for MDA.* but got 21"):
        merge(MDA(), torch.zeros(43, 1), 21)


def test_smallest_variation_equals_a_hand_computed_example():
    """Without 8 the rest varies along one axis by 2 / 3; without another one, by more."""
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [2.0, 8.0]])
    for aggregator in (SMEA(), CAF()):
        result = merge(aggregator, rows, 1)
        assert_close(result, torch.tensor([2.0, 0.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("numbers", [1, 200])
def test_sets_in_small_pieces_give_the_same_result(monkeypatch, numbers):
    rows = hostile_uploads("mirrored", 9, 3)
    expected = merge(SMEA(), rows, 3)
    monkeypatch.setattr(pl_fed.aggregators.smea, "_BATCH_NUMBERS", numbers)
    assert torch.equal(merge(SMEA(), rows, 3), expected)


def test_too_many_sets_for_smea_are_refused():
    with pytest.raises(ValueError, match="n = 100 with f = 3: 161700 sets"):
        merge(SMEA(), torch.zeros(100, 1), 3)
    assert SMEA().breakdown(100) == 1


@pytest.mark.parametrize("change", [-1e-14, 1e-14])
def test_filter_leaves_no_weight_to_the_twin_of_the_farthest_upload(change):
    rows = [[0, 1], [1, 0], [2, 2], [0, 3], [30.1, 20.7], [30.1, 20.7]]
    rows = torch.tensor(rows, dtype=torch.float64)
    expected = merge(CAF(), rows, 2)
    rows[5] += change
    assert_close(merge(CAF(), rows, 2), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [torch.full((5, 3), 2.5), torch.zeros(5, 3)])
def test_equal_uploads_are_merged_to_that_upload(rows):
    assert torch.equal(merge(CAF(), rows, 2), rows[0])


def test_filters_without_byzantine_uploads_equal_the_mean():
    rows = hostile_uploads("random", 8, 0)
    for aggregator in (CAF(), SMEA(), MDA(), MeaMed(), KNorm()):
        assert_close(merge(aggregator, rows), rows.mean(0), rtol=1e-12, atol=1e-12)


# The geometric median.


def test_the_geometric_median_of_a_triangle_is_its_fermat_point():
    """All angles below 120°: the sides are seen from it under 120°, so the unit vectors cancel."""
    rows = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    away = rows - merge(GeometricMedian(), rows)
    assert (away / away.norm(dim=1, keepdim=True)).sum(0).norm() < 1e-9


def test_the_geometric_median_of_a_blunt_triangle_is_its_blunt_corner():
    rows = torch.tensor([[0.0, 0.0], [10.0, 1.0], [-10.0, 1.0]], dtype=torch.float64)
    assert merge(GeometricMedian(), rows).norm() < 1e-5


def test_geometric_median_is_the_upload_of_a_majority():
    rows = torch.tensor([[3.0, -4.0]] * 4 + [[1e30, 0.0], [0.0, -1e30], [-1e20, 5.0]])
    assert_close(merge(GeometricMedian(), rows), rows[0], rtol=0, atol=1e-5)


def test_the_geometric_median_on_a_line_is_the_median():
    rows = torch.tensor([[5.0], [-1.0], [2.0], [300.0], [0.0]], dtype=torch.float64)
    assert_close(merge(GeometricMedian(), rows).item(), 2.0, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "f"), [(3, 1), (9, 4), (21, 10), (60, 29)])
def test_the_unit_vectors_to_the_geometric_median_cancel(n, f, kind):
    rows = hostile_uploads(kind, n, f)
    result = merge(GeometricMedian(), rows)
    away = rows - result
    lengths = away.norm(dim=1, keepdim=True)
    pull = (away / lengths.clamp(min=1e-6)).sum(0).norm()
    assert pull < 1e-6 or lengths.min() < 1e-5  # or it is one of them


def test_the_geometric_median_moves_with_the_uploads():
    rows = hostile_uploads("random", 11, 0)
    shift = torch.linspace(-100, 100, 40, dtype=torch.float64)
    assert_close(
        merge(GeometricMedian(), rows + shift),
        merge(GeometricMedian(), rows) + shift,
        rtol=1e-10,
        atol=1e-10,
    )


def weiszfeld_in_numpy(rows, shares, smoothing, steps, z):
    for _ in range(steps):
        nearer = shares / np.maximum(smoothing, np.linalg.norm(rows - z, axis=1))
        z = nearer @ rows / nearer.sum()
    return z


@pytest.mark.parametrize("start", ["mean", "zero"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_weiszfeld_steps_equal_the_formula(start, weighting):
    for kind, steps in itertools.product(KINDS, (1, 2, 7)):
        check_weiszfeld_steps(kind, steps, start, weighting)


def check_weiszfeld_steps(kind, steps, start, weighting):
    """Check the geometric median after some steps against numpy."""
    rows, samples = hostile_uploads(kind, 10, 3), torch.arange(1, 11)
    shares = np.full(10, 0.1) if weighting == "uniform" else samples.numpy() / 55
    begin = shares @ rows.numpy() if start == "mean" else np.zeros(40)
    expected = weiszfeld_in_numpy(rows.numpy(), shares, 0.5, steps, begin)
    aggregator = GeometricMedian(0.5, steps, start, weighting)
    result = aggregator(rows, samples, make_context(10)).numpy()
    assert np.abs(result - expected).max() <= 1e-9 * np.abs(expected).max()


def test_samples_weigh_in_the_geometric_median():
    rows, samples = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([1, 1, 3])
    result = GeometricMedian(weighting="samples")(rows, samples, make_context(3))
    assert_close(result, torch.tensor([2.0]), rtol=0, atol=1e-5)


# Memory.


def test_centered_clipping_moves_at_most_tau_per_step():
    rows = torch.full((5, 100), 1e30)
    aggregator = CenteredClipping(tau=3.0, num_steps=2)
    for rounds in (1, 2, 3):
        assert_close(merge(aggregator, rows).norm().item(), 6.0 * rounds, rtol=1e-5, atol=0)


def test_the_memory_of_centered_clipping_is_loaded_before_and_after_a_round():
    rows = hostile_uploads("random", 5, 0)
    used, fresh = CenteredClipping(1.0), CenteredClipping(1.0)
    unused = fresh.state_dict()
    merge(used, rows)
    fresh.load_state_dict(used.state_dict())
    assert torch.equal(merge(fresh, rows), merge(used, rows))
    used.load_state_dict(unused)
    assert torch.equal(merge(used, rows), merge(CenteredClipping(1.0), rows))


def test_the_memory_of_centered_clipping_is_loaded_within_a_module():
    rows = hostile_uploads("random", 5, 0)
    used, fresh = (torch.nn.ModuleList([CenteredClipping(1.0)]) for _ in range(2))
    merge(used[0], rows)
    fresh.load_state_dict(used.state_dict())
    assert torch.equal(fresh[0].centre, used[0].centre)


def test_uploads_with_nan_do_not_change_the_memory():
    aggregator, rows = CenteredClipping(1.0), torch.ones(3, 2)
    before = merge(aggregator, rows).clone()
    with pytest.raises(ValueError, match=r"NaN or infinity in rows \[1\]"):
        merge(aggregator, torch.tensor([[1.0, 1.0], [torch.nan, 1.0], [1.0, 1.0]]))
    assert torch.equal(aggregator.centre, before)


def test_changing_the_result_does_not_change_the_memory():
    changed, unchanged = CenteredClipping(1.0), CenteredClipping(1.0)
    for round_number in range(3):
        rows = hostile_uploads("random", 5, 0, seed=round_number)
        result = merge(changed, rows)
        assert torch.equal(result, merge(unchanged, rows))
        result.fill_(7e7)


def test_uploads_of_another_length_are_refused():
    aggregator = CenteredClipping(1.0)
    merge(aggregator, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"\[n, 2\] for CenteredClipping.* got shape \[3, 4\]"):
        merge(aggregator, torch.ones(3, 4))


# Notes, refusals, breakdown numbers.


@pytest.mark.parametrize(
    ("aggregator", "f", "expected"),
    [
        (Krum(), 2, {"dropped": 14}),
        (Krum(4), 2, {"dropped": 11}),
        (Krum(None), 2, {"dropped": 2}),
        (Bulyan(), 2, {"dropped": 4}),
        (MDA(), 2, {"dropped": 2}),
        (SMEA(), 2, {"dropped": 2}),
        (KNorm(), 2, {"dropped": 2}),
        (KLoss(), 2, {"dropped": 14}),
        (CenteredClipping(tau=1e3), 2, {"clipped": 2}),
        (CenteredClipping(tau=1e-3), 2, {"clipped": 15}),
        (MeaMed(), 2, {}),
        (TrimmedMean(), 2, {}),
        (GeometricMedian(), 2, {}),
    ],
)
def test_aggregators_note_numbers_of_selected_and_clipped_uploads(aggregator, f, expected):
    notes = {}
    rows = hostile_uploads("far", 15, 2)
    merge(aggregator, rows, f, note=lambda word, number: notes.update({word: float(number)}))
    assert notes == expected


@pytest.mark.parametrize(
    ("kind", "n", "f", "smallest"),
    [
        (Bulyan, 6, 1, 7),
        (Bulyan, 2, 0, 3),
        (MeaMed, 4, 2, 5),
        (MDA, 4, 2, 5),
        (SMEA, 4, 2, 5),
        (CAF, 4, 2, 5),
        (KNorm, 2, 2, 3),
        (KLoss, 2, 2, 3),
    ],
)
def test_smallest_number_of_uploads_is_exact(kind, n, f, smallest):
    with pytest.raises(ValueError, match=f"at least {smallest} rows for {kind.__name__} but got"):
        merge(kind(), torch.ones(n, 2), f)
    assert merge(kind(), torch.ones(smallest, 2), f).tolist() == [1.0, 1.0]


@table_test(
    ("kind", "name", "value"),
    [
        *[(k, "num_byzantine", -1) for k in (Bulyan, MeaMed, MDA, SMEA, CAF, KNorm, KLoss)],
        (CenteredClipping, "tau", 0.0),
        (CenteredClipping, "num_steps", 0),
        (GeometricMedian, "smoothing", 0.0),
        (GeometricMedian, "num_steps", 0),
        (GeometricMedian, "start", "median"),
        (GeometricMedian, "weighting", "size"),
        (Krum, "without_neighbours", "last"),
    ],
)
def test_arguments_out_of_range_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be .* but got"):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("aggregator", "at_10", "at_30"),
    [
        (Krum(), 3, 13),
        (Krum(None), 3, 13),
        (Krum(9), 1, 13),
        (Krum(num_byzantine=2), 2, 2),
        (Krum(num_byzantine=6), 2, 6),
        (Bulyan(), 1, 6),
        (Bulyan(1), 1, 1),
        (MeaMed(), 4, 14),
        (KNorm(2), 2, 2),
        (KLoss(), 0, 0),
        (MDA(), 4, 14),
        (CAF(), 3, 9),
        (SMEA(), 4, 4),
        (GeometricMedian(), 4, 14),
        (GeometricMedian(num_steps=3), 0, 0),
        (GeometricMedian(weighting="samples"), 0, 0),
        (CenteredClipping(), 0, 0),
    ],
)
def test_breakdown_numbers_equal_the_theory(aggregator, at_10, at_30):
    assert (aggregator.breakdown(10), aggregator.breakdown(30)) == (at_10, at_30)


def test_krum_selects_colluders_beyond_its_breakdown_number():
    """n − f − 2 = 2, and three are each other's neighbours: as the smaller breakdown says."""
    far = torch.full((3, 40), 1e9)
    assert Krum(num_byzantine=5).breakdown(9) == 2
    for colluders, chosen in ((3, True), (2, False)):
        honest = hostile_uploads("random", 9 - colluders, 0)
        result = merge(Krum(num_byzantine=5), torch.cat([honest, far[:colluders]]))
        assert (result.max() == 1e9) == chosen


def test_byzantine_aggregator_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ByzantineAwareAggregator()
