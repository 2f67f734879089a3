"""The memory that clients' states may take."""

import math

import pytest
from tables import table_test

from pl_fed import StorageOptions


@pytest.mark.parametrize("memory", [0, 1, 10**12, 0.001, 1.0])
def test_budget_is_a_share_or_bytes(memory):
    assert StorageOptions(memory=memory).memory == memory


@table_test("memory", [-1, 0.0, -0.5, 1.5, 1e9, math.nan])
def test_budget_out_of_range_is_refused(memory):
    words = (
        rf"storage.memory` to be a share in \(0, 1\] or a number of bytes \(int\) but got {memory}"
    )
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        StorageOptions(memory=memory)


@table_test("memory", ["8GB", None, True])
def test_budget_of_another_type_is_refused(memory):
    with pytest.raises(
        TypeError, match=f"`federation.storage.memory` to be a share .* but got {memory!r}"
    ):
        StorageOptions(memory=memory)
