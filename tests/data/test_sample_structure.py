"""Samples are matched by key: in any nesting, in every part, for dataclasses and named tuples."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from small_federations import run_rounds, sgd
from tables import table_test
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData, LightningData, TorchDataset
from pl_fed.data.batch_roles import BatchRoles
from pl_fed.data.sample_reader import SampleReader

COUNT = 300  # samples are read 256 at a time


class Samples(Dataset):
    def __init__(self, make, count=COUNT):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


def values(index):
    return torch.full((2,), 1.0), torch.full((2,), 2.0), index % 2


def flat(index, turned=lambda index: index >= 256):
    a, b, y = values(index)
    return {"b": b, "label": y, "a": a} if turned(index) else {"a": a, "b": b, "label": y}


def nested(index):
    a, b, y = values(index)
    inner = {"b": b, "a": (a, {"c": a})} if index % 3 else {"a": (a, {"c": a}), "b": b}
    return {"x": inner, "label": y}


@dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor
    label: int


@dataclass
class TurnedPair:
    label: int
    b: torch.Tensor
    a: torch.Tensor


NamedPair = namedtuple("NamedPair", ["a", "b", "label"])
TurnedNamed = namedtuple("TurnedNamed", ["b", "a", "label"])


def unique(tree):
    if isinstance(tree, dict):
        return {name: unique(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(unique, tree))
    return tree.unique().tolist()


def read(make, **settings):
    arrays = TorchDataset(Samples(make), **settings).load()
    assert arrays.targets.tolist() == [index % 2 for index in range(COUNT)]
    return unique(arrays.inputs)


def test_dicts_in_another_order_of_keys_are_matched_by_key():
    assert read(flat) == {"a": [1.0], "b": [2.0]}
    assert read(lambda index: flat(index, lambda k: k % 2)) == {"a": [1.0], "b": [2.0]}
    assert read(flat, padding=0) == {"a": [1.0], "b": [2.0]}
    assert read(nested) == {"a": ([1.0], {"c": [1.0]}), "b": [2.0]}


def test_order_of_a_users_collation_is_matched_by_key():
    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return dict(reversed(batch.items())) if len(samples) < 256 else batch

    assert read(flat, collate_fn=collate) == {"a": [1.0], "b": [2.0]}


def test_dataclasses_and_named_tuples_are_matched_by_name():
    assert read(lambda k: (Pair if k < 256 else TurnedPair)(**flat(k))) == {"a": [1.0], "b": [2.0]}
    named = read(lambda k: (TurnedNamed if k % 2 else NamedPair)(**flat(k)))
    assert named == ([1.0], [2.0])


def test_parts_in_another_order_of_keys_are_matched_by_key():
    def part(turned):
        return Samples(lambda index: flat(index, lambda _: turned), 5)

    arrays = TorchDataset(part(False), val=part(True), test=part(True)).load()
    assert unique(arrays.inputs) == {"a": [1.0], "b": [2.0]}


def test_drawn_samples_are_matched_by_key():
    def make(index):
        a, b, y = values(index)
        noise = torch.rand(2) / 10
        return {"b": b + noise, "label": y, "a": a} if index % 2 else flat(index)

    data = FederatedData(TorchDataset(Samples(make, 20), client=[k % 2 for k in range(20)]))
    clients = data.clients
    assert clients.redraw is not None
    inputs, _ = clients.read_samples(torch.arange(20), [*range(20)])
    assert inputs["a"].unique().tolist() == [1.0]
    assert inputs["b"].min() >= 2.0


@table_test(
    ("change", "words"),
    [
        (lambda s: {"a": s["a"], "label": s["label"]}, "keys a, b, label .* without 'b', sample"),
        (lambda s: {**s, "c": s["a"]}, "keys a, b, label but got one with 'c', sample"),
        (lambda s: {**s, "a": {"d": s["a"]}}, "entry 'a' .* type Tensor but got dict of 1, sample"),
        (lambda s: (s["a"], s["b"]), "(dict of a, b, label but got tuple of 2|with '0'), sample"),
        (lambda s: {**s, "b": s["b"].double()}, "float32 and torch.float64 in entry 'b'"),
    ],
)
@table_test("first", [256, 270])
def test_other_keys_and_types_are_refused_by_name(change, words, first):
    def make(index):
        sample = flat(index, lambda _: False)
        return change(sample) if index >= first else sample

    if "float64" in words and first == 270:
        pytest.skip("torch joins the types of one chunk")
    with pytest.raises(ValueError, match=f"^Expected .*{words}") as failed:
        TorchDataset(Samples(make)).load()
    assert str(first) in str(failed.value)


def test_unused_keys_may_differ():
    def make(index):
        return {**flat(index), **({"note": "x"} if index % 2 else {"extra": [1, 2]})}

    assert read(make, inputs=["a", "b"]) == {"a": [1.0], "b": [2.0]}


def test_owner_can_be_an_input():
    samples = [{"user": k % 3, "pos": k, "neg": 9 - k} for k in range(9)]
    arrays = TorchDataset(samples, client="user", inputs=["user", "pos"], target="neg").load()
    assert arrays.inputs["user"].tolist() == arrays.client.tolist() == [0, 1, 2] * 3
    pairs = [(k % 3, k, 9 - k) for k in range(9)]
    arrays = TorchDataset(pairs, client=0, inputs=[0, 1], target=2).load()
    assert [leaf.tolist() for leaf in arrays.inputs] == [[0, 1, 2] * 3, [*range(9)]]
    arrays = TorchDataset(pairs, client=0).load()
    assert (arrays.inputs.tolist(), arrays.targets.tolist()) == ([*range(9)], [*range(9, 0, -1)])


class Parts(LightningDataModule):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        samples = [self.kind(torch.randn(2), torch.randn(2), k % 2) for k in range(12)]
        return DataLoader(samples, 4, collate_fn=collate_pairs)


def collate_pairs(samples):
    return type(samples[0])(
        torch.stack([s.a for s in samples]),
        torch.stack([s.b for s in samples]),
        torch.tensor([s.label for s in samples]),
    )


class ReadsFields(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        outputs = self.net(torch.cat([batch.a, batch.b], 1))
        return nn.functional.cross_entropy(outputs, batch.label)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pair, NamedPair])
def test_steps_receive_the_dataclass_or_named_tuple_of_their_samples(kind):
    source = LightningData(Parts(kind), client=[k % 3 for k in range(12)])
    data = FederatedData(source, batch_size=4, val_fraction=0, test_fraction=0)
    client = FedAvg(ReadsFields(), optimizer=sgd(0.1))
    runs = [run_rounds(client, data, 1, torch.float32, engine=e) for e in ("one_by_one", "stacked")]
    torch.testing.assert_close(runs[0].w, runs[1].w)


def join_as(kind):
    return lambda samples: kind(*map(torch.stack, zip(*samples)))


def test_steps_receive_the_dataclass_or_named_tuple_of_the_collate_function():
    """They were a dict or a tuple of the fields, as the samples are."""
    samples = [values(index) for index in range(4)]
    samples = [(a, b, torch.tensor(y)) for a, b, y in samples]
    for kind in (Pair, NamedPair):
        joined = SampleReader(BatchRoles(), join_as(kind))(samples)
        batch = joined.entries.join(joined.inputs, joined.targets)
        assert type(batch) is kind
        assert torch.equal(batch.b, torch.stack([b for _, b, _ in samples]))
    named = [NamedPair(*sample) for sample in samples]
    joined = SampleReader(BatchRoles(), join_as(lambda *parts: parts))(named)
    assert type(joined.entries.join(joined.inputs, joined.targets)) is tuple
