"""The embedded data set."""

import torch

from pl_fed.data import Digits

# of the UCI test part, as its documentation has them
DIGITS_OF_EACH_CLASS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits():
    arrays = Digits().load()
    assert arrays.inputs.shape == (1797, 1, 8, 8)
    assert arrays.inputs.dtype == torch.float32
    assert arrays.targets.dtype == torch.int64
    assert arrays.targets.bincount().tolist() == DIGITS_OF_EACH_CLASS
    assert arrays.num_classes == 10
    assert arrays.client is None
    assert arrays.split is None


def test_pixels_are_sixteenths_from_0_to_1():
    x = Digits().load().inputs
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert torch.equal((x * 16).round(), x * 16)
    assert [int(16 * pixel) for pixel in x[0, 0, 0]] == [0, 0, 5, 13, 9, 1, 0, 0]
