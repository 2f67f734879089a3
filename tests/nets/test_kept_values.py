"""Records of what modules keep see every change, and a guard undoes it."""

import collections
import copy
import dataclasses
import functools
import random

import numpy as np
import pytest
import stateful_modules
import torch
from torch import nn

from pl_fed.nets.fingerprints import Fingerprints, digest
from pl_fed.nets.kept_values import KeptValues, Part, ValueGuard
from pl_fed.nets.user_values import user_values


@dataclasses.dataclass(slots=True)
class Meter:
    total: float = 0.0
    count: int = dataclasses.field(init=False)  # unset at first

    def add(self, number):
        self.total, self.count = self.total + number, 1


class Counts(dict):
    total = 0


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.frozen = nn.Linear(2, 1).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.number, self.words, self.table = 1, ["a"], {"x": {"y": [1.0]}}
        self.queue, self.numbers = collections.deque([1], maxlen=2), np.zeros(2)
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.legacy, self.meter, self.counts = np.random.RandomState(0), Meter(), Counts()
        self.torch = torch.Generator().manual_seed(0)
        self.tensors = (torch.zeros(2),)


def change_frozen(keeper):
    keeper.frozen.weight.data.add_(1)


CHANGES = {
    "number": lambda keeper: setattr(keeper, "number", 2),
    "words": lambda keeper: keeper.words.append("b"),
    "table": lambda keeper: keeper.table["x"]["y"].append(2.0),
    "queue": lambda keeper: keeper.queue.append(2),
    "numbers": lambda keeper: keeper.numbers.__iadd__(1),
    "python": lambda keeper: keeper.python.random(),
    "numpy": lambda keeper: keeper.numpy.random(),
    "legacy": lambda keeper: keeper.legacy.rand(),
    "meter": lambda keeper: keeper.meter.add(1.0),
    "counts": lambda keeper: setattr(keeper.counts, "total", 1),
    "torch": lambda keeper: torch.rand(1, generator=keeper.torch),
    "tensors": lambda keeper: keeper.tensors[0].data.add_(1),
    "added": lambda keeper: setattr(keeper, "added", 1),
    "mean": lambda keeper: keeper.mean.data.add_(1),
    "linear.training": lambda keeper: keeper.linear.eval(),
}


def parts(module):
    return [Part(name, part) for name, part in module.named_modules()]


@pytest.mark.parametrize("name", CHANGES)
def test_record_names_a_change_and_the_guard_undoes_it(name):
    keeper = Keeper()
    before, guard = KeptValues.record(parts(keeper)), ValueGuard(parts(keeper))
    assert guard.restore() == []
    CHANGES[name](keeper)
    changes = before.changes(KeptValues.record(parts(keeper)))
    assert changes.attributes | changes.buffers == {name}
    assert guard.restore() == [name]
    changes = before.changes(KeptValues.record(parts(keeper)))
    assert not changes.attributes | changes.buffers | changes.replaced_buffers


def test_record_tells_kinds_of_tensors_apart():
    keeper = Keeper()
    before = KeptValues.record(parts(keeper))
    change_frozen(keeper)
    keeper.mean = torch.ones(2)
    keeper.linear.weight.requires_grad_(False)
    keeper.linear.bias = nn.Parameter(torch.zeros(1))
    changes = before.changes(KeptValues.record(parts(keeper)))
    assert changes.frozen_parameters == {"frozen.weight"}
    assert changes.replaced_buffers == {"mean"}
    assert changes.toggled == {"linear.weight"}
    assert changes.replaced_parameters == {"linear.bias"}
    assert not changes.attributes


def test_fingerprints_of_copies_are_equal():
    keeper = Keeper()
    first, second = (KeptValues.record(parts(each)) for each in (keeper, copy.deepcopy(keeper)))
    assert first.attributes == second.attributes


def test_digest_sees_each_bit_and_place():
    numbers = torch.tensor([1.0, 2.0, float("nan")])
    assert digest(numbers) == digest(numbers.clone())
    others = [numbers.flip(0), -numbers, numbers[:2], numbers.double(), numbers.nan_to_num(3.0)]
    assert all(digest(other) != digest(numbers) for other in others)
    assert digest(torch.tensor([True, False])) != digest(torch.tensor([False, True]))


def test_cycles_end():
    values = [1]
    values.append(values)
    prints = Fingerprints({})
    before = prints.compute(values)
    values[0] = 2
    assert prints.compute(values) != before


SEEN = {"steps": 0}


def test_the_guard_ends_at_a_function_that_keeps_itself():
    def count(values):
        return sum(count(value) if isinstance(value, list) else 1 for value in values)

    module = nn.Module()
    module.count, module.counts = count, [count]
    guard = ValueGuard([Part("net", module)])
    module.counts.append(count)
    assert guard.restore() == ["net.counts"]
    assert module.counts == [count]


class Counting:
    total = 0

    def step(self):
        SEEN["steps"] += 1
        type(self).total += 1


def test_values_of_classes_and_files_are_found():
    assert dict(user_values(Counting)) == {
        "Counting.total": 0,
        f"{__name__}.SEEN": {"steps": 0},
    }


class Totals:
    steps = 0


def count_up(memo={}):  # noqa: B006
    Totals.steps += 1
    memo["n"] = len(SEEN)


def test_functions_that_methods_name_are_followed():
    scale = [1.0]

    class Indirect:
        @functools.lru_cache  # noqa: B019
        def step(self):
            return [count_up() for _ in scale] and digits_of(random)

        @property
        def factor(self):
            return stateful_modules.TOTALS["steps"]

    found = dict(user_values(Indirect))
    assert found.keys() == {
        *("Totals.steps", "count_up", f"{__name__}.SEEN", "stateful_modules.TOTALS"),
        f"{Indirect.step.__qualname__}",
    }
    before = KeptValues.record([Part("", Indirect())])
    scale[0] = 2.0
    changed = before.changes(KeptValues.record([Part("", Indirect())])).outside
    assert changed == {Indirect.step.__qualname__}


def digits_of(module):
    return module.__name__


def test_hooks_are_values_outside_of_modules():
    layer, calls = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: calls.append(1) or None)
    before = KeptValues.record(parts(layer))
    layer(torch.ones(1, 2))
    assert before.changes(KeptValues.record(parts(layer))).outside == {"_forward_hooks"}
