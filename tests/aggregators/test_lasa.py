"""LASA: by hand, and against numpy written from the paper and the authors' steps."""

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from torch.testing import assert_close

from pl_fed.aggregators import LASA
from pl_fed.nets.rows import RowLayout
from pl_fed.types import RoundContext

LAYOUT = RowLayout.from_tensors([("weight", torch.empty(2, 2)), ("bias", torch.empty(2))])
ROWS = torch.tensor(
    [
        [0.5, -0.4, 0.3, -0.1, 0.2, 0.1],
        [0.4, -0.5, 0.2, 0.1, 0.1, 0.2],
        [0.6, -0.3, 0.4, -0.2, 0.2, 0.2],
        [-2.0, 2.1, -1.9, 2.2, -1.0, -1.1],
        [0.5, -0.45, 0.1, 0.12, 0.3, 0.1],
    ],
    dtype=torch.float64,
)


def merge(rows, layout=LAYOUT, notes=None, rejected=None, **arguments):
    context = RoundContext(
        clients=torch.arange(len(rows)),
        layout=layout,
        note=lambda word, n: None if notes is None else notes.update({word: int(n)}),
        reject=lambda ids: None if rejected is None else rejected.extend(ids.tolist()),
    )
    return LASA(**arguments)(rows, torch.ones(len(rows)), context)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ("sparse", [0.511128, 0.0, 0.0, 0.0, 0.159265, 0.159265]),
        ("dense", [0.511128, -0.372231, 0.251863, -0.052598, 0.159265, 0.159265]),
    ],
)
def test_results_equal_the_example_of_the_authors_code(mean, expected):
    """The weight's mean has the rows 0, 2 and 4, the bias's has 0, 1 and 2."""
    notes, rejected = {}, []
    merged = merge(ROWS, notes=notes, rejected=rejected, sparsity=0.5, mean=mean)
    assert_close(merged, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    assert notes == {"clipped": 2, "dropped": 1}
    assert rejected == [3]


def reference(rows, shapes, sparsity, norm_radius, sign_radius, mean):
    """LASA in numpy, by whole sparse copies of the clipped rows."""
    norms = np.linalg.norm(rows, axis=1)
    bound = np.sort(norms)[(len(norms) - 1) // 2]
    clipped = rows * np.minimum(1, bound / np.maximum(norms, 1e-300))[:, None]
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum(sizes)
    pieces = [range(end - size, end) for size, end in zip(sizes, ends)]
    weights = [j for piece, shape in zip(pieces, shapes) if len(shape) > 1 for j in piece]
    sparse = clipped.copy()
    if sparsity:
        for row in sparse:
            ordered = np.sort(np.abs(row[weights]))[::-1]
            num_largest = int(len(weights) * (1 - sparsity))
            least = ordered[num_largest - 1] if num_largest else np.inf
            row[weights] = np.where(np.abs(row[weights]) > least, row[weights], 0)

    def score(values):
        std = np.std(values)
        return np.abs(values - np.median(values)) / std if std > 1e-12 else np.zeros(len(values))

    merged = np.zeros(rows.shape[1])
    for piece in pieces:
        part = sparse[:, list(piece)]
        counts = np.abs(np.sign(part)).sum(1)
        shares = 0.5 * (1 + np.sign(part).sum(1) / np.maximum(counts, 1))
        good = score(np.linalg.norm(part, axis=1)) < norm_radius
        good &= score(shares) < sign_radius
        good |= not good.any()
        merged[list(piece)] = (clipped if mean == "dense" else sparse)[good][:, list(piece)].mean(0)
    return merged


SHAPES = [(3, 4), (3,), (2, 3, 2, 1), (5,), (4, 2)]  # 40 numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", ["dense", "sparse"])
def test_results_equal_numpy(kind, mean):
    layout = RowLayout.from_tensors([(str(i), torch.empty(s)) for i, s in enumerate(SHAPES)])
    for seed, sparsity, radii in ((0, 0.3, (1.0, 1.0)), (1, 0.0, (2.0, 1.0)), (2, 0.8, (0.5, 3.0))):
        for n in (8, 11):
            rows = hostile_uploads(kind, n, 3, seed=seed)
            rows[0, 12:15] = 0.0
            expected = reference(rows.numpy(), SHAPES, sparsity, *radii, mean)
            merged = merge(
                rows,
                layout,
                sparsity=sparsity,
                norm_radius=radii[0],
                sign_radius=radii[1],
                mean=mean,
            )
            assert_close(merged, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


def test_equal_uploads_are_all_in_the_mean():
    notes, row = {}, torch.tensor([0.3, -0.7, 0.2, 0.1, 0.5, 0.4])
    assert_close(merge(row.repeat(4, 1), notes=notes), row)
    assert notes == {"clipped": 0, "dropped": 0}


def test_upload_of_equal_magnitudes_does_not_switch_the_filter_off():
    """Its weights vanish by the strict threshold; the authors' code then accepts all rows."""
    benign = torch.tensor([[3.0, 2.0, 1.0, 0.5, 1.0, 1.0]]).repeat(4, 1)
    rows = torch.cat([benign, -benign[:1], torch.ones(1, 6)])
    rejected = []
    merged = merge(rows, rejected=rejected, sparsity=0.25, norm_radius=100.0)
    assert rejected == [4]
    assert_close(merged[:4], benign[0, :4])


def test_zero_and_single_uploads_have_a_result():
    assert merge(torch.zeros(3, 6)).tolist() == [0.0] * 6
    assert_close(merge(ROWS[:1]), ROWS[0])
    assert merge(torch.cat([torch.zeros(2, 6), torch.full((1, 6), 1e30)])).tolist() == [0.0] * 6


def test_two_different_uploads_are_both_in_the_mean():
    """Each of them has z = 1, so that no upload is accepted, and all are used."""
    rows = ROWS[:2] / ROWS[:2].norm(dim=1, keepdim=True)
    assert_close(merge(rows), rows.mean(0))


def test_shares_of_signs_at_the_radius_are_left_out_alike():
    """Shares 0, 1/3, 1/2, 2/3 and 1: z is exactly 1/2 of the second and of the fourth."""
    shares = [[-1, -1, -1], [1, -1, -1], [1, -1, 0], [1, 1, -1], [1, 1, 1]]
    rows, rejected = torch.tensor(shares, dtype=torch.float64), []
    layout = RowLayout.from_tensors([("bias", torch.empty(3))])
    merged = merge(rows, layout, rejected=rejected, norm_radius=100.0, sign_radius=0.5)
    assert rejected == [0, 1, 3, 4]
    assert_close(merged, rows[2])


def test_layout_of_other_uploads_is_refused():
    for layout, got in ((None, "none"), (LAYOUT, "one of 6 numbers")):
        with pytest.raises(ValueError, match=f"to place the 7 numbers .* for LASA.* got {got}"):
            merge(torch.ones(3, 7), layout)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sparsity", 1.0), ("norm_radius", 0.0), ("sign_radius", -1.0), ("mean", "all")],
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be"):
        LASA(**{name: value})
