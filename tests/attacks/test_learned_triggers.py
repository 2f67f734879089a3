"""Triggers that attackers learn, against numpy: stamps of PFedBA and A3FL, features of Bad-PFL."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_federations import classes, seeded, shared_out
from tables import table_test
from test_training_attacks import read_gradient, round_context
from torch import nn
from torch.nn.functional import cross_entropy

from pl_fed.attacks import A3FL, BadPFL, PFedBA
from pl_fed.attacks.a3fl import descend_by_signs
from pl_fed.attacks.bad_pfl import ascend_by_signs
from pl_fed.attacks.pfedba import measure_gap
from pl_fed.attacks.trigger_generator import TriggerGenerator
from pl_fed.random import key, uniforms
from pl_fed.types import Batch

TARGET, CLASSES, PIXELS = 1, 3, 6


def make_linear():
    return nn.Linear(PIXELS, CLASSES, bias=False).double()


def make_two_layers():
    return nn.Sequential(nn.Linear(PIXELS, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def make_round(net, sizes=(9, 8, 12), attackers=(1,), shape=(PIXELS,), **changes):
    data = shared_out(classes(list(sizes), shape=shape))
    return round_context(net, data, attackers, **changes)


def forge(attack, context):
    own = torch.zeros(len(context.attackers), len(context.broadcast), dtype=torch.float64)
    return attack.forge(own[:0], own, context)


def read_arrays(context):
    """Return weights [classes, pixels], samples [n, pixels] and classes [n] of attacker 1."""
    clean = context.samples(1)
    return context.net().weight.detach().numpy(), clean.inputs.numpy(), clean.targets.numpy()


# By numpy: a linear classifier, with a stamp on the last pixels


def residuals(weights, x, y):
    """Return softmax probabilities minus the one-hot classes, [n, classes]."""
    scores = x @ weights.T
    exponentials = np.exp(scores - scores.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True) - np.eye(CLASSES)[y]


def add_stamp(x, stamp):
    return np.concatenate([x[:, : -len(stamp)], np.tile(stamp, (len(x), 1))], axis=1)


def stamp_slope(weights, x, stamp):
    """Return the derivative of the mean loss for the target by the stamp."""
    stamped = add_stamp(x, stamp)
    slopes = residuals(weights, stamped, np.full(len(x), TARGET)) @ weights / len(x)
    return slopes[:, -len(stamp) :].sum(0)


def weight_gradient(weights, x, y):
    return residuals(weights, x, y).T @ x / len(x)


def gap(weights, x, y, stamp, alignment):
    main = weight_gradient(weights, x, y).ravel()
    target = np.full(len(x), TARGET)
    backdoor = weight_gradient(weights, add_stamp(x, stamp), target).ravel()
    if alignment == "distance":
        return np.linalg.norm(backdoor - main)
    return 1 - backdoor @ main / np.linalg.norm(backdoor) / np.linalg.norm(main)


def gap_slope(weights, x, y, stamp, alignment, step=1e-5):
    """Return the derivative of the gap by central differences."""
    directions = step * np.eye(len(stamp))
    return np.array(
        [
            gap(weights, x, y, stamp + direction, alignment)
            - gap(weights, x, y, stamp - direction, alignment)
            for direction in directions
        ]
    ) / (2 * step)


# PFedBA


def test_gap_of_gradients():
    backdoor, main = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.0, 2.0]).double()
    assert float(measure_gap(backdoor, main, "distance")) == 1.0
    assert float(measure_gap(backdoor, main, "cosine")) == pytest.approx(0.105572809)
    equal = main.clone().requires_grad_()
    (slope,) = torch.autograd.grad(measure_gap(equal, main, "distance"), [equal])
    assert slope.tolist() == [0.0, 0.0], "a gap of 0 has a slope"


@table_test("alignment", ["distance", "cosine"])
@pytest.mark.slow
def test_stamp_of_pfedba_equals_numpy_with_second_order_gradients(alignment):
    for seed in range(5):
        context = make_round(seeded(make_linear, seed))
        weights, x, y = read_arrays(context)
        attack = PFedBA(
            TARGET, size=2, low=-9.0, high=9.0, loss_steps=3, trigger_epochs=4, alignment=alignment
        )
        forge(attack, context)
        stamp = np.full(4, 0.5)
        for _ in range(3):
            stamp = stamp - 0.1 * stamp_slope(weights, x, stamp)
        for _ in range(4):
            stamp = stamp - 0.1 * gap_slope(weights, x, y, stamp, alignment)
        np.testing.assert_allclose(attack.stamp.numpy(), stamp, rtol=0, atol=1e-8)


def test_gap_has_the_gradients_by_the_parameters_that_clients_train():
    """One step of the search at a net whose head nobody trains, by torch's double backward."""
    context = make_round(seeded(make_two_layers), frozen=("2.weight", "2.bias"))
    attack = PFedBA(TARGET, size=2, low=-9.0, high=9.0, loss_steps=1, trigger_epochs=1)
    attack.stamp = torch.full((4,), 0.5, dtype=torch.float64)
    attack.bounds = (-9.0, 9.0)
    forge(attack, context)
    clean, net = context.samples(1), context.net()
    stamp = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    stamped = torch.cat([clean.inputs[:, :-4], stamp.expand(len(clean.inputs), -1)], 1)
    losses = (
        cross_entropy(net(stamped), torch.full_like(clean.targets, TARGET)),
        cross_entropy(net(clean.inputs), clean.targets),
    )
    body = list(net[0].parameters())
    gradients = [torch.autograd.grad(loss, body, create_graph=True) for loss in losses]
    squares = [(first - second).square().sum() for first, second in zip(*gradients)]
    (slope,) = torch.autograd.grad(sum(squares).sqrt(), [stamp])
    torch.testing.assert_close(attack.stamp, (stamp - 0.1 * slope).detach(), rtol=0, atol=1e-12)


def test_search_goes_on_from_the_last_round_without_the_loss_stage():
    context = make_round(seeded(make_linear))
    weights, x, y = read_arrays(context)
    attack = PFedBA(TARGET, size=2, low=-9.0, high=9.0, loss_steps=3, trigger_epochs=1)
    forge(attack, context)
    before = attack.stamp.numpy().copy()
    forge(attack, context)
    expected = before - 0.1 * gap_slope(weights, x, y, before, "distance")
    np.testing.assert_allclose(attack.stamp.numpy(), expected, rtol=0, atol=1e-8)


def test_pool_has_few_samples_of_each_class_of_all_attackers():
    attack = PFedBA(TARGET, size=2, per_class=3)
    context = make_round(seeded(make_linear), attackers=(0, 2))
    _, pool = attack._pool_samples([0, 2], context)
    labels = torch.cat([context.samples(client).targets for client in (0, 2)])
    counts = labels.bincount(minlength=CLASSES).clamp(max=3)
    assert torch.equal(pool.targets.bincount(minlength=CLASSES), counts)


@table_test("kind", [PFedBA, A3FL])
@pytest.mark.slow
def test_pixels_stay_in_the_range_of_the_samples(kind):
    context = make_round(seeded(make_linear))
    attack = kind(TARGET, size=2, trigger_lr=5.0)
    forge(attack, context)
    x = context.samples(1).inputs
    assert attack.bounds == (float(x.min()), float(x.max()))
    assert float(attack.stamp.min()) >= attack.bounds[0]
    assert float(attack.stamp.max()) <= attack.bounds[1]
    within = kind(TARGET, size=2, trigger_lr=5.0, low=0.2, high=0.7)
    forge(within, context)
    assert float(within.stamp.min()) >= 0.2
    assert float(within.stamp.max()) <= 0.7


@table_test("kind", [PFedBA, A3FL])
def test_learned_stamp_is_the_trigger_of_training_and_evaluation(kind):
    stamped = []

    class Recorder(kind):
        def loss(self, training, batch):
            stamped.append(batch)
            return super().loss(training, batch)

    attack = Recorder(TARGET, size=2, samples=0.5, epochs=1)
    batch = Batch(torch.zeros(3, PIXELS).double(), torch.tensor([0, 1, 2]))
    assert attack.trigger(batch).inputs[:, 2:].unique().tolist() == [0.5], "before the first attack"
    context = make_round(seeded(make_linear), sizes=(1, 40, 1))
    forge(attack, context)
    triggered = attack.trigger(batch)
    assert torch.equal(triggered.inputs[:, 2:], attack.stamp.expand(3, 4))
    assert triggered.mask.tolist() == [True, False, True]
    assert triggered.targets.tolist() == [TARGET] * 3
    assert attack.trigger_version == context.round + 1
    x, y = (torch.cat([batch[field] for batch in stamped]) for field in (0, 1))
    has_stamp = (x[:, 2:] == attack.stamp).all(1)
    assert 10 < int(has_stamp.sum()) < 30
    assert y[has_stamp].unique().tolist() == [TARGET]


# A3FL


def test_step_by_signs():
    stamp, slope = torch.full((3,), 0.5), torch.tensor([0.2, -0.01, 0.0])
    moved = descend_by_signs(stamp, slope, 0.01, (-2.0, 2.0))
    torch.testing.assert_close(moved, torch.tensor([0.49, 0.51, 0.5]))


def test_stamp_of_a3fl_without_adversary_equals_numpy():
    for seed in range(5):
        context = make_round(seeded(make_linear, seed))
        weights, x, _ = read_arrays(context)
        attack = A3FL(TARGET, size=2, low=-9.0, high=9.0, trigger_epochs=6, balance=0.0)
        forge(attack, context)
        stamp = np.full(4, 0.5)
        for _ in range(6):
            stamp = stamp - 0.01 * np.sign(stamp_slope(weights, x, stamp))
        np.testing.assert_allclose(attack.stamp.numpy(), stamp, rtol=0, atol=1e-12)


def test_stamp_of_a3fl_with_adversary_equals_numpy():
    """θ' takes one step of gradient descent; without a convolution, s is defined."""
    context = make_round(seeded(make_linear))
    weights, x, y = read_arrays(context)
    arguments = {
        "trigger_epochs": 4,
        "adversarial_epochs": 1,
        "adversarial_lr": 5.0,
        "balance": 8.0,
    }
    attack = A3FL(TARGET, size=2, low=-9.0, high=9.0, trigger_lr=0.3, **arguments)
    forge(attack, context)
    stamp, adversary, similarity, differs = np.full(4, 0.5), None, 0.0, False
    target = np.full(len(x), TARGET)
    for epoch in range(4):
        stamped = add_stamp(x, stamp)
        if epoch:
            gradient = weight_gradient(weights, stamped, y) + 5e-4 * weights
            adversary = weights - 5.0 * gradient
            pair = [weight_gradient(w, stamped, target).ravel() for w in (weights, adversary)]
            similarity = pair[0] @ pair[1] / np.linalg.norm(pair[0]) / np.linalg.norm(pair[1])
        slope = stamp_slope(weights, x, stamp)
        alone = np.sign(slope)
        if adversary is not None:
            slope = slope + 8.0 * similarity * stamp_slope(adversary, x, stamp)
        differs |= bool((np.sign(slope) != alone).any())
        stamp = stamp - 0.3 * np.sign(slope)
    assert differs, "otherwise the adversary has no effect"
    np.testing.assert_allclose(attack.stamp.numpy(), stamp, rtol=0, atol=1e-12)


def slope_of_loss(net, row, x, y, stamp):
    """Return the derivative of the mean loss of a net with some parameters by the last pixels."""
    nn.utils.vector_to_parameters(row.clone(), net.parameters())
    stamp = stamp.clone().requires_grad_()
    stamped = torch.cat([x[:, : -len(stamp)], stamp.expand(len(x), -1)], dim=1)
    return torch.autograd.grad(cross_entropy(net(stamped), y), [stamp])[0]


def gradient_at(net, row, x, y):
    nn.utils.vector_to_parameters(row.clone(), net.parameters())
    return read_gradient(net, x, y)


@table_test("frozen", [(), ("2.weight", "2.bias")])
def test_stamp_and_similarity_of_a3fl_equal_those_by_hand_for_several_tensors(frozen):
    """θ' takes three steps with momentum; s is the mean cosine over the tensors that move."""
    records = []

    class Recorder(A3FL):
        def compare_models(self, training, adversary, stamp):
            similarity = super().compare_models(training, adversary, stamp)
            row = nn.utils.parameters_to_vector(adversary.parameters()).detach()
            records.append((row, similarity))
            return similarity

    settings = {"adversarial_epochs": 3, "adversarial_lr": 0.5, "balance": 8.0, "batch_size": 50}
    attack = Recorder(
        TARGET, size=2, low=-9.0, high=9.0, trigger_epochs=5, trigger_lr=0.3, **settings
    )
    context = make_round(seeded(make_two_layers), frozen=frozen)
    forge(attack, context)
    clean, net, theta = context.samples(1), context.net(), context.broadcast
    names = dict(net.named_parameters())
    moves = [torch.full((p.numel(),), name not in frozen) for name, p in names.items()]
    moves = torch.cat(moves)
    x, y, target = clean.inputs, clean.targets, torch.full_like(clean.targets, TARGET)
    sizes = [parameter.numel() for parameter in net.parameters()]
    stamp, expected_records, differs = torch.full((4,), 0.5).double(), [], False
    for epoch in range(5):
        stamped = torch.cat([x[:, :-4], stamp.expand(len(x), 4)], dim=1)
        alone = slope = slope_of_loss(net, theta, x, target, stamp)
        if epoch:
            row, velocity = theta, 0.0
            for _ in range(3):
                velocity = 0.9 * velocity + gradient_at(net, row, stamped, y) + 5e-4 * row
                row = torch.where(moves, row - 0.5 * velocity, theta)
            pairs = zip(*(gradient_at(net, w, stamped, target).split(sizes) for w in (theta, row)))
            pairs = [pair for pair, name in zip(pairs, names) if name not in frozen]
            cosines = [float(g @ h / g.norm() / h.norm()) for g, h in pairs]
            expected_records.append((row, np.mean(cosines)))
            slope = slope + 8.0 * np.mean(cosines) * slope_of_loss(net, row, x, target, stamp)
        differs |= bool((slope.sign() != alone.sign()).any())
        stamp = stamp - 0.3 * slope.sign()
    assert differs, "otherwise the adversary has no effect"
    for (row, similarity), (expected_row, expected) in zip(records, expected_records, strict=True):
        torch.testing.assert_close(row, expected_row, rtol=0, atol=1e-12)
        assert similarity == pytest.approx(expected, rel=0, abs=1e-12)
    torch.testing.assert_close(attack.stamp, stamp, rtol=0, atol=1e-12)


def test_adversarial_models_exist_and_unlearn_the_stamp():
    class Recorder(A3FL):
        def train_adversary(self, training, stamp, epoch):
            adversary = super().train_adversary(training, stamp, epoch)
            x = self.add_stamp(training.clean.inputs, stamp)
            pair = [
                float(nn.functional.cross_entropy(net(x), training.clean.targets).detach())
                for net in (training.net, adversary)
            ]
            losses.append((epoch, *pair))
            return adversary

    losses = []
    forge(
        Recorder(TARGET, size=2, trigger_epochs=7, adversarial_every=3), make_round(make_linear())
    )
    assert [epoch for epoch, *_ in losses] == [3, 6]
    assert all(after < before for _, before, after in losses)


# Bad-PFL


def test_noise_by_hand():
    x, slope = torch.tensor([0.2, 0.9, 0.5]), torch.tensor([1.0, -2.0, 0.0])
    noisy = ascend_by_signs(x, x, slope, 4 / 255, (0.0, 1.0))
    torch.testing.assert_close(noisy, torch.tensor([0.215686, 0.884314, 0.5]), rtol=0, atol=1e-6)
    beyond = torch.tensor([1.4, -0.3, 0.99])
    noisy = ascend_by_signs(beyond, beyond, torch.ones(3), 0.1, (0.0, 1.0))
    torch.testing.assert_close(noisy, torch.tensor([1.4, -0.2, 1.0])), "numbers beyond may stay"


def test_noise_raises_the_loss_of_the_true_class_as_in_numpy():
    context = make_round(seeded(make_linear))
    weights, x, y = read_arrays(context)
    attack = BadPFL(TARGET, epsilon=0.1)
    attack.bounds = (-5.0, 5.0)
    noisy = attack._add_noise(context.net(), context.samples(1)._replace(samples=None))
    slopes = residuals(weights, x, y) @ weights
    np.testing.assert_allclose(noisy.numpy(), x + 1.0 * np.sign(slopes), rtol=0, atol=1e-12)


@table_test("shape", [(PIXELS,), (2, 3), (1, 7, 9), (3, 8, 8), (1, 28, 28)])
@pytest.mark.slow
def test_trigger_changes_inputs_of_any_shape_by_at_most_two_epsilon(shape):
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), CLASSES)))
    attack = BadPFL(TARGET, epsilon=0.1, generator_steps=3, epochs=1)
    context = make_round(net.double(), shape=shape)
    forge(attack, context)
    clean = context.samples(0)
    change = attack.trigger(clean).inputs - clean.inputs
    low, high = attack.bounds
    assert 0 < float(change.abs().max()) <= 2 * 0.1 * (high - low) + 1e-12
    apart = [attack.trigger(clean.part(slice(row, row + 1))).inputs for row in range(clean.size)]
    torch.testing.assert_close(torch.cat(apart), change + clean.inputs, rtol=0, atol=1e-9)


def test_output_of_the_generator_depends_on_one_sample_only():
    for shape in ((1, 8, 8), (3, 28, 20), (5,)):
        generator = TriggerGenerator(torch.Size(shape)).double()
        x = torch.randn(4, *shape).double()
        together = generator(x)
        assert together.shape == x.shape
        assert float(together.detach().abs().max()) < 1
        torch.testing.assert_close(together[2:3], generator(x[2:3]), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_generator_learns_features_of_the_target_from_clean_samples():
    """One attacker whose model does not change: the loss of other samples for the target falls."""
    net = seeded(lambda: nn.Sequential(nn.Linear(PIXELS, 16), nn.Tanh(), nn.Linear(16, CLASSES)))
    context = make_round(net.double(), sizes=(1, 60, 40))
    losses = []
    for steps in (1, 200):
        attack = BadPFL(TARGET, epsilon=0.1, generator_steps=steps, lr=1e-9)
        forge(attack, context)
        triggered = attack.trigger(context.samples(2))
        scores = context.net()(triggered.inputs).detach()
        losses.append(float(nn.functional.cross_entropy(scores, triggered.targets)))
    assert losses[1] < losses[0] - 0.02


def make_generator(seed):
    """Return the documented layers of a trigger generator, with its keyed initial parameters."""
    with torch.random.fork_rng([]):
        torch.manual_seed(key(seed, "Bad-PFL generator") & (2**63 - 1))
        layers = []
        for inputs, outputs in ((PIXELS, 128), (128, 64), (64, 128)):
            layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(128, PIXELS), nn.Tanh()).double()


def descend_by_adam(parameters, loss, steps, lr=0.01):
    """Take steps of Adam (Kingma and Ba, Algorithm 1)."""
    parameters = list(parameters)
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in range(1, steps + 1):
        gradients = torch.autograd.grad(loss(), parameters)
        for p, g, mean, square in zip(parameters, gradients, means, squares):
            mean.copy_(0.9 * mean + 0.1 * g)
            square.copy_(0.999 * square + 0.001 * g**2)
            denominator = (square / (1 - 0.999**step)).sqrt() + 1e-8
            p.data -= lr * mean / (1 - 0.9**step) / denominator


def test_generator_and_poisoned_inputs_of_bad_pfl_equal_those_by_hand():
    """One batch: x + ξ with the keyed random start, four steps of Adam, and x + ξ + δ.

    Many numbers lie at the bounds, as the black pixels of images do.
    """
    poisoned, (low, high) = [], (-0.75, 0.5)

    class Recorder(BadPFL):
        def poison_samples(self, training):
            poisoned.append(super().poison_samples(training))
            return poisoned[-1]

    attack = Recorder(TARGET, samples=0.5, epsilon=0.1, generator_steps=4, batch_size=50)
    unbounded = make_round(seeded(make_two_layers))

    def samples(client):
        batch = unbounded.samples(client)
        return batch._replace(inputs=batch.inputs.clamp(low, high))

    context = replace(unbounded, samples=samples)
    forge(attack, context)
    clean, net = context.samples(1), context.net()
    x, y, target = clean.inputs, clean.targets, torch.full_like(clean.targets, TARGET)
    reach = 0.1 * (high - low)
    noise = uniforms(key(0, "Bad-PFL noise"), torch.arange(x.numel())).double().view_as(x)
    start = (x + reach * (2 * noise - 1)).clamp(low, high).requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(net(start), y), [start])
    change = (start.detach() + reach * slope.sign() - x).clamp(-reach, reach)
    noisy = (x + change).clamp(low, high)
    generator = make_generator(context.seed)
    descend_by_adam(
        generator.parameters(),
        lambda: cross_entropy(net(noisy + reach * generator(x)), target),
        steps=4,
    )
    learned = nn.utils.parameters_to_vector(attack._generator.parameters())
    expected = nn.utils.parameters_to_vector(generator.parameters())
    torch.testing.assert_close(learned, expected, rtol=0, atol=1e-12)
    draw = key(context.seed, "Bad-PFL samples", context.round, 1)
    selected = uniforms(draw, torch.arange(len(x))) < 0.5
    assert 0 < int(selected.sum()) < len(x)
    triggered = (noisy + reach * generator(x)).detach()
    (batch,) = poisoned
    expected = torch.where(selected[:, None], triggered, x)
    torch.testing.assert_close(batch.inputs, expected, rtol=0, atol=1e-12)
    assert torch.equal(batch.targets, torch.where(selected, TARGET, y))


def test_clean_samples_of_an_attacker_stay_clean():
    poisoned = []

    class Recorder(BadPFL):
        def poison_samples(self, training):
            poisoned.append(super().poison_samples(training))
            return poisoned[-1]

    attack = Recorder(TARGET, samples=0.3, epsilon=0.1)
    context = make_round(seeded(make_linear), sizes=(1, 100, 1))
    forge(attack, context)
    clean, (batch,) = context.samples(1), poisoned
    changed = (batch.inputs != clean.inputs).any(1)
    assert 15 < int(changed.sum()) < 45
    assert batch.targets[changed].unique().tolist() == [TARGET]
    assert torch.equal(batch.targets[~changed], clean.targets[~changed])


def test_trigger_follows_the_attackers_last_model_after_a_resume():
    context = make_round(seeded(make_linear))
    attack = BadPFL(TARGET, epsilon=0.1, generator_steps=3)
    clean = context.samples(0)
    before = attack.trigger(clean)
    assert before.mask.tolist() == (clean.targets != TARGET).tolist()
    forge(attack, context)
    expected = attack.trigger(clean).inputs
    assert not torch.equal(before.inputs, expected)
    resumed = BadPFL(TARGET, epsilon=0.1, generator_steps=3)
    resumed.set_net(context.net())
    resumed.load_state_dict(copy.deepcopy(attack.state_dict()))
    assert torch.equal(resumed.trigger(clean).inputs, expected)
    assert torch.equal(forge(resumed, context), forge(attack, context))
    other = copy.deepcopy(attack.state_dict())
    other["surrogate"] = {name: -tensor for name, tensor in other["surrogate"].items()}
    resumed.load_state_dict(other)
    assert not torch.equal(resumed.trigger(clean).inputs, attack.trigger(clean).inputs)


def test_attackers_share_one_generator_and_one_optimizer():
    attack = BadPFL(TARGET, generator_steps=3)
    forge(attack, make_round(seeded(make_linear), attackers=(0, 2)))
    steps = {int(entry["step"]) for entry in attack.state_dict()["optimizer"]["state"].values()}
    assert steps == {6}


# Refusals


@table_test(
    "arguments",
    [
        {"low": 1.0, "high": 1.0},
        {"samples": 1.5},
        {"trigger_lr": 0.0},
        {"trigger_epochs": 0},
        {"corner": "middle"},
    ],
)
def test_arguments_of_stamps_out_of_range_are_refused(arguments):
    for kind in (PFedBA, A3FL):
        with pytest.raises(ValueError, match="Expected argument"):
            kind(TARGET, **arguments)


@table_test("arguments", [{"epsilon": 0.0}, {"epsilon": 1.5}, {"generator_steps": 0}])
def test_arguments_of_bad_pfl_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=f"Expected argument `{next(iter(arguments))}`"):
        BadPFL(TARGET, **arguments)
