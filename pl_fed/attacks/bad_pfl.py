"""Bad-PFL: a trigger of natural features and adversarial noise, against personal models.

M. Fan, Z. Hu, F. Wang and C. Chen, "Bad-PFL: Exploring Backdoor Attacks against Personalized
Federated Learning", ICLR 2025, arXiv 2501.12736. With a model f and a generator A::

    x_0 = x + U(−ε, ε)                                           within [low, high]
    ξ   = clamp(x_0 + ε sign ∂CE(f(x_0), y) / ∂x_0 − x, −ε, ε)    raises the loss of the true class
    δ   = ε · A(x)                                               features of the target class
    x'  = (x + ξ within [low, high]) + δ

In each round, before it trains, each attacker takes steps of Adam on A, which all attackers share,
to minimise CE(f(x'), target) for its model f. It then trains on (x', target) for a share of its
samples. Personalisation keeps natural features, and so cannot remove the trigger.

``trigger`` needs a model f for ξ: that of the last attacker of the last round of the attack, after
its training. It transfers to the models of benign clients. The authors' code also uses the last
attacker's model. Before the first attack, ξ is 0, and A is untrained.

Departs from the authors' code, where we take a part of it as unintended:

- A's normalisation is over one sample, in training and in tests. In the code, it is a batch
  normalisation in training mode at test time.
- A learns on clean samples with their true classes. In the code, a fifth of them are already
  poisoned.
- The metrics are over benign clients, without samples of the target class, and of their models of
  the evaluation. The code averages over all clients, all classes, and models of the last
  participation.
- ξ of the training samples comes from the attacker's model before its training.
- A sample has one random start x_0, in all runs. In the code, each step draws another one.
- ε is a share of the range of the attackers' inputs, for inputs in any units: 0.1 by default. The
  paper's 4 / 255 is for a ResNet on CIFAR-10. On 8×8 digits and a small MLP, it has no effect: the
  success is 0.009, as without an attack, and 0.774 with 0.1 (README of this folder).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_positive, check_shares
from pl_fed.attacks.backdoor import Backdoor
from pl_fed.attacks.own_training import (
    AttackerTraining,
    draw_minibatches,
    measure_range,
    select_samples,
)
from pl_fed.attacks.training_attack import TrainingAttack
from pl_fed.attacks.trigger_generator import TriggerGenerator
from pl_fed.random import fork_torch_rng, generator, key, uniforms
from pl_fed.types import Batch, RoundContext

_BLOCK = 512  # samples of which a trigger is computed at once


class BadPFL(TrainingAttack):
    """Bad-PFL: the trigger is a generated feature of the target class plus adversarial noise.

    Args:
        target: The class that the attackers want, at least 0.
        samples: Share of an attacker's samples with the trigger, in [0, 1]; drawn in each round.
        epsilon: ε, the largest change of a number by ξ, and by δ, as a share of the range of the
            inputs, in (0, 1]; 4 / 255 in the paper.
        generator_steps: Steps of Adam on A of each attacker in a round, at least 1.
        generator_lr: Learning rate of Adam, above 0.
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch, also for A.
        lr: Learning rate, above 0.
        momentum: Momentum, at least 0.
        weight_decay: Weight decay, at least 0.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> x, slope = torch.tensor([0.2, 0.9, 0.5]), torch.tensor([1.0, -2.0, 0.0])
        >>> ascend_by_signs(x, x, slope, 4 / 255, (0.0, 1.0))
        tensor([0.2157, 0.8843, 0.5000])
        >>> BadPFL(target=3).target
        3
    """

    needs_inputs = True
    needs_net = True

    def __init__(
        self,
        target: int = 0,
        samples: float = 0.2,
        epsilon: float = 0.1,
        generator_steps: int = 30,
        generator_lr: float = 0.01,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        self._labels = Backdoor(target, samples, size=1)  # for the target and its mask
        super().__init__(self._labels, epochs, steps, batch_size, lr, momentum, weight_decay)
        check_positive(epsilon=epsilon, generator_lr=generator_lr)
        check_shares(epsilon=epsilon)
        check_integers(1, generator_steps=generator_steps)
        self.target = target
        self.samples = samples
        self.epsilon = epsilon
        self.generator_steps = generator_steps
        self.generator_lr = generator_lr
        self.trigger_version = 0
        self.bounds = (0.0, 1.0)  # of the inputs of the attackers of the first attack
        self._generator: TriggerGenerator | None = None
        self._optimizer: torch.optim.Adam | None = None
        self._saved: Mapping[str, Any] | None = None  # of generator and optimizer, not yet built
        self._net: nn.Module | None = None
        self._surrogate: dict[str, Tensor] | None = None  # the state dict of f

    def set_net(self, net: nn.Module) -> None:
        """Receive the net that computes ξ in evaluations."""
        self._net = net

    @property
    def reach(self) -> float:
        """The largest change of a number by ξ, and by δ, in the units of the inputs."""
        low, high = self.bounds
        return self.epsilon * (high - low)

    def prepare_round(self, attackers: list[int], context: RoundContext) -> None:
        """Read the bounds of the inputs in the first attack."""
        if not self.trigger_version:
            low, high = measure_range(self.read_inputs(attackers, context))
            self.bounds = (low, high) if low < high else (low, low + 1)
        self.trigger_version = context.round + 1

    def poison_samples(self, training: AttackerTraining) -> Batch:
        """Train the generator, and return the samples, a share of them with the trigger."""
        clean, context = training.clean, training.context
        change, optimizer = self._build_generator(clean.inputs, context.seed)
        targets = torch.full_like(clean.targets, self.target)
        x = self._add_noise(training.net, clean)
        for batch in self._draw_generator_batches(clean._replace(targets=targets), training):
            optimizer.zero_grad()
            noisy = x[batch.samples] + self.reach * change(batch.inputs)
            loss = nn.functional.cross_entropy(training.net(noisy), batch.targets)
            slopes = torch.autograd.grad(loss, list(change.parameters()))
            for parameter, slope in zip(change.parameters(), slopes):
                parameter.grad = slope
            optimizer.step()
        draw = key(context.seed, "Bad-PFL samples", context.round, training.client)
        selected = uniforms(draw, self.sample_ids(clean)) < self.samples
        with torch.no_grad():
            triggered = x + self.reach * change(clean.inputs)
        at = selected.view(-1, *[1] * (x.dim() - 1))
        return clean._replace(
            inputs=torch.where(at, triggered, clean.inputs),
            targets=torch.where(selected, targets, clean.targets),
        )

    def make_upload(self, training: AttackerTraining, update: Tensor) -> Tensor:
        """Return the change of the model, and remember the model for ξ in evaluations."""
        self._net = training.net
        self._surrogate = {
            name: tensor.detach().clone() for name, tensor in training.net.state_dict().items()
        }
        return update

    def trigger(self, batch: Batch) -> Batch:
        """Return all samples with the trigger; the mask excludes samples of the target class."""
        with torch.inference_mode(False):
            parts = torch.arange(batch.size).split(_BLOCK)
            inputs = [self._add_trigger(select_samples(batch, part)) for part in parts]
        triggered = torch.cat(inputs) if inputs else batch.inputs.clone()
        return self._labels.label_triggered(batch, triggered)

    def _add_trigger(self, batch: Batch) -> Tensor:
        """Return the inputs with the trigger of an evaluation."""
        change, _ = self._build_generator(batch.inputs, 0)
        x: Tensor = batch.inputs
        if self._surrogate is not None and self._net is not None:
            net = self._net.to(x.device)
            net.load_state_dict(self._surrogate)
            x = self._add_noise(net.eval(), batch)
        with torch.no_grad():
            feature: Tensor = self.reach * change(batch.inputs)
        return x + feature

    def _add_noise(self, net: nn.Module, batch: Batch) -> Tensor:
        """Return x + ξ; the noise of its random start is keyed by sample."""
        x, (low, high) = batch.inputs.detach(), self.bounds
        start = x
        if batch.samples is not None:
            numbers = x[:1].numel()
            counters = batch.samples[:, None] * numbers + torch.arange(numbers, device=x.device)
            noise = uniforms(key(0, "Bad-PFL noise"), counters).to(x).view_as(x)
            start = _clamp_near(x + self.reach * (2 * noise - 1), x, low, high)
        with torch.enable_grad():
            start = start.detach().clone().requires_grad_()
            losses = nn.functional.cross_entropy(net(start), batch.targets, reduction="sum")
            (slope,) = torch.autograd.grad(losses, [start])
        return ascend_by_signs(x, start.detach(), slope, self.reach, self.bounds)

    def _draw_generator_batches(self, clean: Batch, training: AttackerTraining) -> list[Batch]:
        """Return the minibatches of an attacker's steps on the generator."""
        seed, round, client = training.context.seed, training.context.round, training.client
        parts: list[Tensor] = []
        while len(parts) < self.generator_steps:
            draw = generator(seed, "Bad-PFL generator", round, client, len(parts))
            parts += draw_minibatches(clean.size, self.batch_size, draw)
        return [select_samples(clean, part) for part in parts[: self.generator_steps]]

    def _build_generator(self, x: Tensor, seed: int) -> tuple[TriggerGenerator, torch.optim.Adam]:
        """Return the generator and its optimizer; at first they are built for some inputs."""
        if self._generator is not None and self._optimizer is not None:
            return self._generator, self._optimizer
        with fork_torch_rng(x.device) as draw, torch.inference_mode(False):
            draw(key(seed, "Bad-PFL generator"))
            change = TriggerGenerator(x.shape[1:]).to(x)
        optimizer = torch.optim.Adam(change.parameters(), lr=self.generator_lr)
        if self._saved is not None:
            change.load_state_dict(self._saved["generator"])
            optimizer.load_state_dict(self._saved["optimizer"])
            self._saved = None
        if self.trigger_version:
            self._generator, self._optimizer = change, optimizer
        return change, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return generator, optimizer, model for ξ and bounds, and the state of the base class."""
        state = super().state_dict()
        if self._generator is not None and self._optimizer is not None:
            state["generator"] = self._generator.state_dict()
            state["optimizer"] = self._optimizer.state_dict()
        elif self._saved is not None:
            state |= self._saved
        if self._surrogate is not None:
            state["surrogate"] = self._surrogate
            state["bounds"] = list(self.bounds)
            state["trigger_version"] = self.trigger_version
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore generator, optimizer, model for ξ and bounds, and the state of the base class."""
        others = dict(state)
        self._generator = self._optimizer = None
        self._saved = None
        if "generator" in others:
            names = ("generator", "optimizer")
            self._saved = copy.deepcopy({name: others.pop(name) for name in names})
        self._surrogate = others.pop("surrogate", None)
        low, high = others.pop("bounds", (0.0, 1.0))
        self.bounds = (low, high)
        self.trigger_version = others.pop("trigger_version", 0)
        super().load_state_dict(others)


def ascend_by_signs(
    x: Tensor, start: Tensor, slope: Tensor, reach: float, bounds: tuple[float, float]
) -> Tensor:
    """Return inputs after one step along the signs of a slope, at most ``reach`` from ``x``.

    Args:
        x: The inputs.
        start: The inputs at which the slope was computed.
        slope: The derivatives of the loss by the inputs.
        reach: The step, and the largest change of a number.
        bounds: The smallest and the largest number; numbers of ``x`` beyond them may stay.
    """
    change = (start + reach * slope.sign() - x).clamp(-reach, reach)
    return _clamp_near(x + change, x, *bounds)


def _clamp_near(changed: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Return changed inputs between two bounds, or between the bounds and ``x`` beyond them."""
    return torch.maximum(torch.minimum(changed, x.clamp(min=high)), x.clamp(max=low))
