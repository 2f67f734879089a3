"""Feature skew: what each client's inputs look like."""

import importlib
import inspect
import pkgutil
from math import inf, nan

import pytest
import torch
from small_federations import Given, classes
from tables import table_test

import pl_fed.skews
from pl_fed.data import Arrays, DataSource, FederatedData
from pl_fed.partitioners import IID, Quantity
from pl_fed.skews import Colors, Quality, Rotations, Skew


def find_skews():
    for entry in pkgutil.walk_packages(pl_fed.skews.__path__, "pl_fed.skews."):
        for member in vars(importlib.import_module(entry.name)).values():
            samples_of_clients = inspect.isclass(member) and member.__module__ == entry.name
            if samples_of_clients and issubclass(member, Skew) and not inspect.isabstract(member):
                yield member


every = pytest.mark.parametrize("kind", list(find_skews()))


def images(n=12, channels=3, size=4):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(0))


@every
def test_contract_of_every_skew(kind):
    x, state = images(), torch.get_rng_state()
    changed = kind().change(x, 3, 5, seed=1)
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    assert not torch.equal(changed, x)
    assert torch.equal(x, images()), "the input is not changed"
    assert torch.equal(changed, kind().change(x, 3, 5, seed=1))
    assert not torch.equal(changed, kind().change(x, 2, 5, seed=1)), "clients differ"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("of", "std"), [("variance", 0.04**0.5), ("std", 0.04)])
def test_noise_grows_with_the_client(of, std):
    """σ i / m = 0.1 · 2 / 5."""
    noise = Quality(0.1, of).change(torch.zeros(100_000), 2, 5, seed=0)
    assert noise.std().item() == pytest.approx(std, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert Quality().change(torch.zeros(10), 0, 5, seed=0).eq(0).all(), "the first has none"


def test_clients_take_the_angles_in_turn():
    x = images()
    turned = [Rotations().change(x, client, 9, seed=0) for client in range(6)]
    assert torch.equal(turned[0], x)
    assert torch.equal(turned[1], x.rot90(1, (2, 3)))
    assert torch.equal(turned[2], x.flip(2).flip(3))
    assert torch.equal(turned[5], turned[1])


def test_other_angles_keep_the_centre():
    x = torch.zeros(1, 1, 5, 5)
    x[..., 2, :] = 1.0
    turned = Rotations([45.0]).change(x, 0, 1, seed=0)
    assert turned[0, 0, 2, 2] == pytest.approx(1.0, abs=1e-5)
    assert turned[0, 0, 1, 3] > turned[0, 0, 2, 3] > turned[0, 0, 3, 3]
    assert torch.equal(Rotations([90.0]).change(x, 0, 1, seed=0), x.rot90(1, (2, 3)))
    assert torch.equal(Rotations([-450.0]).change(x, 0, 1, seed=0), x.rot90(-1, (2, 3)))
    assert torch.equal(Rotations([360.0 * 2**70]).change(x, 0, 1, seed=0), x)


def test_colors_are_one_factor_per_channel():
    x = images()
    ratio = Colors(0.5).change(x, 4, 9, seed=2) / x
    assert (ratio.amax((0, 2, 3)) - ratio.amin((0, 2, 3)) < 1e-5).all()
    assert ((ratio >= 0.5 - 1e-6) & (ratio <= 1)).all()
    assert torch.equal(Colors(0.0).change(x, 4, 9, seed=2), x)


@table_test(
    ("make", "message"),
    [
        (lambda: Quality(-0.1), "`sigma` to be at least 0"),
        (lambda: Quality(of="power"), "`of` to be 'variance' or 'std' but got 'power'"),
        (lambda: Rotations([]), "`degrees` to hold at least one angle"),
        (lambda: Rotations([0.0, nan]), r"`degrees\[1\]` to be a finite number but got nan"),
        (lambda: Rotations([inf]), r"`degrees\[0\]` to be a finite number but got inf"),
        (lambda: Colors(1.5), r"`strength` to be in \[0, 1\] but got 1.5"),
        (lambda: Rotations().change(torch.rand(4, 5), 0, 1, 0), r"for Rotations but got \[4, 5\]"),
        (lambda: Colors().change(torch.rand(4, 5), 0, 1, 0), r"for Colors but got \[4, 5\]"),
    ],
)
def test_invalid_arguments_and_inputs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# In a federation


class Pictures(DataSource):
    def load(self):
        return Arrays(images(40), torch.arange(40) % 4, num_classes=4)


def split_clients(skew, partitioner=None, **settings):
    data = FederatedData(Pictures(), partitioner or IID(), 4, skew=skew, seed=0, **settings)
    return data.clients


def samples_of_clients(clients, data):
    parts = (data.train, data.val, data.test)
    return torch.cat([torch.cat([part.samples(k) for part in parts]) for k in clients])


def test_all_parts_of_a_client_have_the_same_skew():
    plain, turned = split_clients(None), split_clients(Rotations())
    for part in ("train", "val", "test"):
        assert torch.equal(plain.part(part).index, turned.part(part).index)
    for client in range(4):
        samples = samples_of_clients([client], plain)
        assert torch.equal(turned.inputs[samples], plain.inputs[samples].rot90(client, (2, 3)))


def test_noise_follows_normalization_and_rotation_precedes_it():
    settings = {"normalize": ([0.5, 0.5, 0.5], [0.1, 0.1, 0.1])}
    plain = split_clients(None, **settings)
    noisy = split_clients(Quality(4.0), **settings)
    change = noisy.inputs - plain.inputs
    assert change[samples_of_clients([0], plain)].eq(0).all()
    assert change[samples_of_clients([2], plain)].std().item() == pytest.approx(2**0.5, rel=0.2)
    turned = split_clients(Rotations([45.0]), **settings)
    assert turned.inputs.min().item() == pytest.approx(-5.0, abs=0.1), "corners are black, not grey"


def test_samples_of_several_clients_are_copied():
    partitioner = Quantity(beta=5.0, min_size=8, overlapping=True)
    plain, turned = split_clients(None, partitioner), split_clients(Rotations(), partitioner)
    assert (
        len(turned.inputs)
        == sum(len(samples_of_clients([k], plain)) for k in range(4))
        > len(plain.inputs)
    )
    for client in range(4):
        before, after = samples_of_clients([client], plain), samples_of_clients([client], turned)
        assert torch.equal(turned.inputs[after], plain.inputs[before].rot90(client, (2, 3)))
        assert torch.equal(turned.targets[after], plain.targets[before])


def test_skew_that_changes_shapes_is_refused():
    class Cut(Skew):
        def change(self, x, client, num_clients, seed):
            return x[..., :2]

    with pytest.raises(ValueError, match=r"`skew` to keep the shape .* but got .* from Cut"):
        split_clients(Cut())


def test_inputs_of_the_source_are_unchanged():
    source = Given(classes([6, 6]))
    before = source.load().inputs.clone()
    FederatedData(source, skew=Quality(9.0), seed=0).clients.inputs.sum()
    assert torch.equal(source.load().inputs, before)
