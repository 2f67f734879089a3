"""Random data sets: drawn anew for each training minibatch, the same in engines and processes."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from small_federations import run_rounds, seeded
from tables import table_test
from torch import nn
from torch.utils.data import Dataset, default_collate

import pl_fed
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import FederatedData, TorchDataset
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.partitioners import IID
from pl_fed.random import fork_all_generators, key
from pl_fed.skews import Quality

COUNT = 24
DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "random": random.random,
}


class Noisy(Dataset):
    """Four numbers, all moved by one draw, and a class that a second draw may change."""

    def __init__(self, draw=DRAWS["torch"], dtype=torch.float32, count=COUNT):
        self.draw, self.dtype, self.count = draw, dtype, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError
        move = 100 * self.draw()
        label = (index + (self.draw() > 0.5)) % 3
        return (torch.arange(4) + index + move).to(self.dtype), label


def federated(dataset=None, redraw=None, **settings):
    source = TorchDataset(dataset or Noisy(), redraw=redraw, num_classes=3)
    settings = {"val_fraction": 0.25, "test_fraction": 0.25, **settings}
    return FederatedData(source, IID(), 3, batch_size=3, seed=0, **settings)


def draw_by_hand(dataset, index, round, client, visit):
    with fork_all_generators() as seed:
        seed(key(5, "data set", round, client, visit))
        return dataset[index]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_visit_of_a_sample_has_draws_of_its_own(draw):
    dataset = Noisy(draw)
    data = federated(dataset).clients
    clients, rule = torch.tensor([2, 0]), BatchRule(3)
    for round in range(2):
        batches = Batches(data, clients, [4, 3], rule, 5, round)
        for position, client in enumerate(clients.tolist()):
            visit = 0
            for batch in batches.iterate_client(position):
                for x, y, sample in zip(batch.inputs, batch.targets, batch.samples.tolist()):
                    expected = draw_by_hand(dataset, sample, round, client, visit)
                    assert (x.tolist(), y.item()) == (expected[0].tolist(), expected[1])
                    visit += 1
            assert visit == [8, 7][position]  # of 4 samples, in steps of 3 and 1


class Scaled(nn.Module):
    """A net for large numbers of any type."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x):
        return self.net(x.to(self.net.weight.dtype) / 100)


SETTINGS = {
    "floats": (torch.float32, {}),
    "images": (torch.uint8, {}),
    "integers": (torch.int32, {}),
    "normalized floats": (torch.float64, {"normalize": "feature"}),
    "normalized images": (torch.uint8, {"normalize": [0.5, 2.0]}),
    "normalized integers": (torch.int64, {"normalize": "channel"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_engines_agree(dtype, settings):
    data = federated(Noisy(dtype=dtype), **settings)
    run = partial(run_rounds, Ditto(seeded(Scaled), local_epochs=2), data, 2)
    one_by_one = run(engine="one_by_one")
    assert one_by_one.distance(run(engine="stacked", chunk_size=2)) < 1e-10
    frozen = federated(Noisy(dtype=dtype), redraw=False, **settings)
    assert one_by_one.distance(run_rounds(Ditto(seeded(Scaled), local_epochs=2), frozen, 2)) > 1e-3


@pytest.mark.slow
def test_chunks_agree():
    run = partial(run_rounds, FedAvg(seeded(Scaled)), federated(), 2)
    results = [run(engine=e, chunk_size=size) for e in ("one_by_one", "stacked") for size in (1, 3)]
    assert all(results[0].distance(other) < 1e-10 for other in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_samples_drawn_anew_are_prepared_like_stored_ones(dtype, settings):
    """A data set that does not draw gives the same numbers, whether it is read again or not."""
    still = Noisy(lambda: 0.25, dtype)
    drawn, stored = (
        run_rounds(FedAvg(seeded(Scaled)), federated(still, redraw=redraw, **settings), 2)
        for redraw in (True, False)
    )
    assert drawn.distance(stored) == 0


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.bool, torch.int16])
def test_samples_drawn_anew_have_the_type_of_stored_ones(dtype, caplog):
    still = Noisy(lambda: 0.01, dtype)
    data = federated(still, redraw=True).clients
    index = torch.tensor([3, 1])
    inputs, targets = data.read_samples(index, [7, 8])
    stored = data.batch(index)
    assert (inputs.dtype, targets.dtype) == (stored.inputs.dtype, stored.targets.dtype)
    assert torch.equal(inputs, stored.inputs)
    assert "draws at random" not in caplog.text


def test_inputs_on_disk_give_the_same_numbers():
    numbers = []
    for on_disk in (False, True):
        source = TorchDataset(Noisy(dtype=torch.uint8), num_classes=3, on_disk=on_disk)
        data = FederatedData(source, IID(), 3, batch_size=3, seed=0)
        assert data.clients.mapped == on_disk
        numbers.append(run_rounds(FedAvg(seeded(Scaled)), data, 2))
    assert numbers[0].distance(numbers[1]) == 0


@pytest.mark.slow
def test_stop_and_resume_is_bit_equal(tmp_path):
    def fit(folder, rounds, **settings):
        federation = pl_fed.Federation(pl_fed.samplers.All(), seed=0)
        trainer = pl_fed.Trainer(
            federation, max_epochs=rounds, accelerator="cpu", run_dir=tmp_path / folder,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        client = Ditto(seeded(Scaled))
        trainer.fit(client, federated(), **settings)
        return client.row("global").data.clone(), tmp_path / folder / "checkpoints" / "last.ckpt"

    expected, _ = fit("straight", 3)
    _, checkpoint = fit("stopped", 2)
    resumed, _ = fit("resumed", 3, ckpt_path=checkpoint)
    assert torch.equal(resumed, expected)


class Ragged(Dataset):
    """Between 1 and 9 numbers."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        length = 1 + int(8 * torch.rand(())) if index != 17 else 9
        return {"ids": torch.full((length,), index), "label": index % 3, "site": index % 2}


def test_samples_of_several_lengths_are_padded_to_the_longest():
    source = TorchDataset(Ragged(), client="site", padding={"ids": -1})
    arrays = source.load()
    assert arrays.inputs.shape == (300, 9)
    inputs, targets = arrays.redraw([4, 17], [0, 1])
    assert inputs.shape == (2, 9)
    assert targets.tolist() == [1, 2]
    lengths = (inputs != -1).sum(1).tolist()
    assert inputs[0].tolist() == [4] * lengths[0] + [-1] * (9 - lengths[0])
    assert lengths[1] == 9


def mask_at_random(samples):
    """Collate token ids, and hide some of them, as a collator for language models."""
    ids = torch.stack([x for x, _ in samples])
    return torch.where(torch.rand(ids.shape) < 0.5, -1, ids), ids


def test_draws_of_a_collate_function_are_drawn_anew():
    samples = [(torch.arange(8) + 10 * index, 0) for index in range(COUNT)]
    arrays = TorchDataset(samples, collate_fn=mask_at_random).load()
    (one, ids), (other, _) = (arrays.redraw([3, 5], [draw, draw + 1]) for draw in (1, 4))
    assert not torch.equal(one, other)
    assert torch.equal(ids, torch.stack([samples[3][0], samples[5][0]]))
    assert torch.equal(arrays.redraw([5], [2])[0], one[1:])


def mix_up(samples):
    inputs, targets = default_collate(samples)
    share, others = random.random(), torch.randperm(len(inputs))
    return share * inputs + (1 - share) * inputs[others], targets


def sort_by_length(samples):
    samples.sort(key=lambda sample: -int(sample[0].sum()))
    return default_collate(samples)


def center(samples):
    inputs, targets = default_collate(samples)
    return inputs - inputs.mean(0), targets


@pytest.mark.parametrize("collate", [mix_up, sort_by_length, center])
def test_batches_that_mix_samples_reach_the_steps_of_a_module_unchanged(collate):
    samples = [(torch.full((2,), float(k)), k % 3) for k in range(COUNT)]
    arrays = TorchDataset(samples, collate_fn=collate).load()
    with fork_all_generators() as seed:
        seed(key(key(0, "data set", 3) if collate is mix_up else 0, "collate"))
        expected = collate([samples[k] for k in (3, 5)])
    batch = arrays.entries.join(arrays.inputs[[3, 5]], None)
    assert all(map(torch.equal, batch, expected))
    data = FederatedData(TorchDataset(samples, collate_fn=collate), IID(), 2)
    with pytest.raises(ValueError, match="`collate_fn` to make each row of a batch of one sample"):
        run_rounds(FedAvg(nn.Linear(2, 3)), data)


class OwnGenerator(Noisy):
    """Draws from a generator that nobody else can seed."""

    def __init__(self):
        generator = np.random.default_rng(0)
        super().__init__(lambda: generator.random())


def test_own_generator_is_reported():
    with pytest.warns(UserWarning, match="OwnGenerator .* a generator of its own: draw from the"):
        assert TorchDataset(OwnGenerator()).load().redraw is None
    with pytest.raises(ValueError, match="`redraw` can repeat but OwnGenerator gives other"):
        TorchDataset(OwnGenerator(), redraw=True).load()


def test_random_parts_for_tests_are_drawn_once(caplog):
    still = Noisy(lambda: 0.25)
    arrays = TorchDataset(still, test=Noisy(), num_classes=3).load()
    assert arrays.redraw is None
    assert "Noisy draws at random: pl_fed draws its samples once." in caplog.text


class Growing(Noisy):
    """Samples whose shape is random."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x[: 1 + int(torch.rand(()) * 4)], y


def pad_each_batch(samples):
    xs, ys = zip(*samples)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor(ys)


def test_shapes_that_change_are_refused():
    words = r"shape \[\d\] when they are drawn anew .*: set `padding` [^(]* \(in Growing\)\.$"
    with pytest.raises(ValueError, match=words):
        TorchDataset(Growing(), collate_fn=pad_each_batch).load()


@table_test(
    ("settings", "word"),
    [({"skew": Quality()}, "skew"), ({"transforms": [nn.Identity()]}, "transforms")],
)
def test_changes_of_all_samples_at_once_are_refused(settings, word):
    words = f"`{word}` to be left out for inputs that are drawn anew, unless `data.dataset.redraw`"
    with pytest.raises(ValueError, match=words):
        federated(**settings).clients  # noqa: B018


def test_net_that_keeps_features_is_refused():
    net = Scaled()
    net.keep_features = True
    with pytest.raises(ValueError, match="drawn once for Scaled, which keeps features, but got a"):
        run_rounds(FedAvg(net), federated(), 1)


def test_missing_targets_are_refused_and_no_draws(recwarn):
    targets = torch.tensor([1.0, torch.nan] * 8)
    source = TorchDataset([*zip(torch.eye(16), targets, range(16))], client=2)
    with pytest.raises(ValueError, match=r"`targets` .* in 8 samples.*such as -1"):
        source.load()
    assert not [warning for warning in recwarn if "read again" in str(warning.message)]
