"""What attacks on uploads are made of, against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

from pl_fed.functional import aggregation
from pl_fed.functional.aggregation import gram_matrix, inner_products
from pl_fed.functional.forging import mean_row, reference_rows, standard_deviations, upload_origin


@pytest.fixture(params=[1, 1 << 18], ids=["in pieces", "at once"])
def width(request, monkeypatch):
    monkeypatch.setitem(aggregation._CHUNK_NUMBERS, "cpu", request.param)


def draw(n=6, d=200, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n)).to(dtype) + 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_means_and_deviations_of_the_population(dtype):
    rows = draw(dtype=dtype)
    mean = mean_row(rows)
    expected = rows.double().numpy()
    tolerance = {"rtol": 1e-12 if dtype == torch.float64 else 1e-5, "atol": 0}
    np.testing.assert_allclose(mean, expected.mean(0), **tolerance)
    np.testing.assert_allclose(standard_deviations(rows, mean), expected.std(0), **tolerance)
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_deviation_of_a_single_row_is_zero():
    rows = draw(1)
    assert torch.equal(standard_deviations(rows, mean_row(rows)), torch.zeros(200).double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_against_numpy(width, dtype):
    rows, centre, vector = draw(dtype=dtype), draw(1, dtype=dtype)[0], draw(2, dtype=dtype)[1]
    gaps = (rows.double() - centre.double()).numpy()
    np.testing.assert_allclose(
        gram_matrix(rows, centre=centre), gaps @ gaps.T, rtol=1e-12, atol=1e-12
    )
    expected = gaps @ vector.double().numpy()
    np.testing.assert_allclose(inner_products(rows, vector, centre), expected, rtol=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(far=st.floats(-1e8, 1e8))
def test_products_of_distant_rows_preserve_differences(far):
    rows = torch.tensor([[far], [far + 1], [far + 2]], dtype=torch.float64)
    products = gram_matrix(rows, centre=mean_row(rows))
    expected = torch.tensor([[1.0, 0, -1], [0, 0, 0], [-1, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(products, expected, rtol=0, atol=1e-7)


def test_finite_own_uploads_replace_unknown_uploads():
    own = torch.tensor([[1.0, 2.0], [torch.inf, 0.0], [3.0, torch.nan]])
    assert reference_rows(torch.empty(0, 2), own).tolist() == [[1, 2]]
    assert reference_rows(torch.ones(1, 2), own).tolist() == [[1, 1]]


def test_origin_of_a_model_upload_is_the_broadcast():
    own, broadcast = torch.zeros(2, 3, dtype=torch.bfloat16), torch.arange(3.0)
    assert upload_origin("model", own, broadcast).tolist() == [0, 1, 2]
    assert upload_origin("update", own, broadcast).tolist() == [0, 0, 0]
    assert upload_origin("model", own, broadcast.bfloat16()).dtype == torch.float32


@table_test("length", [0, 2])
def test_broadcast_of_another_length_is_refused(length):
    message = rf"the global model, 3 numbers, .* got shape \[{length}\]"
    with pytest.raises(ValueError, match=message):
        upload_origin("model", torch.zeros(2, 3), torch.zeros(length))
