"""The embedded data of a regression."""

import pytest
import torch
from tables import table_test

from pl_fed.data import Diabetes


def test_patients_in_age_groups():
    arrays = Diabetes(num_groups=7).load()
    assert arrays.inputs.shape == (442, 10)
    assert (arrays.targets * 77 + 152).min().item() == pytest.approx(25, abs=1e-3)
    torch.testing.assert_close(arrays.inputs.var(0, correction=0), torch.ones(10))
    assert set(arrays.client.bincount().tolist()) <= {63, 64}
    oldest = [arrays.inputs[arrays.client == k, 0].max() for k in range(7)]
    youngest = [arrays.inputs[arrays.client == k, 0].min() for k in range(7)]
    assert all(one <= other for one, other in zip(oldest, youngest[1:]))


@table_test("groups", [0, 41])
def test_invalid_numbers_of_groups_are_refused(groups):
    with pytest.raises(ValueError, match=r"^Expected argument `num_groups` to be"):
        Diabetes(groups)
