"""Which federation a checkpoint is of: its samples, not their numbers alone."""

import pytest
import torch
from small_federations import Given, mlp, seeded, sgd

from pl_fed.clients import FedAvg
from pl_fed.data import Arrays, Digits, FederatedData
from pl_fed.data.fingerprint import digest_of_labels, fingerprint_of, same_inputs
from pl_fed.partitioners import IID
from pl_fed.rounds.identity import check_identity, federation_identity, states_identity
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


def of(made, **how):
    return identity(FederatedData(Given(made), **how))


def digits(seed=0, **how):
    return identity(FederatedData(Digits(), IID(**how), 10, seed=seed))


def test_data_made_anew_have_the_same_identity():
    check_identity(digits(), digits())
    check_identity(of(arrays()), of(arrays()))


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (lambda: digits(0), lambda: digits(5), "assignment of samples to clients"),
        (lambda: digits(), lambda: digits(shuffle=False), "assignment of samples to clients"),
        (lambda: of(arrays()), lambda: of(arrays(owners=(3, 2, 1, 0))), "assignment of samples"),
        (lambda: of(arrays()), lambda: of(arrays(seed=1)), "inputs"),
    ],
    ids=["seed", "shuffle", "owners the other way round", "other inputs"],
)
def test_as_many_samples_do_not_make_a_checkpoint_fit(saved, here, words):
    match = f"^Expected a checkpoint of a run with the same {words}.* with others"
    with pytest.raises(ValueError, match=match):
        check_identity(saved(), here())


def test_other_labels_of_the_same_inputs_are_refused():
    other = arrays()
    other.targets[:2] = other.targets[:2].flip(0)
    match = r"^Expected a checkpoint of a run with the same labels .* has other samples"
    with pytest.raises(ValueError, match=match):
        check_identity(of(arrays()), of(other))


def test_a_part_that_was_not_saved_is_refused():
    here = digits()
    for name in here:
        saved = {part: value for part, value in here.items() if part != name}
        with pytest.raises(ValueError, match=r"^Expected a checkpoint"):
            check_identity(saved, here)


def test_clients_states_may_be_evaluated_on_other_samples():
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    one, other = (FederatedData(Given(arrays(seed))).clients for seed in (0, 1))
    assert states_identity(client, one, 0) == states_identity(client, other, 0)


def test_normalized_data_are_the_same_samples():
    """Sums over samples are not the same bits on every machine."""
    check_identity(of(arrays()), of(arrays(), normalize="feature"))


def test_copies_of_shared_samples_are_the_samples():
    made = Arrays(torch.rand(80, 1, 4, 4), torch.arange(80) % 3, num_classes=3)
    plain, skewed = (
        FederatedData(Given(made), IID(), 4, skew=skew).clients.copy_shared_samples()
        for skew in (None, Rotations())
    )
    assert plain.digests == skewed.digests


def test_inputs_that_were_decoded_elsewhere_are_the_same():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 3, 16, 16), generator=draw, dtype=torch.uint8)
    nearly = (images.int() + (torch.rand(images.shape, generator=draw) < 0.05)).clamp(0, 255)
    assert same_inputs(fingerprint_of(images), fingerprint_of(nearly.to(torch.uint8)))
    assert not same_inputs(fingerprint_of(images), fingerprint_of(images.roll(1, 0)))
    assert not same_inputs(fingerprint_of(images), fingerprint_of(images.float()))


@pytest.mark.parametrize("shape", [(0, 3), (5,), (5, 0), (100, 2, 2)])
def test_a_fingerprint_of_any_shape(shape):
    made = fingerprint_of(torch.ones(shape))
    assert same_inputs(made, fingerprint_of(torch.ones(shape)))
    assert len(made["projections"]) == min(64, shape[0])


def test_large_labels_are_hashed_in_part(monkeypatch):
    monkeypatch.setattr("pl_fed.data.fingerprint._LARGE", 8)
    monkeypatch.setattr("pl_fed.data.fingerprint._ENTRIES", 4)
    labels = torch.arange(8)
    digest = digest_of_labels(labels, torch.arange(8))
    labels[1] = 9
    assert digest_of_labels(labels, torch.arange(8)) == digest
    labels[2] = 9
    assert digest_of_labels(labels, torch.arange(8)) != digest
