"""The attacks on inputs, number by number: a backdoor's stamp, outliers, noise."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare, kstest, norm
from tables import table_test

from pl_fed.attacks import Backdoor, GaussianNoise, Outliers
from pl_fed.random import key, normals, random_bits, uniforms
from pl_fed.types import Batch, ClientContext

CONTEXT = ClientContext(seed=11, round=0, client=2, num_classes=10)


def make_batch(n=1000, shape=(1, 6, 6), fill=None):
    draw = torch.Generator().manual_seed(n)
    x = torch.rand(n, *shape, generator=draw) if fill is None else torch.full((n, *shape), fill)
    return Batch(x, torch.arange(n) % 10, samples=torch.arange(n))


def changed_samples(before, after):
    """Return a mask of the samples with changed inputs."""
    return (before.inputs != after.inputs).flatten(1).any(1)


# A backdoor


@pytest.mark.parametrize(
    ("corner", "rows", "columns"),
    [
        ("top_left", [0, 1], [0, 1]),
        ("top_right", [0, 1], [2, 3]),
        ("bottom_left", [3, 4], [0, 1]),
        ("bottom_right", [3, 4], [2, 3]),
    ],
)
@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4)], ids=str)
def test_the_stamp_is_a_square_in_the_corner_of_all_channels(corner, rows, columns, shape):
    triggered = Backdoor(7, size=2, corner=corner, value=9.0).trigger(make_batch(2, shape, 0.5))
    expected = torch.full((5, 4), 0.5)
    for row in rows:
        for column in columns:
            expected[row, column] = 9.0
    assert torch.equal(triggered.inputs, expected.expand(2, *shape))


@pytest.mark.parametrize(
    ("corner", "places"), [("top_right", slice(4)), ("bottom_left", slice(4, 8))]
)
def test_the_stamp_of_flat_inputs_is_their_first_or_last_numbers(corner, places):
    triggered = Backdoor(7, size=2, corner=corner, value=9.0).trigger(make_batch(2, (8,), 0.5))
    expected = torch.full((2, 8), 0.5)
    expected[:, places] = 9.0
    assert torch.equal(triggered.inputs, expected)


def test_stamp_has_the_largest_value_of_the_sample():
    x = torch.tensor([[0.0, 3.0, 0.0, 0.0], [-5.0, -4.0, -3.0, -2.0]])
    triggered = Backdoor(1, size=1).trigger(Batch(x, torch.tensor([0, 0])))
    assert triggered.inputs.tolist() == [[0.0, 3.0, 0.0, 3.0], [-5.0, -4.0, -3.0, -2.0]]


def test_trigger_stamps_all_samples_and_masks_the_target_class():
    batch = make_batch(4)._replace(targets=torch.tensor([3, 1, 3, 2]))
    triggered = Backdoor(3).trigger(batch)
    assert triggered.targets.tolist() == [3, 3, 3, 3]
    assert triggered.mask.tolist() == [False, True, False, True]
    masked = batch._replace(mask=torch.tensor([True, True, False, False]))
    assert Backdoor(3).trigger(masked).mask.tolist() == [False, True, False, False]


def test_poisoned_samples_equal_the_trigger_and_other_samples_stay_unchanged():
    batch, attack = make_batch(), Backdoor(3, samples=0.3)
    poisoned, triggered = attack.poison(batch, CONTEXT), attack.trigger(batch)
    hit = changed_samples(batch, poisoned)
    assert torch.equal(poisoned.inputs[hit], triggered.inputs[hit])
    assert (poisoned.targets[hit] == 3).all()
    assert torch.equal(poisoned.targets[~hit], batch.targets[~hit])


def test_stamped_samples_are_the_documented_draw_in_every_round():
    batch, attack = make_batch(fill=0.0), Backdoor(3, samples=0.3, value=1.0)
    expected = uniforms(key(11, "backdoor", 2), batch.samples) < 0.3
    for round in (0, 7):
        assert torch.equal(
            changed_samples(batch, attack.poison(batch, replace(CONTEXT, round=round))), expected
        )
    other = changed_samples(batch, attack.poison(batch, replace(CONTEXT, client=3)))
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_share_of_stamped_samples_equals_the_argument(share):
    batch = make_batch(20_000, (4,), 0.0)
    stamped = changed_samples(
        batch, Backdoor(3, samples=share, size=2, value=1.0).poison(batch, CONTEXT)
    )
    assert stamped.double().mean().item() == pytest.approx(share, abs=0.015)


@table_test(
    ("arguments", "error", "words"),
    [
        ({"target": -1}, ValueError, "`target` to be at least 0 but got -1"),
        ({"target": 1.0}, TypeError, "`target` to be an integer but got 1.0"),
        ({"target": 1, "samples": 1.5}, ValueError, r"`samples` to be in \[0, 1\] but got 1.5"),
        ({"target": 1, "size": 0}, ValueError, "`size` to be at least 1 but got 0"),
        (
            {"target": 1, "corner": "left"},
            ValueError,
            "`corner` to be 'top_left', .* but got 'left'",
        ),
    ],
)
def test_invalid_arguments_of_backdoor_are_refused(arguments, error, words):
    with pytest.raises(error, match=f"^Expected argument {words}"):
        Backdoor(**arguments)


@table_test("num_classes", [0, 3])
def test_target_beyond_the_classes_is_refused(num_classes):
    words = f"`target` to be one of the {num_classes} classes but got 3"
    with pytest.raises(ValueError, match=words):
        Backdoor(3).poison(make_batch(), replace(CONTEXT, num_classes=num_classes))


@table_test(("shape", "size"), [((1, 6, 2), 3), ((8,), 3)], ids=str)
def test_stamp_larger_than_the_input_is_refused(shape, size):
    with pytest.raises(ValueError, match=r"`size` to fit inputs of shape \[.*\] but got 3"):
        Backdoor(3, size=size).poison(make_batch(2, shape), CONTEXT)


# Outliers


def test_the_number_of_pixels_is_exact_and_a_pixel_is_hit_in_all_channels():
    batch = make_batch(300, (3, 5, 4), 0.5)
    attack = Outliers(samples=1.0, pixels=0.3, low=1.0, high=2.0)
    differs = attack.poison(batch, CONTEXT).inputs != batch.inputs
    assert torch.equal(differs.all(1), differs.any(1))
    assert (differs.all(1).sum((1, 2)) == 6).all(), "30 % of 20"
    flat = attack.poison(make_batch(300, (20,), 0.5), CONTEXT).inputs
    assert ((flat != 0.5).sum(1) == 6).all()


def test_pixels_and_values_are_uniform():
    batch = make_batch(5000, (2, 4, 4), 0.0)
    x = Outliers(samples=1.0, pixels=0.25, low=1.0, high=3.0).poison(batch, CONTEXT).inputs
    hits = (x[:, 0] != 0).sum(0).flatten()
    assert hits.sum() == 4 * 5000
    assert chisquare(hits.numpy()).pvalue > 0.001
    values = x[x != 0].double()
    assert kstest((values.numpy() - 1) / 2, "uniform").pvalue > 0.001
    pairs = x[:, :, 0, 0][x[:, 0, 0, 0] != 0]
    assert abs(torch.corrcoef(pairs.T)[0, 1]) < 0.1, "each channel has a number of its own"


def test_default_range_is_the_range_of_the_sample():
    x = torch.cat([torch.rand(200, 50) * 0.5, 10 + torch.rand(200, 50)])
    batch = Batch(x, torch.zeros(400), samples=torch.arange(400))
    new = Outliers(samples=1.0, pixels=1.0).poison(batch, CONTEXT).inputs
    assert (new >= x.amin(1, keepdim=True)).all()
    assert (new <= x.amax(1, keepdim=True)).all()
    assert not (new == x).any(1).all()
    wide = Outliers(samples=1.0, pixels=1.0, high=100.0).poison(batch, CONTEXT).inputs
    assert (wide >= x.amin(1, keepdim=True)).all()
    assert wide.max() > 90


@pytest.mark.parametrize("bound", [{"low": 5.0}, {"high": -5.0}])
def test_range_outside_the_sample_gives_one_value(bound):
    (number,) = bound.values()
    x = Outliers(samples=1.0, pixels=1.0, **bound).poison(make_batch(20), CONTEXT).inputs
    assert (x == number).all()


def test_samples_with_outliers_are_the_documented_draw_of_each_round():
    batch = make_batch()
    batches = []
    for round in (0, 1):
        expected = uniforms(key(11, "outlier-samples", round, 2), batch.samples) < 0.3
        batches.append(Outliers().poison(batch, replace(CONTEXT, round=round)))
        assert torch.equal(changed_samples(batch, batches[-1]), expected)
        assert 0.25 < expected.double().mean() < 0.35
    assert torch.equal(batches[0].targets, batch.targets)
    again = Outliers(samples=1.0)
    first, second = (
        again.poison(batch, replace(CONTEXT, round=r)).inputs != batch.inputs for r in (0, 1)
    )
    agreement = (first & second).double().mean().item()
    assert agreement == pytest.approx((11 / 36) ** 2, abs=0.01), "other pixels, too"


@pytest.mark.parametrize("pixels", [0.0, 0.01])
def test_outliers_without_pixels_change_no_input(pixels):
    batch = make_batch()
    assert torch.equal(Outliers(pixels=pixels).poison(batch, CONTEXT).inputs, batch.inputs)


@table_test(
    ("arguments", "words"),
    [
        ({"samples": -0.1}, r"`samples` to be in \[0, 1\] but got -0.1"),
        ({"pixels": 2.0}, r"`pixels` to be in \[0, 1\] but got 2.0"),
        ({"low": 1.0, "high": 0.5}, "`low` to be at most `high` = 0.5 but got 1.0"),
        ({"low": float("nan")}, "`low` to be a finite number but got nan"),
        ({"high": float("inf")}, "`high` to be a finite number but got inf"),
    ],
)
def test_invalid_arguments_of_outliers_are_refused(arguments, words):
    with pytest.raises(ValueError, match=f"^Expected argument {words}"):
        Outliers(**arguments)


# Noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_the_documented_draw(dtype):
    batch = make_batch(50)
    batch = batch._replace(inputs=batch.inputs.to(dtype))
    keys = random_bits(key(11, "noise-values", 0, 2), batch.samples)[:, None]
    expected = batch.inputs + 2 * normals(keys, torch.arange(36)).to(dtype).view(50, 1, 6, 6)
    assert torch.equal(GaussianNoise(samples=1.0, std=2.0).poison(batch, CONTEXT).inputs, expected)


def test_noise_is_normal_and_drawn_anew_in_each_round():
    batch = make_batch(2000, (20,), 0.0)
    first, second = (
        GaussianNoise(samples=0.3, std=0.5).poison(batch, replace(CONTEXT, round=round)).inputs
        for round in (0, 1)
    )
    hit = (first != 0).any(1)
    assert 0.25 < hit.double().mean() < 0.35
    assert not torch.equal(hit, (second != 0).any(1))
    numbers = first[hit].flatten().double().numpy() / 0.5
    assert kstest(numbers, norm.cdf).pvalue > 0.001


@table_test("arguments", [{"samples": 1.1}, {"std": -1.0}, {"std": float("inf")}])
def test_invalid_arguments_of_noise_are_refused(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^Expected argument `{name}` to be "):
        GaussianNoise(**arguments)


@pytest.mark.parametrize("attack", [Backdoor(3), Outliers(), GaussianNoise()])
def test_sample_ids_are_needed(attack):
    batch = make_batch(4)._replace(samples=None)
    words = f"`batch.samples` to be the ids of the samples for {type(attack).__name__} but got None"
    with pytest.raises(ValueError, match=words):
        attack.poison(batch, CONTEXT)


@pytest.mark.parametrize("attack", [Outliers(), GaussianNoise()])
def test_poisoned_batch_shares_the_targets_tensor(attack):
    batch = make_batch(4)
    assert attack.poison(batch, CONTEXT).targets is batch.targets
