"""The edge-case and the semantic backdoor: samples of a pool, and changed images of a class."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import table_test

from pl_fed.attacks import EdgeCaseBackdoor, SemanticBackdoor
from pl_fed.data import Npz
from pl_fed.data.source import Arrays
from pl_fed.random import integers, key, uniforms
from pl_fed.types import Batch, ClientContext

CONTEXT = ClientContext(seed=11, round=0, client=2, num_classes=10)


class Pool:
    """A data source whose samples hold their own numbers, from 100."""

    def __init__(self, n=40, **fields):
        self.n = n
        self.fields = fields

    def load(self):
        x = 100 + torch.arange(self.n, dtype=torch.float32)[:, None]
        y = torch.arange(self.n) % 4
        return Arrays(x, self.fields.pop("targets", y), num_classes=4, **self.fields)


def make_batch(n=2000):
    y = torch.arange(n) % 10
    return Batch(torch.zeros(n, 1), y, samples=torch.arange(n))


def drawn_samples(attack, batch=None):
    """Return the numbers of the pool's samples in training and in the metric."""
    batch = batch or make_batch()
    poisoned = attack.poison(batch, CONTEXT).inputs.flatten()
    triggered = attack.trigger(batch).inputs.flatten()
    return set(poisoned[poisoned > 0].int().tolist()), set(triggered.int().tolist())


# The edge-case backdoor


def test_training_and_metric_draw_from_two_halves_of_the_pool():
    training, metric = drawn_samples(EdgeCaseBackdoor(3, Pool(41)))
    assert len(training) == 21
    assert training | metric == set(range(100, 141))
    assert training & metric == set()


def test_official_parts_of_the_pool_stay():
    split = torch.tensor([0] * 30 + [1] * 4 + [2] * 6)
    training, metric = drawn_samples(EdgeCaseBackdoor(3, Pool(split=split)))
    assert training == set(range(100, 130))
    assert metric == set(range(130, 140))


def test_classes_and_owners_select_samples_of_the_pool():
    training, metric = drawn_samples(EdgeCaseBackdoor(3, Pool(), classes=[1, 3]))
    assert training | metric == set(range(101, 140, 2))
    owners = torch.arange(40) // 10
    for names, wanted in ((["b", "d"], None), ([1, 3], None), (["b", 3], ("a", "b", "c", "d"))):
        fields = {"names": list("abcd")} if isinstance(names[0], str) or wanted else {}
        attack = EdgeCaseBackdoor(3, Pool(client=owners, **fields), owners=names)
        training, metric = drawn_samples(attack)
        assert training | metric == {*range(110, 120), *range(130, 140)}, names


def test_share_of_samples_gets_the_target_and_other_samples_stay_unchanged():
    batch = make_batch()
    poisoned = EdgeCaseBackdoor(3, Pool(), samples=0.3).poison(batch, CONTEXT)
    replaced = poisoned.inputs.flatten() > 0
    assert replaced.double().mean().item() == pytest.approx(0.3, abs=0.03)
    assert (poisoned.targets[replaced] == 3).all()
    assert torch.equal(poisoned.targets[~replaced], batch.targets[~replaced])
    again = EdgeCaseBackdoor(3, Pool(), samples=0.3).poison(batch, replace(CONTEXT, round=5))
    assert torch.equal(again.inputs, poisoned.inputs), "drawn once for all rounds"
    other = EdgeCaseBackdoor(3, Pool(), samples=0.3).poison(batch, replace(CONTEXT, client=4))
    assert not torch.equal(other.inputs, poisoned.inputs)


SPLIT = np.array([0] * 30 + [1] * 5 + [2] * 6)


@table_test(
    "labels, split", [([0, 1, 2, 3], None), ([1, 3], None), ([0, 1, 2, 3], SPLIT), ([0, 2], SPLIT)]
)
def test_samples_of_the_pool_are_those_of_the_documented_draws(labels, split):
    ids = 7 * torch.randperm(60, generator=torch.Generator().manual_seed(1))
    batch = Batch(torch.zeros(60, 1), torch.arange(60) % 10, samples=ids)
    members = np.flatnonzero(np.isin(np.arange(41) % 4, labels))
    if split is None:
        draws = integers(key(0, "edge-case-parts"), torch.from_numpy(members), 2**31 - 1).numpy()
        half = (len(members) + 1) // 2
        parts = [np.sort(part) for part in np.split(members[np.argsort(draws)], [half])]
    else:
        parts = [members[split[members] == 0], members[split[members] > 0]]
    fields = {} if split is None else {"split": torch.from_numpy(split)}
    attack = EdgeCaseBackdoor(3, Pool(41, **fields), classes=labels, samples=0.4)
    drawn = integers(key(11, "edge-case", 2), ids, len(parts[0])).numpy()
    has_trigger = uniforms(key(11, "backdoor", 2), ids).numpy() < 0.4
    poisoned = attack.poison(batch, CONTEXT)
    expected = np.where(has_trigger, 100 + parts[0][drawn], 0)
    np.testing.assert_array_equal(poisoned.inputs[:, 0], expected)
    np.testing.assert_array_equal(poisoned.targets, np.where(has_trigger, 3, batch.targets))
    drawn = integers(key(0, "edge-case"), ids, len(parts[1])).numpy()
    triggered = attack.trigger(batch)
    np.testing.assert_array_equal(triggered.inputs[:, 0], 100 + parts[1][drawn])
    np.testing.assert_array_equal(triggered.mask, batch.targets.numpy() != 3)


def test_bytes_of_an_npz_file_are_scaled(tmp_path):
    path = str(tmp_path / "planes.npz")
    np.savez(path, x=np.full((4, 1, 2, 2), 51, dtype=np.uint8), y=[0, 0, 0, 0])
    batch = Batch(torch.zeros(3, 1, 2, 2), torch.arange(3), samples=torch.arange(3))
    triggered = EdgeCaseBackdoor(9, Npz(path)).trigger(batch)
    np.testing.assert_allclose(triggered.inputs, np.full((3, 1, 2, 2), 0.2), rtol=1e-7)


@table_test(
    "pool, arguments, match",
    [
        (Pool(), {"classes": [7]}, r"at least two samples.* but got 0 of classes \[7\]"),
        (Pool(1), {}, "at least two samples.* but got 1 of classes None"),
        (Pool(), {"owners": [1]}, "`owners` to be left out"),
        (
            Pool(client=torch.zeros(40).long(), names=["a"]),
            {"owners": ["z"]},
            "to name owners of the pool but got 'z'",
        ),
    ],
)
def test_unusable_pools_are_refused(pool, arguments, match):
    with pytest.raises(ValueError, match=match):
        EdgeCaseBackdoor(3, pool, **arguments).trigger(make_batch())


def test_samples_of_another_shape_are_refused():
    batch = Batch(torch.zeros(2, 5), torch.tensor([0, 1]), samples=torch.arange(2))
    with pytest.raises(ValueError, match=r"samples of shape \[5\].* but got \[1\]: resize"):
        EdgeCaseBackdoor(3, Pool()).trigger(batch)


def test_pool_is_a_data_source():
    with pytest.raises(TypeError, match="`pool` to be a data source"):
        EdgeCaseBackdoor(3, "planes.npz")


# The semantic backdoor


def make_images(shape=(3, 5, 5), n=30):
    x = torch.rand(n, *shape, generator=torch.Generator().manual_seed(n))
    return Batch(x, torch.arange(n) % 10, samples=torch.arange(n))


def test_changes_equal_those_of_numpy():
    batch = make_images()
    x = batch.inputs.numpy()
    largest = x.max(axis=(1, 2, 3), keepdims=True)
    smallest = x.min(axis=(1, 2, 3), keepdims=True)
    tinted = x.copy()
    tinted[:, 1] = (x[:, 1] + largest[:, 0]) / 2
    turned = np.stack([np.rot90(image, axes=(1, 2)) for image in x])
    expected = {"rotate": turned, "invert": smallest + largest - x, "tint": tinted}
    for change, images in expected.items():
        attack = SemanticBackdoor(1, source=7, change=change, channel=1, samples=1.0)
        np.testing.assert_array_equal(attack.trigger(batch).inputs, images)
        poisoned = attack.poison(batch, CONTEXT)
        is_source = batch.targets.numpy() == 7
        np.testing.assert_array_equal(poisoned.inputs[is_source], images[is_source])
        np.testing.assert_array_equal(poisoned.inputs[~is_source], x[~is_source])
        np.testing.assert_array_equal(poisoned.targets, np.where(is_source, 1, batch.targets))


def test_mask_has_the_source_class_or_all_but_the_target():
    batch = make_images()
    assert set(batch.targets[SemanticBackdoor(1, 7).trigger(batch).mask].tolist()) == {7}
    others = set(batch.targets[SemanticBackdoor(1).trigger(batch).mask].tolist())
    assert others == set(range(10)) - {1}


@table_test(
    "shape, change, expected",
    [
        ((1, 4, 5), "rotate", "square images"),
        ((9,), "rotate", "square images"),
        ((1, 4, 4), "tint", "images of several channels, with channel 0"),
        ((9,), "tint", "images of several channels"),
    ],
)
def test_inputs_that_do_not_fit_the_change_are_refused(shape, change, expected):
    with pytest.raises(ValueError, match=f"{expected}.* choose another `change`"):
        SemanticBackdoor(1, change=change).trigger(make_images(shape))


@table_test(
    "arguments, match",
    [
        ({"source": 1}, "another class than `target` but got 1"),
        ({"source": -1}, "`source`"),
        ({"change": "flip"}, "`change`"),
        ({"channel": -1}, "`channel`"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        SemanticBackdoor(1, **arguments)


def test_source_is_a_class_of_the_data():
    with pytest.raises(ValueError, match="`source` to be one of the 10 classes but got 10"):
        SemanticBackdoor(1, source=10).poison(make_images(), CONTEXT)
