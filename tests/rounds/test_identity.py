"""Which federation a checkpoint is of: its samples, not their numbers alone."""

import pytest
import torch
from small_federations import Given, mlp, seeded, sgd
from tables import table_test

from pl_fed.clients import FedAvg
from pl_fed.data import Arrays, Digits, FederatedData
from pl_fed.data.fingerprint import digest_of_labels, fingerprint_of, same_inputs
from pl_fed.partitioners import IID
from pl_fed.rounds.identity import (
    check_equal_data,
    check_identity,
    federation_identity,
    states_identity,
)
from pl_fed.skews import Rotations


def arrays(seed=0, owners=(0, 1, 2, 3)):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(80, 4, generator=draw)
    y = torch.arange(80) % 3
    client = torch.tensor(owners).repeat_interleave(20)
    return Arrays(x, y, client, num_classes=3)


def identity(data, seed=0):
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    return federation_identity(client, data.clients, seed)


def array_identity(arrays_, **options):
    return identity(FederatedData(Given(arrays_), **options))


def digits(seed=0, **options):
    return identity(FederatedData(Digits(), IID(**options), 10, seed=seed))


def test_rebuilt_data_have_the_same_identity():
    check_identity(digits(), digits())
    check_identity(array_identity(arrays()), array_identity(arrays()))


def test_processes_with_different_data_are_refused():
    """A source that draws without a seed, or reads a set, gives each process other samples."""
    first, same = array_identity(arrays()), array_identity(arrays())
    check_equal_data([first, same, same])
    other = array_identity(arrays(seed=1))
    with pytest.raises(ValueError, match="all 3 processes to have the same inputs but process 2 "):
        check_equal_data([first, same, other])
    with pytest.raises(ValueError, match="all 2 processes to have the same seed but process 1 "):
        check_equal_data([first, {**first, "seed": 4}])


@table_test(
    ("saved", "current", "words"),
    [
        (lambda: digits(0), lambda: digits(5), "assignment of samples to clients"),
        (lambda: digits(), lambda: digits(shuffle=False), "assignment of samples to clients"),
        (
            lambda: array_identity(arrays()),
            lambda: array_identity(arrays(owners=(3, 2, 1, 0))),
            "assignment of samples",
        ),
        (
            lambda: array_identity(arrays()),
            lambda: array_identity(arrays(seed=1)),
            "inputs",
        ),
    ],
    ids=["seed", "shuffle", "owners the other way round", "other inputs"],
)
def test_checkpoint_of_other_data_of_equal_size_is_refused(saved, current, words):
    match = f"^Expected a checkpoint of a run with the same {words}.* with others"
    with pytest.raises(ValueError, match=match):
        check_identity(saved(), current())


def test_checkpoint_of_other_labels_is_refused():
    other = arrays()
    other.targets[:2] = other.targets[:2].flip(0)
    match = r"^Expected a checkpoint of a run with the same labels .* has other samples"
    with pytest.raises(ValueError, match=match):
        check_identity(array_identity(arrays()), array_identity(other))


def test_incomplete_identity_is_refused():
    current = digits()
    for name in current:
        saved = {part: value for part, value in current.items() if part != name}
        with pytest.raises(ValueError, match=r"^Expected a checkpoint"):
            check_identity(saved, current)


def test_identity_of_states_does_not_depend_on_the_samples():
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    first, other = (FederatedData(Given(arrays(seed))).clients for seed in (0, 1))
    assert states_identity(client, first, 0) == states_identity(client, other, 0)


def test_normalized_data_have_the_same_identity():
    """Sums over samples are not the same bits on every machine."""
    check_identity(array_identity(arrays()), array_identity(arrays(), normalize="feature"))


def test_copies_of_shared_samples_have_the_same_digests():
    arrays_ = Arrays(torch.rand(80, 1, 4, 4), torch.arange(80) % 3, num_classes=3)
    plain, skewed = (
        FederatedData(Given(arrays_), IID(), 4, skew=skew).clients.copy_shared_samples()
        for skew in (None, Rotations())
    )
    assert plain.digests == skewed.digests


def test_inputs_of_another_decoder_have_a_matching_fingerprint():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 3, 16, 16), generator=draw, dtype=torch.uint8)
    nearly = (images.int() + (torch.rand(images.shape, generator=draw) < 0.05)).clamp(0, 255)
    assert same_inputs(fingerprint_of(images), fingerprint_of(nearly.to(torch.uint8)))
    assert not same_inputs(fingerprint_of(images), fingerprint_of(images.roll(1, 0)))
    assert not same_inputs(fingerprint_of(images), fingerprint_of(images.float()))


@pytest.mark.parametrize("shape", [(0, 3), (5,), (5, 0), (100, 2, 2)])
def test_fingerprint_accepts_any_shape(shape):
    arrays_ = fingerprint_of(torch.ones(shape))
    assert same_inputs(arrays_, fingerprint_of(torch.ones(shape)))
    assert len(arrays_["projections"]) == min(64, shape[0])


def test_large_labels_are_hashed_in_part(monkeypatch):
    monkeypatch.setattr("pl_fed.data.fingerprint._LARGE", 8)
    monkeypatch.setattr("pl_fed.data.fingerprint._ENTRIES", 4)
    labels = torch.arange(8)
    digest = digest_of_labels(labels, torch.arange(8))
    labels[1] = 9
    assert digest_of_labels(labels, torch.arange(8)) == digest
    labels[2] = 9
    assert digest_of_labels(labels, torch.arange(8)) != digest
