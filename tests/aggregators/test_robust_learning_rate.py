"""Robust learning rate: by hand, and against numpy from the paper's formula."""

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from torch.testing import assert_close

from pl_fed.aggregators import RobustLearningRate
from pl_fed.types import RoundContext

ROWS = torch.tensor(
    [[0.3, -0.2, 0.1, 0.0], [0.1, 0.4, 0.2, 0.1], [0.2, -0.1, -0.1, -0.2], [-0.4, -0.3, 0.3, 0.5]],
    dtype=torch.float64,
)


def merge(rows, f=0, weights=None, **arguments):
    weights = torch.ones(len(rows)) if weights is None else weights
    context = RoundContext(num_byzantine=f, clients=torch.arange(len(rows)))
    return RobustLearningRate(**arguments)(rows, weights, context)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"threshold": 4}, [-0.05, 0.05, -0.125, -0.1]),
        ({"threshold": 2}, [0.05, -0.05, 0.125, -0.1]),
        ({"threshold": 2, "statistic": "median"}, [0.15, -0.15, 0.15, -0.05]),
        ({"threshold": 2, "statistic": "sign"}, [1.0, -1.0, 1.0, -1.0]),
        ({"threshold": 1, "statistic": "sign"}, [1.0, -1.0, 1.0, 1.0]),
    ],
)
def test_results_equal_those_by_hand(arguments, expected):
    """The sums of signs are 2, −2, 2 and 1."""
    assert_close(merge(ROWS, **arguments), torch.tensor(expected, dtype=torch.float64))


def test_default_threshold_is_one_above_the_expected_number_of_byzantine_uploads():
    for f in range(4):
        assert torch.equal(merge(ROWS, f), merge(ROWS, threshold=f + 1))


def test_weights_move_the_mean_and_no_vote():
    weights = torch.tensor([1, 1, 1, 97])
    merged = merge(ROWS, weights=weights, threshold=2, weighting="samples")
    mean = (ROWS * weights[:, None]).sum(0) / 100
    assert_close(merged, mean * torch.tensor([1, 1, 1, -1]))


def paper_rlr(rows, threshold, statistic):
    votes = np.sign(rows).sum(0)
    centers = {"mean": rows.mean(0), "median": np.median(rows, axis=0), "sign": np.sign(votes)}
    rates = np.where(np.abs(votes) >= threshold, 1.0, -1.0)
    return rates * centers[statistic]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statistic", ["mean", "median", "sign"])
def test_results_equal_the_formula(kind, statistic):
    for seed, threshold in ((0, 1), (1, 4), (2, 7), (3, 11)):
        rows = hostile_uploads(kind, 11, 3, seed=seed)
        rows[:, ::5] = 0.0
        expected = paper_rlr(rows.numpy(), threshold, statistic)
        merged = merge(rows, threshold=threshold, statistic=statistic)
        assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_attackers_alone_do_not_gain_a_coordinate():
    """A coordinate that benign clients leave alone moves against f attackers."""
    rows = torch.zeros(10, 1)
    rows[:3] = 5.0
    assert merge(rows, f=3) == -1.5
    assert merge(rows, threshold=3) == 1.5


def test_cohort_below_the_threshold_is_refused():
    with pytest.raises(ValueError, match="at least 5 rows for RobustLearningRate but got 4"):
        merge(ROWS, threshold=5)


def test_zero_uploads_give_a_zero_update():
    assert merge(torch.zeros(3, 4)).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "arguments", [{"threshold": 0}, {"statistic": "max"}, {"weighting": "size"}]
)
def test_arguments_out_of_range_are_refused(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be"):
        RobustLearningRate(**arguments)


def test_breakdown_numbers_depend_on_the_statistic():
    numbers = [RobustLearningRate(statistic=s).breakdown(10) for s in ("mean", "median", "sign")]
    assert numbers == [0, 4, 0]
