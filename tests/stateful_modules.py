"""LightningModules that keep something between steps, and what a step of each may do.

``ACCEPTED`` equal FedAvg by hand in every engine. ``REFUSED`` name the attribute.
"""

import collections
import copy
import dataclasses
import itertools
import random

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ACCEPTED, REFUSED = {}, {}


def accepted(kind):
    ACCEPTED[kind.__name__] = kind
    return kind


def refused(*words):
    """Enter a module whose refusal has these words."""

    def enter(kind):
        REFUSED[kind.__name__] = (kind, words)
        return kind

    return enter


class Stateful(LightningModule):
    """A small classifier; ``keep`` makes what it keeps."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.keep()

    def keep(self):
        """Make what the module keeps; nothing by default."""

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).double().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


# Accepted: buffers, and values that carry nothing to another client


@accepted
class RunningScale(Stateful):
    def keep(self):
        self.register_buffer("scale", torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.scale.mul_(0.5).add_(0.5 * loss.detach())
        return loss / self.scale


@accepted
class ReplacedScale(RunningScale):
    def training_step(self, batch, batch_idx):
        old, loss = self.scale, self.loss(batch)
        self.scale = 0.5 * self.scale + 0.5 * loss.detach()
        return loss / old


@accepted
class SetScale(RunningScale):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.scale.data = 0.5 * self.scale.data + 0.5 * loss.detach().to(self.scale)
        return loss / self.scale


class HandWrittenNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        mean, var = (x.mean(0), x.var(0)) if self.training else (self.mean, self.var)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.var = 0.9 * self.var + 0.1 * var.detach()
        return (x - mean) / (var + 1e-5).sqrt()


@accepted
class NormByHand(Stateful):
    def keep(self):
        self.net.insert(0, HandWrittenNorm(4))


@accepted
class CumulativeNorm(Stateful):
    def keep(self):
        self.net.insert(0, nn.BatchNorm1d(4, momentum=None))


@accepted
class MeanTeacher(Stateful):
    """The target is buffers that the step updates in place, as the refusals advise."""

    def keep(self):
        for name, parameter in self.net.named_parameters():
            self.register_buffer(f"t_{name.replace('.', '_')}", parameter.detach().clone())

    def training_step(self, batch, batch_idx):
        target = {}
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                buffer = getattr(self, f"t_{name.replace('.', '_')}")
                target[name] = buffer.lerp_(parameter, 0.1).clone()
        outputs = torch.func.functional_call(self.net, target, batch[0])
        return self.loss(batch) + functional.mse_loss(self(batch[0]), outputs)


@accepted
class Unsaved(Stateful):
    def keep(self):
        self.register_buffer("sum", torch.tensor(0.0), persistent=False)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.sum.add_(loss.detach())
        return loss / self.sum


@accepted
class Stash(Stateful):
    """Stores activations by a hook, as for pictures of attention."""

    def keep(self):
        self.net[0].activations = {}
        self.net[0].register_forward_hook(
            lambda layer, _, outputs: layer.activations.update(last=outputs)
        )

    def training_step(self, batch, batch_idx):
        self.last_batch = batch
        return self.loss(batch)


@accepted
class CachedConstant(Stateful):
    def keep(self):
        self.mask = None

    def training_step(self, batch, batch_idx):
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1, batch[0].shape[1], dtype=batch[0].dtype)
        return functional.cross_entropy(self(batch[0] * self.mask), batch[1])


@accepted
class LazyBuffer(Stateful):
    def training_step(self, batch, batch_idx):
        if not hasattr(self, "places"):
            places = torch.linspace(0.5, 1, batch[0].shape[1], dtype=batch[0].dtype)
            self.register_buffer("places", places, persistent=False)
        return functional.cross_entropy(self(batch[0] * self.places), batch[1])


@accepted
class OldSpectralNorm(Stateful):
    def keep(self):
        torch.nn.utils.spectral_norm(self.net[0])


@accepted
class EvaluatedNorm(Stateful):
    """Keeps one norm in evaluation mode, by a call in each step."""

    def keep(self):
        self.net.insert(0, nn.BatchNorm1d(4))

    def training_step(self, batch, batch_idx):
        self.net[0].eval()
        return self.loss(batch)


@accepted
class ClampedWeights(Stateful):
    def training_step(self, batch, batch_idx):
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        return self.loss(batch)


class ScaledTanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.scale * x.tanh()


@accepted
class ScriptedParts(Stateful):
    """Has an activation and a frozen teacher in TorchScript."""

    def keep(self):
        self.net[1] = torch.jit.script(ScaledTanh())
        teacher = nn.Sequential(nn.Linear(4, 5), ScaledTanh(), nn.Linear(5, 3))
        self.teacher = torch.jit.script(teacher.requires_grad_(False))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + functional.mse_loss(self(batch[0]), self.teacher(batch[0]))


@accepted
class PenalizedList(Stateful):
    """Keeps its weights in a list, too, for a penalty."""

    def keep(self):
        self.weights = [weight for weight in self.net.parameters() if weight.dim() > 1]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 1e-3 * sum(weight.square().sum() for weight in self.weights)


@accepted
class GradientPenalty(Stateful):
    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        loss = functional.cross_entropy(self(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


@accepted
class DifferentialEquation(Stateful):
    def training_step(self, batch, batch_idx):
        x = batch[0].detach().requires_grad_()
        slope = torch.autograd.grad(self(x)[:, 0].sum(), x, create_graph=True)[0]
        curve = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0]
        return self.loss(batch) + 0.1 * curve.square().mean()


# Refused: frozen parameters


@refused("requires_grad=False", "`target.0.bias`")
class Target(Stateful):
    def keep(self):
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def move(self):
        with torch.no_grad():
            for parameter, online in zip(self.target.parameters(), self.net.parameters()):
                parameter.lerp_(online, 0.1)

    def training_step(self, batch, batch_idx):
        self.move()
        return self.loss(batch) + functional.mse_loss(self(batch[0]), self.target(batch[0]))


@refused("requires_grad=False", "`target.0.bias`")
class TargetByData(Target):
    def move(self):
        for parameter, online in zip(self.target.parameters(), self.net.parameters()):
            parameter.data = 0.9 * parameter.data + 0.1 * online.data


@refused("requires_grad=False", "`target.0.bias`")
class TargetByState(Target):
    def move(self):
        self.target.load_state_dict(self.net.state_dict())


@refused("requires_grad=False", "`target.0.bias`")
class TargetReplaced(Target):
    def move(self):
        self.target = copy.deepcopy(self.net).requires_grad_(False)


@refused("`hidden`")
class HiddenTarget(Target):
    """The target is in a list, so that it is no submodule."""

    def keep(self):
        self.hidden = [copy.deepcopy(self.net).requires_grad_(False)]

    def move(self):
        with torch.no_grad():
            for parameter, online in zip(self.hidden[0].parameters(), self.net.parameters()):
                parameter.data = parameter.to(online).lerp_(online, 0.1)

    def training_step(self, batch, batch_idx):
        self.move()
        return self.loss(batch) + functional.mse_loss(self(batch[0]), self.hidden[0](batch[0]))


@refused("`requires_grad`", "`net.0.bias`")
class Toggled(Stateful):
    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx % 2 == 0)
        return self.loss(batch)


@refused("`.data`", "`net.0.bias`")
class MovedWeights(Stateful):
    def training_step(self, batch, batch_idx):
        for parameter in self.net.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)
        return self.loss(batch)


# Refused: attributes


@refused("`n`")
class Counter(Stateful):
    def keep(self):
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        return self.loss(batch) * min(1.0, self.n / 6)


@refused("`n`")
class LazyCounter(Counter):
    def keep(self):
        self.n = None

    def training_step(self, batch, batch_idx):
        self.n = 0 if self.n is None else self.n + 1
        return self.loss(batch)


@refused("`n`")
class SecondStepCounter(Counter):
    def training_step(self, batch, batch_idx):
        self.n += batch_idx % 2
        return self.loss(batch)


@refused("`net.1.temperature`")
class Temperature(Stateful):
    def keep(self):
        self.net[1].temperature = 1.0

    def training_step(self, batch, batch_idx):
        self.net[1].temperature *= 0.9
        return self.loss(batch) / self.net[1].temperature


class Box:
    __slots__ = ("value",)


@dataclasses.dataclass
class Statistics:
    mean: float = 0.0


def counting():
    count = 0

    def count_up():
        nonlocal count
        count += 1
        return count

    return count_up


def make_box():
    box = Box()
    box.value = 1.0
    return box


def grow(name):
    return lambda state: getattr(state, name)(1.0)


CONTAINERS = {
    "a list": (list, grow("append")),
    "a deque": (lambda: collections.deque(maxlen=3), lambda q: q.append(torch.rand(()))),
    "a set": (set, lambda state: state.add(len(state))),
    "a dict of dicts": (
        lambda: {"a": {"b": 0}},
        lambda state: state["a"].update(b=state["a"]["b"] + 1),
    ),
    "a tensor in a list": (lambda: [torch.zeros(1)], lambda state: state[0].add_(1)),
    "a tensor by data": (lambda: [torch.zeros(1)], lambda state: state[0].data.add_(1)),
    "a data class": (Statistics, lambda state: setattr(state, "mean", state.mean + 1)),
    "an object with slots": (make_box, lambda state: setattr(state, "value", state.value / 2)),
    "an array": (lambda: np.zeros(2), lambda state: state.__iadd__(1)),
    "a generator of Python": (lambda: random.Random(0), lambda state: state.random()),
    "a generator of NumPy": (lambda: np.random.default_rng(0), lambda state: state.random()),
    "a generator of torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda state: torch.rand(1, generator=state),
    ),
    "a count": (lambda: itertools.count(), next),
    "a closure": (counting, lambda state: state()),
}


def keeping(make, change):
    """Return a class of modules that change an object in each step."""

    class Keeping(Stateful):
        def keep(self):
            self.kept = make()

        def training_step(self, batch, batch_idx):
            change(self.kept)
            return self.loss(batch)

    return Keeping


for _name, (_make, _change) in CONTAINERS.items():
    REFUSED[_name] = (keeping(_make, _change), ("`kept`",))


@refused("`optimizer`", "`weights`")
class OwnOptimizer(Stateful):
    """Moves weights of its own, which no module has registered, by an optimizer of its own."""

    def keep(self):
        self.weights = torch.ones(2, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.weights], 0.1)

    def training_step(self, batch, batch_idx):
        self.optimizer.zero_grad()
        self.weights.square().sum().backward()
        self.optimizer.step()
        return self.loss(batch) * self.weights.detach().sum()


@refused("`best`")
class Best(Stateful):
    def keep(self):
        self.best = float("inf")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.best = min(self.best, float(loss.detach()))
        return loss


@refused("`started`")
class ActNorm(Stateful):
    """The first batch of all sets the shift."""

    def keep(self):
        self.started = False
        self.register_buffer("shift", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        if not self.started:
            self.shift.copy_(batch[0].mean(0))
            self.started = True
        return functional.cross_entropy(self(batch[0] - self.shift), batch[1])


@refused("`previous`")
class Previous(Stateful):
    def keep(self):
        self.previous = None

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        loss = functional.cross_entropy(outputs, batch[1])
        if self.previous is not None and len(self.previous) == len(outputs):
            loss = loss + functional.mse_loss(outputs, self.previous)
        self.previous = outputs.detach()
        return loss


@refused("mode", "`net.0.training`")
class FlippedMode(Stateful):
    def keep(self):
        self.net.insert(0, nn.BatchNorm1d(4))

    def training_step(self, batch, batch_idx):
        self.net[0].train(not self.net[0].training)
        return self.loss(batch)


@refused("integers", "`n`", "persistent=False")
class IntegerBuffer(Stateful):
    def keep(self):
        self.register_buffer("n", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        self.n += 1
        return self.loss(batch) / self.n


@refused("shapes of buffers", "`seen`")
class GrowingBuffer(Stateful):
    def keep(self):
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.seen = torch.cat([self.seen, torch.ones(1)])
        return self.loss(batch)


@refused("shapes of buffers", "`extremes`")
class ResizedBuffer(Stateful):
    """It resizes an empty buffer in place, as observers of quantization do."""

    def keep(self):
        self.register_buffer("extremes", torch.zeros(0))

    def training_step(self, batch, batch_idx):
        self.extremes.resize_(2)
        self.extremes.copy_(torch.stack([batch[0].min(), batch[0].max()]))
        return self.loss(batch)


TOTALS = {"steps": 0}


@refused("TOTALS`")
class GlobalCounter(Stateful):
    def training_step(self, batch, batch_idx):
        TOTALS["steps"] += 1
        return self.loss(batch) / TOTALS["steps"]


@refused("`ClassCounter.n`")
class ClassCounter(Stateful):
    n = 0

    def training_step(self, batch, batch_idx):
        type(self).n += 1
        return self.loss(batch) / type(self).n


@refused("the client's own data alone")
class Cycle(Stateful):
    """No record shows the place of a cycle, but the numbers do."""

    def keep(self):
        self.weights = itertools.cycle([1.0, 2.0])

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / next(self.weights)


# Gradients that ``torch.autograd.grad`` does not give


@accepted
class OwnBackward(Stateful):
    """Calls ``backward`` itself: its gradients are dropped, as in Lightning."""

    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        return self.loss(batch)


@accepted
class ReentrantCheckpoint(Stateful):
    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        outputs = checkpoint(self.net, x, use_reentrant=True)
        return functional.cross_entropy(outputs, batch[1])
