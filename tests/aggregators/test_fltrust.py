"""FLTrust against its paper, and by hand."""

import numpy as np
import pytest
import torch
from tables import table_test
from torch.testing import assert_close

from pl_fed.aggregators import FLTrust
from pl_fed.types import RoundContext


def merge(rows, root, notes=None):
    def note(word, number):
        if notes is not None:
            notes[word] = int(number)

    return FLTrust()(rows, torch.ones(len(rows)), RoundContext(root=root, note=note))


def random_rows(n, d, seed, attack="none"):
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(d, generator=draw, dtype=torch.float64)
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64) + 0.3 * root
    rows *= torch.rand(n, 1, generator=draw, dtype=torch.float64) * 10
    if attack == "far":
        rows[0], rows[1] = 1e30 * root.sign(), -1e30 * rows[1]
    elif attack == "opposite":
        rows[:2] = -root
    return rows, root


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["none", "far", "opposite"])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (7, 20), (15, 40_000)])
@pytest.mark.parametrize("seed", range(3))
def test_results_equal_the_paper(attack, n, d, seed):
    """Equations 2 to 4, in their order."""
    uploads, server = random_rows(n, d, seed, attack)
    rows, root = uploads.numpy(), server.numpy()
    trust = []
    for row in rows:
        cosine = row @ root / (np.linalg.norm(row) * np.linalg.norm(root))
        trust.append(max(cosine, 0.0))
    scaled = [row * np.linalg.norm(root) / np.linalg.norm(row) for row in rows]
    expected = np.zeros(d)
    if sum(trust):
        expected = sum(t * row for t, row in zip(trust, scaled)) / sum(trust)
    notes = {}
    result = merge(uploads, server, notes)
    assert_close(result, torch.from_numpy(expected), rtol=1e-10, atol=1e-12)
    assert notes == {"dropped": sum(t == 0 for t in trust)}
    assert result.norm() <= server.norm() * (1 + 1e-12)


def test_result_equals_a_hand_computed_example():
    """Cosines 3/5, 4/5, 0 and -1 with a root of length 5."""
    rows = torch.tensor([[10.0, 0.0], [0.0, 0.1], [-4.0, 3.0], [-3.0, -4.0]])
    notes = {}
    merged = merge(rows, torch.tensor([3.0, 4.0]), notes)
    assert merged.tolist() == pytest.approx([5 * 3 / 7, 5 * 4 / 7])
    assert notes == {"dropped": 2}


def test_result_equals_a_second_example():
    """Trust 1, 1 / √2, 0 and 0 with a root of length 1."""
    rows = torch.tensor([[2.0, 0.0], [1.0, 1.0], [-3.0, 0.0], [0.0, 5.0]])
    merged = merge(rows, torch.tensor([1.0, 0.0]))
    assert merged.tolist() == pytest.approx([0.878680, 0.292893], abs=1e-6)


def test_lengths_of_uploads_do_not_matter():
    rows, root = random_rows(6, 30, 0)
    lengths = torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e30, 1e100], dtype=torch.float64)[:, None]
    assert_close(merge(rows * lengths, root), merge(rows, root))


def test_single_trusted_upload_is_rescaled_to_the_length_of_the_root():
    rows, root = torch.tensor([[0.0, 7.0], [-1.0, 0.0]]), torch.tensor([1.0, 1.0])
    assert_close(merge(rows, root), torch.tensor([0.0, 2**0.5]))


@pytest.mark.parametrize("rows", [[[-1.0, 0.0]], [[0.0, 5.0], [0.0, 0.0]], [[float("nan"), 1.0]]])
def test_no_trusted_upload_gives_a_zero_update(rows):
    notes = {}
    merged = merge(torch.tensor(rows), torch.tensor([1.0, 0.0]), notes)
    assert torch.equal(merged, torch.zeros(2))
    assert notes == {"dropped": len(rows)}


def test_zero_root_gives_a_zero_update():
    assert torch.equal(merge(torch.ones(3, 2), torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("tiny", [1e-38, 1e-42, 1e-45])
def test_tiny_uploads_give_a_finite_result(tiny):
    root = torch.tensor([1.0, 0.0])
    merged = merge(torch.tensor([[tiny, 0.0], [2.0, 0.0]]), root)
    assert merged.isfinite().all()
    assert 0.49 < merged[0] <= 1.0001


@table_test(
    ("root", "description"),
    [
        (torch.ones(3), r"shape \[3\]"),
        (torch.empty(0), r"shape \[0\]"),
        (torch.tensor([1.0, torch.nan]), "NaN or infinity"),
        (torch.tensor([torch.inf, 0.0]), "NaN or infinity"),
    ],
)
def test_invalid_root_is_refused(root, description):
    with pytest.raises(
        ValueError, match=rf"`context.root` .* for FLTrust, .* but got {description}\.$"
    ):
        merge(torch.ones(4, 2), root)
