"""FedTilt's toy example reproduces the results of section IV-A, in a fifth of the rounds."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "experiments" / "fedtilt_toy" / "toy.py"


@pytest.fixture(scope="module")
def toy():
    spec = importlib.util.spec_from_file_location("fedtilt_toy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fedtilt_toy", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def run(toy):
    def short(experiment, tau, lam, noise=0.0):
        return toy.run(experiment, tau, lam, noise, rounds=10)

    return short


def test_points_have_the_sizes_and_moments_of_table_iv(toy):
    arrays = toy.Toy(2, noise=0.0, seed=0).load()
    for client, own in enumerate(toy.CENTRES[2]):
        for label, (*centre, deviation) in enumerate(own):
            selected = (arrays.client == client) & (arrays.targets == label)
            sizes = tuple(int((selected & (arrays.split == part)).sum()) for part in (0, 2))
            assert sizes == [(150, 30), (50, 10)][label]
            x = arrays.inputs[selected]
            slack = 4 * deviation / math.sqrt(len(x))
            torch.testing.assert_close(x.mean(0), torch.tensor(centre), rtol=0, atol=slack)
            torch.testing.assert_close(x.std(0), torch.full((2,), deviation), rtol=0.3, atol=0)


def test_noise_is_added_to_a_tenth_of_class_1(toy):
    plain, noisy = (toy.Toy(3, noise, seed=0).load() for noise in (0.0, 0.15))
    moved = (plain.inputs != noisy.inputs).any(1)
    assert int(moved.sum()) == 2 * 15
    assert (plain.targets[moved] == 0).all()
    assert (plain.split[moved] == 0).all()
    difference = (noisy.inputs - plain.inputs)[moved]
    assert float(difference.std()) == pytest.approx(0.15, rel=0.3)


def test_first_experiment_gives_both_clients_equal_accuracy(run):
    by_class = run(1, 1.0, 1.0).by_class_of_many
    assert by_class.min() > 0.94
    assert by_class.mean(1).diff().abs() < 0.03


def test_second_experiment_with_large_tau_is_accurate_for_the_small_class(run):
    by_class = run(2, 100.0, 1.0).by_class_of_many
    assert by_class.min() > 0.99
    assert by_class.mean(1).diff().abs() < 0.005
    assert by_class.diff(dim=1).abs().max() < 0.01
    assert run(2, -100.0, 1.0).by_class_of_many.min() < 0.2, "a negative τ loses a class"


@pytest.mark.exhaustive
def test_third_experiment_with_negative_lam_ignores_outliers(run):
    """Outliers move the boundary of plain losses, and a positive λ fits single samples."""
    clean, disturbed = (run(3, 100.0, -100.0, noise) for noise in (0.0, 5.0))
    assert disturbed.share_moved_from(clean).max() < 0.03
    assert clean.by_class_of_many.mean(1).diff().abs() < 0.05
    assert clean.by_class_of_many.min() > 0.65
    plain, disturbed = (run(3, 0.0, 0.0, noise) for noise in (0.0, 5.0))
    assert disturbed.share_moved_from(plain).max() > 0.2
    assert run(3, 100.0, 100.0).by_class_of_many.min() < 0.1
