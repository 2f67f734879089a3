"""AlignIns: by hand, and against numpy written from the paper and the authors' steps."""

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from torch.testing import assert_close

from pl_fed.aggregators import AlignIns
from pl_fed.types import RoundContext

ROWS = torch.tensor(
    [
        [1.0, 0.2, -0.1, 0.4],
        [0.9, 0.3, -0.2, 0.5],
        [1.1, 0.1, -0.1, 0.3],
        [0.8, 0.2, -0.3, 0.6],
        [-3.0, 4.0, 2.0, -1.0],
    ],
    dtype=torch.float64,
)
MODEL = torch.tensor([0.5, -0.5, 0.2, 0.1], dtype=torch.float64)


def merge(rows, model=MODEL, weights=None, notes=None, rejected=None, **arguments):
    context = RoundContext(
        clients=torch.arange(len(rows)),
        broadcast=model,
        note=lambda word, n: None if notes is None else notes.update({word: int(n)}),
        reject=lambda ids: None if rejected is None else rejected.extend(ids.tolist()),
    )
    weights = torch.ones(len(rows)) if weights is None else weights
    return AlignIns(**arguments)(rows, weights, context)


def test_result_equals_the_example_of_the_authors_code():
    notes, rejected = {}, []
    merged = merge(ROWS, notes=notes, rejected=rejected, top=0.5)
    expected = [0.9340326926, 0.1983220930, -0.1735295655, 0.4453812239]
    assert_close(merged, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    assert notes == {"dropped": 1, "clipped": 2}
    assert rejected == [4]


def reference(rows, model, weights, top, cosine_radius, sign_radius):
    majority = np.sign(np.sign(rows).sum(0))
    least = np.sort(np.abs(rows), axis=1)[:, -max(1, int(rows.shape[1] * top))]
    largest = [np.abs(row) >= bound for row, bound in zip(rows, least)]
    alignments = [(np.sign(row) == majority)[j].mean() for row, j in zip(rows, largest)]
    cosines = rows @ model / np.linalg.norm(rows, axis=1) / np.linalg.norm(model)

    def score(values):
        values = np.array(values)
        std = values.std()
        return np.abs(values - np.median(values)) / std if std > 1e-12 else np.zeros(len(values))

    good = (score(cosines) < cosine_radius) & (score(alignments) < sign_radius)
    if not good.any():
        return np.zeros(rows.shape[1])
    norms = np.linalg.norm(rows[good], axis=1)
    bound = np.sort(norms)[(len(norms) - 1) // 2]
    clipped = rows[good] * np.minimum(1, bound / norms)[:, None]
    return weights[good] @ clipped / weights[good].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_numpy(kind):
    for seed, top, radii in ((0, 0.3, (1.0, 1.0)), (1, 1.0, (0.5, 2.0)), (2, 0.1, (2.0, 0.7))):
        for n in (7, 12):
            rows = hostile_uploads(kind, n, 3, seed=seed)
            rows[0] *= 1e30
            draw = torch.Generator().manual_seed(seed)
            model = torch.randn(40, generator=draw, dtype=torch.float64)
            weights = torch.randint(1, 50, (n,), generator=draw)
            arguments = {"top": top, "cosine_radius": radii[0], "sign_radius": radii[1]}
            expected = reference(rows.numpy(), model.numpy(), weights.numpy(), top, *radii)
            merged = merge(rows, model, weights, weighting="samples", **arguments)
            assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_equal_uploads_are_all_accepted():
    notes = {}
    assert_close(merge(ROWS[:1].repeat(4, 1), notes=notes), ROWS[0])
    assert notes == {"dropped": 0, "clipped": 0}


def test_zero_uploads_and_a_zero_model_have_a_result():
    assert merge(torch.zeros(3, 4).double()).tolist() == [0.0] * 4
    assert merge(ROWS, torch.zeros(4).double()).isfinite().all()
    assert_close(merge(ROWS[:1]), ROWS[0])


def test_no_accepted_upload_gives_a_zero_update():
    """Two different uploads have z = 1, but for rounding."""
    notes = {}
    merged = merge(ROWS[3:] / 3, notes=notes)
    assert merged.tolist() == [0.0] * 4
    assert notes == {"dropped": 2}
    assert merge(ROWS[3:], cosine_radius=1.1, sign_radius=1.1).any()


def test_shares_of_signs_are_exact_in_float64():
    rows = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    alignments = AlignIns(top=1.0)._sign_alignments(rows).tolist()
    assert alignments == [2 / 3, 2 / 3, 1 / 3, 2 / 3]  # the third column has no majority


def test_slice_without_the_model_is_refused():
    with pytest.raises(ValueError, match=r"Expected `context.broadcast` .* of 4 numbers"):
        merge(ROWS, torch.empty(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top", 0.0),
        ("top", 1.5),
        ("cosine_radius", 0.0),
        ("sign_radius", -1.0),
        ("weighting", "size"),
    ],
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be"):
        AlignIns(**{name: value})
