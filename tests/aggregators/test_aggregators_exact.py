"""Small numbers that can be checked by hand, and numpy."""

import numpy as np
import pytest
import torch
from tables import table_test
from torch.testing import assert_close

from pl_fed.aggregators import CRFL, Aggregator, Krum, Mean, Median, TrimmedMean
from pl_fed.types import RoundContext

UPLOADS = torch.tensor([[1.0, 10.0], [2.0, -4.0], [6.0, 0.0]])
SAMPLES = torch.tensor([1, 1, 2])
ROUND = RoundContext()


def random_uploads(n, d=257):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n))


def test_mean_counts_each_client_once():
    assert torch.equal(Mean()(UPLOADS, SAMPLES, ROUND), torch.tensor([3.0, 2.0]))


def test_mean_by_samples():
    assert torch.equal(Mean("samples")(UPLOADS, SAMPLES, ROUND), torch.tensor([3.75, 1.5]))


def test_mean_by_samples_reads_the_proportions_only():
    once = Mean("samples")(UPLOADS, SAMPLES, ROUND)
    assert torch.equal(Mean("samples")(UPLOADS, SAMPLES * 0.125, ROUND), once)


def test_client_without_samples_has_weight_zero():
    uploads = torch.tensor([[1.0], [3.0], [1e30]])
    merged = Mean("samples")(uploads, torch.tensor([1, 1, 0]), ROUND)
    assert torch.equal(merged, torch.tensor([2.0]))


def test_median_of_an_odd_number_of_uploads_is_the_middle_value():
    assert torch.equal(Median()(UPLOADS, SAMPLES, ROUND), torch.tensor([2.0, 0.0]))


def test_median_of_an_even_number_of_uploads_is_the_mean_of_the_middle_two_values():
    uploads = torch.cat([UPLOADS, torch.tensor([[100.0, 4.0]])])
    assert torch.equal(Median()(uploads, torch.ones(4), ROUND), torch.tensor([4.0, 2.0]))


def test_median_of_large_values_does_not_overflow():
    uploads = torch.tensor([[3e38], [3e38], [-3e38], [3.2e38]])
    assert_close(Median()(uploads, torch.ones(4), ROUND), torch.tensor([3e38]))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 10, 50])
def test_mean_and_median_equal_numpy(n):
    uploads, samples = random_uploads(n), torch.arange(1, n + 1)
    rows = uploads.double().numpy()
    examples = {
        Mean(): rows.mean(axis=0),
        Mean("samples"): np.average(rows, axis=0, weights=samples.numpy()),
        Median(): np.median(rows, axis=0),
    }
    for aggregator, expected in examples.items():
        merged = aggregator(uploads, samples, ROUND).double()
        assert_close(merged, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def numpy_krum(rows, clients, byzantine, selected):
    """The paper, word for word."""
    n = len(rows)
    scores = []
    for i in range(n):
        distances = sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append((sum(distances[: n - byzantine - 2]), clients[i], i))
    return rows[[i for *_, i in sorted(scores)[:selected]]].mean(axis=0)


@pytest.mark.parametrize(("n", "byzantine"), [(3, 0), (7, 2), (7, 4), (20, 6), (20, 17)])
@pytest.mark.parametrize("selected", [1, 2, 3])
def test_krum_equals_numpy(n, byzantine, selected):
    uploads = random_uploads(n)
    clients = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    expected = numpy_krum(uploads.double().numpy(), clients.tolist(), byzantine, selected)
    expects = RoundContext(num_byzantine=byzantine, clients=clients)
    context = RoundContext(num_byzantine=0, clients=clients)
    for merged in (
        Krum(selected)(uploads, torch.ones(n), expects),
        Krum(selected, byzantine)(uploads, torch.ones(n), context),
    ):
        assert_close(merged.double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_krum_equals_a_hand_computed_example():
    """Neighbours: n − f − 2 = 2. Scores 5, 2, 5, 130, ...: the middle one of the three."""
    uploads = torch.tensor([[0.0], [1.0], [2.0], [10.0], [20.0]])
    context = RoundContext(num_byzantine=1, clients=torch.arange(5))
    assert Krum()(uploads, torch.ones(5), context).tolist() == [1.0]
    assert Krum(num_selected=3)(uploads, torch.ones(5), context).tolist() == [1.0]


def test_krum_breaks_ties_by_the_smallest_client_id():
    """With one neighbour, two mutual nearest neighbours have the same score, always."""
    uploads = torch.tensor([[5.0], [0.0], [1.0]])
    for clients, expected in (([0, 8, 3], 1.0), ([0, 3, 8], 0.0)):
        context = RoundContext(num_byzantine=0, clients=torch.tensor(clients))
        assert Krum()(uploads, torch.ones(3), context).tolist() == [expected]


@pytest.mark.parametrize("largest", [1e18, 1e30, 3e38])
def test_krum_withstands_the_largest_uploads(largest):
    uploads = torch.cat([random_uploads(5), torch.full((2, 257), largest)])
    uploads[5] *= -1
    context = RoundContext(num_byzantine=2, clients=torch.arange(7))
    clean = RoundContext(num_byzantine=0, clients=torch.arange(5))
    merged = Krum()(uploads, torch.ones(7), context)
    assert torch.equal(merged, Krum()(uploads[:5], torch.ones(5), clean))


def test_krum_is_exact_far_from_the_origin():
    """In float32 the products of such rows would have lost their differences."""
    uploads = 1000 + torch.tensor([[0.0, 0.0], [0.125, 0.0], [0.25, 0.25], [9.0, 9.0]])
    context = RoundContext(num_byzantine=1, clients=torch.tensor([3, 2, 1, 0]))
    assert Krum()(uploads, torch.ones(4), context).tolist() == [1000.125, 1000.0]


def test_krum_equals_numpy_on_many_coordinates():
    uploads = random_uploads(6, 40_000)
    uploads[0, -1] = 1e4  # beyond the columns that are taken at a time
    context = RoundContext(num_byzantine=1, clients=torch.arange(6))
    expected = numpy_krum(uploads.double().numpy(), range(6), 1, 1)
    merged = Krum()(uploads, torch.ones(6), context)
    assert_close(merged.double(), torch.from_numpy(expected), rtol=0, atol=0)


@table_test(("n", "byzantine"), [(3, 1), (10, 8), (1, 0)])
def test_too_few_uploads_for_krum_are_an_error_that_names_the_numbers(n, byzantine):
    context = RoundContext(num_byzantine=byzantine, clients=torch.arange(n))
    message = rf"at least {byzantine + 3} rows for Krum.* f = {byzantine}, but got {n}"
    with pytest.raises(ValueError, match=message):
        Krum()(torch.zeros(n, 2), torch.ones(n), context)


def test_selecting_more_uploads_than_exist_is_an_error():
    with pytest.raises(
        ValueError, match=r"at least 4 rows for Krum but got 3: use a larger cohort"
    ):
        Krum(num_selected=4)(torch.zeros(3, 2), torch.ones(3), ROUND)


@pytest.mark.parametrize(("n", "trimmed"), [(1, 0), (3, 1), (4, 1), (10, 4), (50, 10)])
def test_trimmed_mean_equals_numpy(n, trimmed):
    uploads = random_uploads(n)
    expected = np.sort(uploads.double().numpy(), axis=0)[trimmed : n - trimmed].mean(axis=0)
    expects = RoundContext(num_byzantine=trimmed)
    for aggregator, context in ((TrimmedMean(trimmed), ROUND), (TrimmedMean(), expects)):
        merged = aggregator(uploads, torch.ones(n), context).double()
        assert_close(merged, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_trimmed_mean_equals_a_hand_computed_example():
    merged = TrimmedMean(1)(torch.cat([UPLOADS, UPLOADS * 3]), torch.ones(6), ROUND)
    assert merged.tolist() == [4.25, 0.0 + (10 - 4) / 4]


@table_test(("n", "trimmed"), [(2, 1), (4, 2), (10, 5)])
def test_too_few_uploads_to_trim_are_an_error_that_names_the_numbers(n, trimmed):
    message = rf"more than {2 * trimmed} rows.* {trimmed} values at each end, but got {n}"
    with pytest.raises(ValueError, match=message):
        TrimmedMean(trimmed)(torch.zeros(n, 2), torch.ones(n), ROUND)


@table_test(
    ("kind", "name", "value"),
    [
        (Krum, "num_selected", 0),
        (Krum, "num_byzantine", -1),
        (TrimmedMean, "num_trimmed", -1),
    ],
)
def test_numbers_out_of_range_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be at least"):
        kind(**{name: value})


@pytest.mark.parametrize(("n", "most"), [(0, 0), (4, 1), (5, 2), (9, 2)])
def test_trimmed_mean_withstands_as_many_uploads_as_it_trims(n, most):
    assert TrimmedMean(2).max_byzantine(n) == most
    assert TrimmedMean().max_byzantine(n) == 0


@pytest.mark.parametrize(("n", "most"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (9, 4), (10, 4)])
def test_the_median_withstands_a_minority(n, most):
    assert Median().max_byzantine(n) == most


def test_majority_moves_the_median():
    uploads = torch.tensor([[1.0], [2.0], [1e30], [1e30]])
    assert Median()(uploads, torch.ones(4), ROUND) > 1e29


def test_one_upload_moves_the_mean():
    assert Mean().max_byzantine(100) == 0
    assert Mean()(torch.tensor([[0.0], [1e30]]), torch.ones(2), ROUND) > 1e29


def test_mean_of_many_bfloat16_uploads_keeps_its_digits():
    uploads = torch.full((1000, 2), 1.0078125, dtype=torch.bfloat16)
    for aggregator in (Mean(), Mean("samples")):
        merged = aggregator(uploads, torch.ones(1000), ROUND)
        assert_close(merged, torch.full((2,), 1.0078125), rtol=1e-5, atol=0)


def test_matmul_precision_does_not_change_the_mean():
    uploads, samples = random_uploads(64, 2000), torch.arange(1, 65)
    exact = Mean("samples")(uploads, samples, ROUND)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(Mean("samples")(uploads, samples, ROUND), exact)
    finally:
        torch.set_float32_matmul_precision(before)


def test_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match=r"Expected argument `weighting` .* but got 'size'"):
        Mean("size")


@table_test(
    ("weights", "message"),
    [
        (torch.ones(2), r"shape \[3\].*but got shape \[2\]"),
        (torch.zeros(3), r"not all 0 but got \[0.0, 0.0, 0.0\]"),
        (torch.tensor([1, -1, 1]), r"at least 0 .* but got \[1, -1, 1\]"),
        (torch.tensor([1.0, torch.nan, 1.0]), "at least 0 .* but got .*nan"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Mean("samples")(UPLOADS, weights, ROUND)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Aggregator()


def test_overflow_of_finite_uploads_is_refused():
    class Divides(Mean):
        def forward(self, uploads, weights, context):
            return uploads.mean(0) / 0

    with pytest.raises(ValueError, match="by Divides, but got finite values that overflow to NaN"):
        Divides()(torch.ones(2, 3), torch.ones(2), RoundContext(clients=torch.arange(2)))


def test_error_about_two_devices_in_an_aggregator_has_the_remedy_once():
    class Mixes(Mean):
        def forward(self, uploads, weights, context):
            return uploads.mean(0) + torch.ones(2, device="meta")

    with pytest.raises(RuntimeError, match="device") as caught:
        CRFL(aggregator=Mixes())(UPLOADS, SAMPLES, ROUND)
    (note,) = caught.value.__notes__
    assert "such as torch.zeros(3, device=x.device)" in note


def test_result_on_another_device_is_refused():
    class Elsewhere(Mean):
        def forward(self, uploads, weights, context):
            return torch.empty(2, device="meta")

    message = r"Elsewhere returned one on meta: return `merged.to\(uploads.device\)`"
    with pytest.raises(ValueError, match=message):
        Elsewhere()(UPLOADS, SAMPLES, ROUND)
