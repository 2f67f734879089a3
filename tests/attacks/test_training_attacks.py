"""Attacks that train: steps by hand, own parts, refusals, engines, and a stop and resume."""

import copy
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_for
from small_federations import (
    classes,
    mlp,
    reals,
    run_rounds,
    run_tried_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn
from torch.nn.functional import cross_entropy

import pl_fed
from pl_fed.attacks import (
    A3FL,
    Attack,
    Backdoor,
    BadPFL,
    Combined,
    ConstrainedReplacement,
    DistributedBackdoor,
    FairnessAttack,
    ModelReplacement,
    Neurotoxin,
    PFedBA,
    ProjectedBackdoor,
    TrainingAttack,
)
from pl_fed.attacks.constrained_replacement import anomaly
from pl_fed.attacks.fairness_attack import replace_mean
from pl_fed.attacks.neurotoxin import smallest_mask
from pl_fed.attacks.own_training import select_samples
from pl_fed.attacks.projected_backdoor import project
from pl_fed.clients import (
    FLAME,
    IFCA,
    Ditto,
    FedAvg,
    FedBN,
    FedPer,
    FedRep,
    Finetuning,
    LpProj,
    PFedFDA,
)
from pl_fed.functional.discriminants import factor_covariance, linear_discriminant
from pl_fed.nets.rows import RowLayout
from pl_fed.random import generator, key
from pl_fed.samplers import All
from pl_fed.types import Batch, RoundContext

BACKDOOR = Backdoor(1, samples=0.5, size=1, value=4.0)  # inputs with one dimension of 4 numbers
ATTACKS = {  # with the classes that train, by name
    "TrainingAttack": lambda: TrainingAttack(BACKDOOR, steps=3, batch_size=4),
    "Neurotoxin": lambda: Neurotoxin(BACKDOOR, 0.8, "observed", steps=3, batch_size=4),
    "ConstrainedReplacement": lambda: ConstrainedReplacement(BACKDOOR, steps=3, batch_size=4),
    "ProjectedBackdoor": lambda: ProjectedBackdoor(BACKDOOR, 0.1, steps=3, batch_size=4),
    "FairnessAttack": lambda: FairnessAttack([1], steps=3, batch_size=4),
    "PFedBA": lambda: PFedBA(
        1, size=1, loss_steps=5, trigger_epochs=3, steps=3, batch_size=4, high=4.0
    ),
    "BadPFL": lambda: BadPFL(1, epsilon=0.2, generator_steps=4, steps=3, batch_size=4),
    "A3FL": lambda: A3FL(1, size=1, trigger_epochs=3, trigger_lr=0.2, steps=3, batch_size=4),
}


def read_samples(data, client):
    """Return a client's training samples in float64."""
    batch = data.clients.training_samples(client)
    return batch._replace(inputs=batch.inputs.double())


def round_context(net, data, attackers=(1,), **changes):
    """Return the context of a round for attackers, with a net and the clients' samples."""
    row = nn.utils.parameters_to_vector(net.parameters()).detach()
    base = RoundContext(
        seed=3,
        round=2,
        clients=torch.arange(3),
        attackers=torch.tensor(attackers),
        byzantine=tuple(attackers),
        broadcast=row,
        layout=RowLayout.from_parameters(net),
        net=lambda update=None: copy.deepcopy(net).eval(),
        samples=partial(read_samples, data),
    )
    return replace(base, **changes)


def forge(attack, net=None, sizes=(9, 6, 12), attackers=(1,), **changes):
    """Return the forged uploads of attackers, float64 [b, d], and the context."""
    net = (seeded(mlp) if net is None else net).double()
    data = shared_out(classes(list(sizes)))
    context = round_context(net, data, attackers, **changes)
    own = torch.zeros(len(attackers), context.layout.numel, dtype=torch.float64)
    return attack.forge(own[:0], own, context), context


# Training


def read_gradient(net, x, y):
    loss = cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_attacker_descends_on_its_poisoned_samples():
    """One batch, so that the order does not matter: momentum and decay by hand."""
    settings = {"epochs": 3, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}
    (upload,), context = forge(TrainingAttack(Backdoor(1, 1.0, 1, value=4.0), **settings))
    clean = context.samples(1)
    x = clean.inputs.clone()
    x[:, -1] = 4.0
    net, velocity = context.net(), 0.0
    row = context.broadcast.clone()
    for _ in range(3):
        nn.utils.vector_to_parameters(row, net.parameters())
        gradient = read_gradient(net, x, torch.ones(6).long()) + 0.1 * row
        velocity = 0.5 * velocity + gradient
        row = row - 0.2 * velocity
    torch.testing.assert_close(upload, row - context.broadcast, rtol=0, atol=1e-12)


def test_share_of_the_samples_has_the_trigger():
    seen = []

    class Recorder(TrainingAttack):
        def loss(self, training, batch):
            seen.append(batch)
            return super().loss(training, batch)

    _, context = forge(Recorder(BACKDOOR, epochs=1, batch_size=10), sizes=(9, 60, 2))
    assert [len(batch.targets) for batch in seen] == [10] * 6
    x = torch.cat([batch.inputs for batch in seen])
    position = torch.cat([batch.samples for batch in seen])
    stamped = x[position.argsort()][:, -1] == 4.0
    assert 15 < int(stamped.sum()) < 45
    clean = context.samples(1).inputs
    assert torch.equal(x[position.argsort()][~stamped], clean[~stamped])


def test_each_attacker_trains_on_its_own_part_of_a_distributed_trigger():
    """DBA's parts follow the ranks among all attackers, inside and outside of the cohort."""
    seen = {}

    class Recorder(TrainingAttack):
        def poison_samples(self, training):
            seen[training.client] = super().poison_samples(training).inputs
            return Batch(seen[training.client], training.clean.targets)

    backdoor = DistributedBackdoor(1, samples=1.0, parts=4, size=1, gap=0, value=7.0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    data = shared_out(classes([4, 4, 4], shape=(1, 4, 4)))
    context = round_context(net.double(), data, (0, 2), byzantine=(0, 1, 2))
    own = torch.zeros(2, context.layout.numel, dtype=torch.float64)
    Recorder(backdoor, epochs=1).forge(own[:0], own, context)
    places = {client: (x[0, 0] == 7.0).nonzero().tolist() for client, x in seen.items()}
    assert places == {0: [[0, 0]], 2: [[1, 0]]}


@table_test("sizes", [(7, [4, 3]), (8, [4, 4]), (9, [3, 3, 3])])
def test_minibatches_of_a_pass_are_as_equal_as_possible(sizes):
    samples, expected = sizes
    seen = []

    class Recorder(TrainingAttack):
        def end_step(self, training):
            seen.append((training.step, training.ends_pass))

        def loss(self, training, batch):
            lengths.append(len(batch.targets))
            return super().loss(training, batch)

    lengths = []
    forge(Recorder(BACKDOOR, epochs=2, batch_size=4), sizes=(1, samples, 1))
    assert lengths == expected * 2
    passes = [step + 1 == len(expected) for step in range(len(expected))] * 2
    assert seen == list(enumerate(passes))


def test_attackers_draw_independently_and_the_order_of_ids_does_not_matter():
    attack = TrainingAttack(BACKDOOR, epochs=2, batch_size=4)
    together, _ = forge(attack, attackers=(0, 2))
    reversed_rows, _ = forge(attack, attackers=(2, 0))
    alone, _ = forge(attack, attackers=(2,))
    assert torch.equal(together, reversed_rows.flip(0))
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])


@table_test("seed, round, client", [(3, 2, 1), (4, 2, 1), (3, 5, 1), (3, 2, 2)])
def test_steps_have_the_draws_of_their_seed_round_attacker_and_pass(seed, round, client):
    """The minibatches of both passes, and a layer that draws from torch's own generator."""

    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) if self.training else x

    class Recorder(TrainingAttack):
        def loss(self, training, batch):
            batches.append(batch.samples.tolist())
            noise.append(training.net[0](torch.zeros(2)))
            return super().loss(training, batch)

    batches, noise, expected = [], [], []
    net = nn.Sequential(Noise(), nn.Linear(4, 3))
    attack = Recorder(BACKDOOR, epochs=2, batch_size=4)
    forge(attack, net, (9, 6, 7), (client,), seed=seed, round=round)
    samples = (9, 6, 7)[client]
    for number in range(2):
        draw = generator(seed, "training attack", round, client, number)
        expected += [part.tolist() for part in torch.randperm(samples, generator=draw).chunk(2)]
    assert batches == expected
    draw = torch.Generator().manual_seed(key(seed, "training attack", round, client))
    assert torch.equal(noise[0], torch.randn(2, generator=draw))


def test_attacker_without_samples_sends_its_own_upload():
    data = shared_out(classes([9, 6, 3]))

    def read(client):
        samples = read_samples(data, client)
        return select_samples(samples, torch.arange(0 if client == 1 else samples.size))

    rows, _ = forge(TrainingAttack(BACKDOOR), attackers=(1, 2), samples=read)
    assert rows[0].count_nonzero() == 0
    assert rows[1].count_nonzero() > 0


def make_dropout_net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def test_running_statistics_and_dropout_stay_with_the_attacker():
    net = seeded(make_dropout_net)
    before, generator = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    attack = TrainingAttack(BACKDOOR, epochs=2, batch_size=4)
    rows, _ = forge(attack, net)
    again, _ = forge(attack, net)
    assert torch.equal(rows, again), "draws of dropout are keyed, statistics restart"
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


# Neurotoxin


def test_mask_of_the_smallest_gradients():
    g = torch.tensor([0.5, -0.1, 0.02, -0.9, 0.3, 0.04, -0.6, 0.2, 0.01, -0.05])
    assert smallest_mask(g, 0.9).int().tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert smallest_mask(g, 0.7).int().tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1, 1]
    assert smallest_mask(torch.zeros(4), 0.5).int().tolist() == [1, 1, 0, 0], "ties by index"


def test_neurotoxin_moves_only_coordinates_of_small_clean_gradients():
    (upload,), context = forge(Neurotoxin(BACKDOOR, ratio=0.6))
    clean = context.samples(1)
    gradient = read_gradient(context.net(), clean.inputs, clean.targets).abs().numpy()
    large = np.argsort(gradient, kind="stable")[int(0.6 * len(gradient)) :]
    assert upload[large].count_nonzero() == 0
    assert upload.count_nonzero() == int(0.6 * len(gradient))


def test_ratio_of_one_is_the_plain_backdoor():
    plain, _ = forge(TrainingAttack(BACKDOOR))
    neurotoxin, _ = forge(Neurotoxin(BACKDOOR, ratio=1.0))
    assert torch.equal(plain, neurotoxin)


def test_each_tensor_is_ranked_by_itself():
    (upload,), context = forge(Neurotoxin(BACKDOOR, ratio=0.6, per_tensor=True))
    counts = [int(view.count_nonzero()) for view in context.layout.views(upload).values()]
    sizes = [view.numel() for view in context.layout.views(upload).values()]
    assert counts == [int(0.6 * size) for size in sizes]


def test_observed_changes_rank_the_coordinates_from_the_second_round_on():
    attack = Neurotoxin(BACKDOOR, ratio=0.5, mask="observed")
    first, context = forge(attack)
    assert torch.equal(first, forge(Neurotoxin(BACKDOOR, ratio=0.5))[0]), "no history"
    change = torch.randperm(context.layout.numel, generator=torch.Generator().manual_seed(1))
    moved = seeded(mlp).double()
    with torch.no_grad():
        nn.utils.vector_to_parameters(context.broadcast + change / 100, list(moved.parameters()))
    (second,), _ = forge(attack, moved)
    assert second[change >= len(change) // 2].count_nonzero() == 0
    assert second.count_nonzero() == len(change) // 2


def test_observed_changes_are_those_of_each_global_model():
    attack = Neurotoxin(BACKDOOR, ratio=0.5, mask="observed")
    alone = Neurotoxin(BACKDOOR, ratio=0.5, mask="observed")
    nets = [seeded(mlp).double() for _ in range(3)]
    draw = torch.Generator().manual_seed(4)
    for net in nets[1:]:
        for parameter in net.parameters():
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=draw).double()
    forge(attack, nets[0], center=0), forge(alone, nets[0])
    forge(attack, nets[2], center=1)
    state = attack.state_dict()
    resumed = Neurotoxin(BACKDOOR, ratio=0.5, mask="observed")
    resumed.load_state_dict(state)
    expected, _ = forge(alone, nets[1])
    for each in (attack, resumed):
        assert torch.equal(forge(each, nets[1], center=0)[0], expected)


def test_masked_coordinates_keep_momentum_and_decay():
    """One batch: the masked gradient by hand, with momentum and decay of all coordinates."""
    settings = {"epochs": 3, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}
    for per_tensor in (False, True):
        attack = Neurotoxin(Backdoor(1, 1.0, 1, value=4.0), 0.6, per_tensor=per_tensor, **settings)
        (upload,), context = forge(attack)
        clean = context.samples(1)
        x = clean.inputs.clone()
        x[:, -1] = 4.0
        net, velocity, row = context.net(), 0.0, context.broadcast.clone()
        sizes = [parameter.numel() for parameter in net.parameters()]
        parts = read_gradient(net, clean.inputs, clean.targets).split(
            sizes if per_tensor else sum(sizes)
        )
        mask = torch.cat([smallest_mask(part, 0.6) for part in parts])
        for _ in range(3):
            nn.utils.vector_to_parameters(row, net.parameters())
            gradient = mask * read_gradient(net, x, torch.ones(6).long()) + 0.1 * row
            velocity = 0.5 * velocity + gradient
            row = row - 0.2 * velocity
        torch.testing.assert_close(upload, row - context.broadcast, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_projected_steps_equal_those_by_hand(norm):
    settings = {"epochs": 3, "lr": 0.2, "momentum": 0.5, "every": 2}
    attack = ProjectedBackdoor(Backdoor(1, 1.0, 1, value=4.0), 0.05, norm, **settings)
    (upload,), context = forge(attack)
    x = context.samples(1).inputs.clone()
    x[:, -1] = 4.0
    net, velocity, start = context.net(), 0.0, context.broadcast
    row = start.clone()
    for _ in range(3):  # a pass is one step, and ends with a projection
        nn.utils.vector_to_parameters(row, net.parameters())
        velocity = 0.5 * velocity + read_gradient(net, x, torch.ones(6).long())
        change = row - 0.2 * velocity - start
        if norm == "l2":
            change *= min(1.0, 0.05 / change.norm().item())
        row = start + (change if norm == "l2" else change.clamp(-0.05, 0.05))
    torch.testing.assert_close(upload, row - start, rtol=0, atol=1e-12)


def test_ratio_without_a_coordinate_is_refused():
    with pytest.raises(ValueError, match=r"to leave a coordinate to train but got 0\.001 of 43"):
        forge(Neurotoxin(BACKDOOR, ratio=0.001))


# Replacement and projection


def mean_of_uploads(upload, benign):
    return (upload + benign.sum(0)) / (1 + len(benign))


class Trained(ConstrainedReplacement):
    """Trained: a replacement by a model that is not trained but set."""

    def _train(self, training):
        return self.make_upload(training, torch.tensor([0.5, 1.0], dtype=torch.float64))


def replace_model(clients=4, **arguments):
    net = nn.Linear(1, 2, bias=False).double()
    data = shared_out(classes([4, 4, 4], shape=(1,), num_classes=2))
    context = round_context(net, data, clients=torch.arange(clients))
    own = torch.zeros(1, 2, dtype=torch.float64)
    return Trained(BACKDOOR, **arguments).forge(own[:0], own, context)[0]


def test_scaled_model_replaces_the_global_one():
    upload = replace_model()
    assert upload.tolist() == [2.0, 4.0]
    benign = torch.tensor([[0.1, 0.0], [-0.1, 0.2], [0.0, -0.2]]).double()
    start = torch.tensor([1.0, 0.0])
    torch.testing.assert_close(
        start + mean_of_uploads(upload, benign), torch.tensor([1.5, 1.0]).double()
    )
    assert replace_model(server_lr=0.1).tolist() == [20.0, 40.0]
    assert replace_model(scale=3.0).tolist() == [1.5, 3.0]


def test_train_and_scale_reaches_the_bound_of_norms():
    upload = replace_model(norm_bound=2.0)
    torch.testing.assert_close(upload, torch.tensor([0.894427191, 1.788854382]).double())


def test_loss_has_a_term_for_the_anomaly():
    start, row = torch.tensor([1.0, 0.0]).double(), torch.tensor([1.5, 1.0]).double()
    losses = [
        alpha * 0.8 + (1 - alpha) * float(anomaly(row, start, constraint))
        for alpha, constraint in ((0.7, "norm"), (0.5, "cosine"))
    ]
    assert losses == pytest.approx([0.895410197, 0.483974853], abs=1e-8)
    at_start = start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(anomaly(at_start, start, "norm"), [at_start])
    assert slope.tolist() == [0.0, 0.0]


@table_test("constraint", ["norm", "cosine"])
def test_constraint_shortens_the_change(constraint):
    arguments = {"constraint": constraint, "scale": 1.0, "epochs": 20}
    free, _ = forge(ConstrainedReplacement(BACKDOOR, alpha=1.0, **arguments))
    plain, _ = forge(TrainingAttack(BACKDOOR, epochs=20))
    assert torch.equal(free, plain)
    constrained, context = forge(ConstrainedReplacement(BACKDOOR, alpha=0.2, **arguments))
    start = context.broadcast
    distances = [float(anomaly(start + rows[0], start, constraint)) for rows in (constrained, free)]
    assert distances[0] < 0.7 * distances[1]


def test_step_of_the_constrained_loss_by_hand():
    arguments = {"alpha": 0.6, "scale": 1.0, "lr": 0.3, "momentum": 0.0, "steps": 2}
    backdoor = Backdoor(1, 1.0, 1, value=4.0)
    (upload,), context = forge(ConstrainedReplacement(backdoor, **arguments))
    x = context.samples(1).inputs.clone()
    x[:, -1] = 4.0
    net, row, change = context.net(), context.broadcast, 0.0
    for _ in range(2):
        nn.utils.vector_to_parameters(row + change, net.parameters())
        gradient = 0.6 * read_gradient(net, x, torch.ones(6).long())
        if isinstance(change, torch.Tensor):
            gradient = gradient + 0.4 * change / change.norm()
        change = change - 0.3 * gradient
    torch.testing.assert_close(upload, change, rtol=0, atol=1e-12)


def cosine_gradient(row, start):
    """Return the gradient of 1 − cos(row, start) by the row."""
    length = row.norm() * start.norm()
    return (row @ start) / length * row / row.norm() ** 2 - start / length


@table_test("num_unsent", [0, 18])
def test_steps_of_the_cosine_constraint_by_hand(num_unsent):
    """The constraint compares the sent parameters; momentum is that of the joint gradient."""
    settings = {"scale": 2.5, "lr": 0.3, "momentum": 0.5, "epochs": 4}
    attack = ConstrainedReplacement(Backdoor(1, 1.0, 1, value=4.0), 0.6, "cosine", **settings)
    (upload,), context = forge(attack, unsent=torch.arange(43 - num_unsent, 43))
    x = context.samples(1).inputs.clone()
    x[:, -1] = 4.0
    net, start, velocity = context.net(), context.broadcast, 0.0
    row, num_sent = start.clone(), 43 - num_unsent
    for _ in range(4):
        nn.utils.vector_to_parameters(row.clone(), net.parameters())
        gradient = 0.6 * read_gradient(net, x, torch.ones(6).long())
        gradient[:num_sent] += 0.4 * cosine_gradient(row[:num_sent], start[:num_sent])
        velocity = 0.5 * velocity + gradient
        row = row - 0.3 * velocity
    expected = 2.5 * (row - start)
    expected[num_sent:] = 0
    torch.testing.assert_close(upload, expected, rtol=0, atol=1e-12)


def test_attackers_train_the_body_under_a_head_that_nobody_trains():
    head = torch.arange(25, 43)
    settings = {"epochs": 3, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}
    attack = TrainingAttack(Backdoor(1, 1.0, 1, value=4.0), **settings)
    (upload,), context = forge(attack, unsent=head, frozen=("2.weight", "2.bias"))
    x = context.samples(1).inputs.clone()
    x[:, -1] = 4.0
    net, start, velocity = context.net(), context.broadcast, 0.0
    row = start.clone()
    for _ in range(3):
        nn.utils.vector_to_parameters(row.clone(), net.parameters())
        velocity = 0.5 * velocity + read_gradient(net, x, torch.ones(6).long()) + 0.1 * row
        row = row - 0.2 * velocity
        row[head] = start[head]
    torch.testing.assert_close(upload, row - start, rtol=0, atol=1e-12)
    parts = attack.state_dict()["own_parts"]
    torch.testing.assert_close(parts["1/2.bias"], start[-3:], rtol=0, atol=0)


def test_attackers_of_pfedfda_train_the_body_under_the_head_that_clients_have():
    """The head of the server's moments after one round, and of the attacker's own classes."""

    class Spy(TrainingAttack):
        def make_upload(self, training, update):
            heads.append((training.start[25:], training.row.detach()[25:]))
            return update

    heads = []
    data = shared_out(classes([9, 5, 12]))
    client = PFedFDA(seeded(mlp), optimizer=sgd(0.1))
    settings = {"attack": Spy(BACKDOOR, epochs=2), "ids": [1], "start_round": 0}
    states = run_rounds(client, data, 1, **settings).server_states
    heads.clear()
    run_rounds(client, data, 2, **settings)
    shares = data.clients.class_counts(torch.tensor([1]))[0].double() / 5 + 1e-4
    factor = factor_covariance(states["covariance"].view(5, 5), 1e-4)
    priors = (shares / shares.sum()).log()
    expected = linear_discriminant(states["means"].view(3, 5), factor, priors)
    expected = torch.cat([part.flatten() for part in expected])
    initial = nn.utils.parameters_to_vector(seeded(mlp).double()[2].parameters())
    assert (heads[0][0][:15] - initial[:15]).abs().max() < 1e-3, "Σ is I, shrunk by 1e-4"
    for head in heads[1]:
        torch.testing.assert_close(head, expected, rtol=0, atol=1e-12)


def test_projection_on_both_balls():
    start, row = torch.tensor([1.0, 1.0]).double(), torch.tensor([4.0, 5.0]).double()
    torch.testing.assert_close(project(row, start, 2.0, "l2"), torch.tensor([2.2, 2.6]).double())
    assert project(row, start, 2.0, "linf").tolist() == [3.0, 3.0]
    assert project(row, start, 5.5, "l2").tolist() == [4.0, 5.0], "it is within the ball"
    assert project(start, start, 2.0, "l2").tolist() == [1.0, 1.0]


@table_test("norm", [("l2", 2), ("linf", torch.inf)])
def test_uploads_lie_in_the_ball(norm):
    norm, order = norm
    (free,), _ = forge(TrainingAttack(BACKDOOR))
    radius = 0.5 * float(torch.linalg.vector_norm(free, order))
    arguments = {"radius": radius, "norm": norm}
    (upload,), _ = forge(ProjectedBackdoor(BACKDOOR, **arguments))
    assert float(torch.linalg.vector_norm(upload, order)) == pytest.approx(radius)
    (late,), _ = forge(ProjectedBackdoor(BACKDOOR, shrinkage=0.5, **arguments))  # in round 2
    assert float(torch.linalg.vector_norm(late, order)) == pytest.approx(radius / 4)
    wide, _ = forge(ProjectedBackdoor(BACKDOOR, radius=1e6, norm=norm))
    torch.testing.assert_close(wide[0], free, rtol=0, atol=1e-12)


def test_models_are_projected_every_few_steps_and_at_the_end_of_a_pass():
    projected = []

    class Recorder(ProjectedBackdoor):
        def end_step(self, training):
            before = training.row.detach()
            super().end_step(training)
            if not torch.equal(before, training.row.detach()):
                projected.append(training.step)

    forge(Recorder(BACKDOOR, radius=1e-3, every=3, epochs=2, batch_size=1))  # 6 samples
    assert projected == [0, 3, 5, 6, 9, 11]


# Own parts


@table_test("algorithm", [FedRep, FedPer])
@pytest.mark.slow
def test_attackers_keep_a_head_of_their_own(algorithm):
    class Spy(TrainingAttack):
        def begin_training(self, training):
            heads.append(training.start[~training.sent].clone())

        def make_upload(self, training, update):
            uploads.append((update, training.sent))
            return update

    heads, uploads = [], []
    spy = Spy(BACKDOOR, epochs=2)
    client = algorithm(seeded(mlp), optimizer=sgd(0.1), local_epochs=1)
    outcome = run_tried_rounds(client, shared_out(classes([9, 5, 12])), attack=spy, ids=[1])
    head = outcome.w[-18:]
    assert torch.equal(heads[0], head), "it begins at the initial head"
    assert not torch.equal(heads[1], head)
    for update, sent in uploads:
        assert update[~sent].count_nonzero() == 0
        assert update[sent].count_nonzero() > 0
    assert set(spy.state_dict()["own_parts"]) == {"1/2.weight", "1/2.bias"}


@pytest.mark.slow
def test_attacker_with_fewer_samples_than_a_minibatch_takes_no_step():
    """BatchNorm does not train on the single sample of client 0, honest or not."""
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    client = FedAvg(nn.Sequential(*layers), optimizer=sgd(0.1))
    data = shared_out(classes([1, 9, 12]), min_batch=2)
    honest = run_rounds(client, data)
    for name, attack in ATTACKS.items():
        assert run_rounds(client, data, attack=attack(), ids=[0]).distance(honest) == 0, name
    larger = shared_out(classes([2, 9, 12]), min_batch=2)
    attacked = run_rounds(client, larger, attack=ATTACKS["A3FL"](), ids=[0])
    assert attacked.distance(run_rounds(client, larger)) > 0


def test_attackers_keep_normalisation_layers_with_their_statistics():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    attack = TrainingAttack(BACKDOOR, epochs=2)
    client = FedBN(net, optimizer=sgd(0.1))
    run_tried_rounds(client, shared_out(classes([8, 6, 12])), attack=attack, ids=[1])
    parts = attack.state_dict()["own_parts"]
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert set(parts) == {f"1/1.{name}" for name in names}
    assert parts["1/1.running_mean"].count_nonzero() > 0


# each attack with an algorithm whose attackers keep parts of their own, and with another in turn
PAIRS = [(name, FedRep) for name in ATTACKS]
PAIRS += zip(ATTACKS, itertools.cycle([FedAvg, Ditto, FedPer, Finetuning, FLAME]))


@exhaustive_for(
    "BadPFL-FedRep",
    "ConstrainedReplacement-FedRep",
    "FairnessAttack-FedRep",
    "Neurotoxin-FedRep",
    "ProjectedBackdoor-FedRep",
    "TrainingAttack-FedRep",
    "A3FL-FedPer",
    "PFedBA-FedAvg",
)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_engines_give_equal_models_for_every_attack_and_algorithm(name, algorithm):
    def run(engine, **settings):
        client = algorithm(seeded(mlp), optimizer=sgd(0.1))
        data = shared_out(classes([9, 5, 12, 7]))
        settings = {"attack": ATTACKS[name](), "ids": [1, 3], "engine": engine, **settings}
        return run_tried_rounds(client, data, **settings)

    reference = run("one_by_one")
    assert reference.distance(run("stacked")) < 1e-10
    assert reference.distance(run("stacked", chunk_size=3)) < 1e-10
    assert reference.distance(run("one_by_one", start_round=9)) > 1e-3, "the attack acts"


@pytest.mark.slow
def test_attackers_of_a_cluster_train_its_center():
    class Spy(TrainingAttack):
        def begin_training(self, training):
            starts.append((training.start, training.context.broadcast))

    starts = []
    client = IFCA(seeded(mlp), clusters=2, optimizer=sgd(0.1))
    data = shared_out(classes([9, 5, 12, 8]))
    run_tried_rounds(client, data, attack=Spy(BACKDOOR), ids=[0, 1, 2, 3])
    assert len(starts) == 8
    assert all(torch.equal(start, broadcast) for start, broadcast in starts)
    assert any(not torch.equal(start, starts[0][0]) for start, _ in starts[:4]), "two centers"


# Refusals


class Dictionary(nn.Module):
    """Dictionary: a net that returns no tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return {"scores": self.layer(x)}


def refuse(match, client=None, **settings):
    client = client or FedAvg(seeded(mlp), optimizer=sgd(0.1))
    with pytest.raises(ValueError, match=match):
        run_tried_rounds(client, shared_out(classes([9, 5, 12])), **{"ids": [1], **settings})


def test_algorithms_with_other_uploads_are_refused_before_training():
    client = LpProj(seeded(mlp), dimensions=5, optimizer=sgd(0.1))
    refuse("uploads of model parameters for Neurotoxin, .* got LpProj", client, attack=Neurotoxin())


@table_test(
    "attack", [TrainingAttack(Backdoor(3, size=1)), Combined([Neurotoxin(Backdoor(3, size=1))])]
)
def test_target_that_is_no_class_is_refused_before_training(attack):
    refuse("`target` to be one of the 3 classes but got 3", attack=attack)


def test_trigger_that_does_not_fit_is_refused_before_training():
    refuse(r"`size` to fit inputs of shape \[4\] but got 3", attack=TrainingAttack())


def test_net_without_scores_is_refused():
    net = Dictionary().double()
    with pytest.raises(ValueError, match=r"scores \[batch, classes\] .* TrainingAttack, .* dict"):
        forge(TrainingAttack(BACKDOOR), net)


@table_test("backdoor", [ModelReplacement(), Neurotoxin(BACKDOOR)])
def test_only_an_attack_on_data_with_a_trigger_is_a_backdoor(backdoor):
    with pytest.raises(ValueError, match="`backdoor` to be an attack on data with a trigger"):
        TrainingAttack(backdoor)


@table_test(
    "arguments",
    [{"ratio": 0.0}, {"ratio": 1.5}, {"mask": "weights"}, {"lr": 0.0}, {"epochs": 0}, {"steps": 0}],
)
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=f"Expected argument `{next(iter(arguments))}`"):
        Neurotoxin(**arguments)


# Checkpoints and triggers


def make_trainer(attack, folder, rounds):
    federation = pl_fed.Federation(
        All(), adversary=pl_fed.Adversary(attack=attack, ids=[1, 3]), seed=0
    )
    return pl_fed.Trainer(
        federation,
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@exhaustive_for(
    *("A3FL", "ConstrainedReplacement", "FairnessAttack", "PFedBA", "ProjectedBackdoor"),
    "TrainingAttack",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_resumed_run_has_the_metrics_of_an_uninterrupted_one(name, tmp_path):
    def fit(folder, rounds, checkpoint=None):
        client = FedRep(seeded(mlp), optimizer=sgd(0.1))
        data = shared_out(classes([19, 15, 22, 17]), test_fraction=0.3)
        trainer = make_trainer(ATTACKS[name](), tmp_path / folder, rounds)
        trainer.fit(client, data, ckpt_path=checkpoint)
        (results,) = trainer.test(client, data, verbose=False)
        return results

    expected = fit("uninterrupted", 4)
    fit("begun", 2)
    resumed = fit("resumed", 4, tmp_path / "begun" / "checkpoints" / "last.ckpt")
    assert resumed == expected
    assert ("test/personal/backdoor_success" in expected) is ATTACKS[name]().triggers


class Growing(Attack):
    """Growing: a trigger that changes with each round of the attack."""

    needs_inputs = True

    def __init__(self):
        self.trigger_version = 0

    def forge(self, honest, own, context):
        self.trigger_version = context.round + 1
        return own

    def trigger(self, batch):
        versions.append(self.trigger_version)
        return batch._replace(inputs=batch.inputs + self.trigger_version)


versions = []


@pytest.mark.slow
def test_samples_with_a_trigger_are_made_anew_when_it_changes(tmp_path):
    versions.clear()
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    data = shared_out(classes([19, 15, 22, 17]), test_fraction=0.3, val_fraction=0.2)
    trainer = make_trainer(Growing(), tmp_path, 3)
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    trainer.test(client, data, verbose=False)
    assert versions == [0, 1, 2, 3, 3], "a trial, three validations, one test part"


def test_combined_attack_keeps_the_states_of_its_attacks():
    client = FedRep(seeded(mlp), optimizer=sgd(0.1))
    combined = Combined([ATTACKS["Neurotoxin"](), ModelReplacement(factor=2.0)])
    run_rounds(client, shared_out(classes([9, 5, 12])), attack=combined, ids=[1])
    state = combined.state_dict()
    assert set(state) == {"0"}
    twin = Combined([ATTACKS["Neurotoxin"](), ModelReplacement(factor=2.0)])
    twin.load_state_dict(state)
    assert set(twin.attacks[0].state_dict()["own_parts"]) == {"1/2.weight", "1/2.bias"}
    other = Combined([ModelReplacement(factor=2.0)])
    with pytest.raises(ValueError, match="without a state of ModelReplacement"):
        other.load_state_dict(state)


def test_combined_attack_refuses_the_state_of_another_attack_or_of_more_attacks():
    combined = Combined([ModelReplacement(factor=2.0)])
    for name in ("stamp", "1"):
        with pytest.raises(ValueError, match=f"of the 1 attacks of Combined but got {name}:"):
            combined.load_state_dict({name: {"stamp": torch.zeros(1)}})


def test_batch_without_a_mask_keeps_it():
    batch = Batch(torch.zeros(2, 4), torch.tensor([0, 1]))
    assert TrainingAttack(BACKDOOR).trigger(batch).mask.tolist() == [True, False]


# Fairness


def test_mean_of_all_uploads_is_the_attackers_model():
    """The numbers of n_0 = 10, n_i = 30 and 60: with the true uploads, and with p = (.3, .1)."""
    weights = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    benign = torch.tensor([[0.2, 0.0], [0.4, 0.2]], dtype=torch.float64)
    wanted = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    others = (weights[1:, None] * benign).sum(0, keepdim=True) / 0.9
    for predicted, upload, mean in (
        (others, [7.0, -11.2], [1.0, -1.0]),
        (torch.tensor([[0.3, 0.1]], dtype=torch.float64), [7.3, -10.9], [1.03, -0.97]),
    ):
        forged = replace_mean(wanted, predicted, share=0.1)
        assert forged[0].tolist() == pytest.approx(upload, abs=1e-12)
        merged = weights @ torch.cat([forged, benign])
        assert merged.tolist() == pytest.approx(mean, abs=1e-12)


def test_samples_of_a_fairness_attack_are_of_the_favoured_classes():
    seen = []

    class Recorder(FairnessAttack):
        def loss(self, training, batch):
            seen.append(batch.targets)
            return super().loss(training, batch)

    for samples, low, high in ((1.0, 40, 40), (0.5, 20, 32), (0.0, 5, 22)):
        seen.clear()
        forge(Recorder([1], samples, epochs=1, batch_size=100), sizes=(9, 40, 2))
        (targets,) = seen
        assert len(targets) == 40
        assert low <= int((targets == 1).sum()) <= high


def test_attacker_without_the_favoured_classes_takes_samples_of_other_attackers():
    seen = {}

    class Recorder(FairnessAttack):
        def loss(self, training, batch):
            seen[training.client] = batch.targets.tolist()
            return super().loss(training, batch)

    targets = {0: [0, 0, 2], 1: [2, 2], 2: [1, 1]}
    net = seeded(mlp).double()

    def samples(client):
        return Batch(torch.ones(len(targets[client]), 4).double(), torch.tensor(targets[client]))

    attack = Recorder([0], epochs=1)
    context = round_context(net, shared_out(classes([9, 6, 12])), (0, 1), samples=samples)
    own = torch.zeros(2, context.layout.numel, dtype=torch.float64)
    attack.forge(own[:0], own, context)
    assert seen == {0: [0, 0, 0], 1: [0, 0]}
    seen.clear()
    attack.forge(own[:0], own[:1], replace(context, attackers=torch.tensor([1]), byzantine=(1,)))
    assert seen == {1: [2, 2]}, "nobody has the class"


def test_upload_of_a_fairness_attack_cancels_the_predicted_updates():
    settings = {"classes": [0, 1, 2], "steps": 3, "samples": 0.0, "batch_size": 4}
    net = seeded(mlp).double()
    data = shared_out(classes([9, 6, 12]))
    context = round_context(net, data, attackers=(1,))
    honest, own = (
        torch.randn(3, context.layout.numel, generator=torch.Generator().manual_seed(0))
        .double()
        .split([2, 1])
    )
    attacks = {p: FairnessAttack(prediction=p, **settings) for p in ("none", "own", "observed")}
    uploads = {name: attack.forge(honest, own, context)[0] for name, attack in attacks.items()}
    change = uploads["none"] / 3  # one attacker among three uploads
    torch.testing.assert_close(uploads["own"], 3 * change - 2 * own[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(uploads["observed"], 3 * change - 2 * honest.mean(0))
    mean = (uploads["observed"] + honest.sum(0)) / 3
    torch.testing.assert_close(mean, change)
    broken = torch.full_like(own, torch.nan)
    torch.testing.assert_close(attacks["own"].forge(honest, broken, context)[0], 3 * change)


@table_test("samples, share", [(1.0, None), (0.5, None), (0.5, 0.2)])
def test_uploads_of_a_fairness_attack_equal_those_by_hand(samples, share):
    """One batch, so that the order of its samples does not matter."""
    net = seeded(mlp).double()
    context = round_context(net, shared_out(classes([9, 6, 14])), attackers=(0, 2))
    draw = torch.Generator().manual_seed(5)
    honest, own = torch.randn(3, 43, generator=draw, dtype=torch.float64).split([1, 2])
    settings = {"epochs": 4, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.1, "batch_size": 50}
    attack = FairnessAttack([1, 2], samples, "own", share, **settings)
    uploads = attack.forge(honest, own, context)
    s = share or 2 / 3
    for client, own_row, upload in zip((0, 2), own, uploads, strict=True):
        clean = context.samples(client)
        favoured = np.flatnonzero(clean.targets.numpy() != 0)
        num_favoured = round(samples * clean.size)
        draw = generator(3, "fairness attack", 2, client)
        order = torch.randperm(len(favoured), generator=draw).numpy()
        others = torch.randperm(clean.size, generator=draw).numpy()
        positions = np.resize(favoured[order], num_favoured)
        positions = np.append(positions, others[: clean.size - num_favoured])
        x, y = clean.inputs[positions], clean.targets[positions]
        row, velocity = context.broadcast.clone(), 0.0
        for _ in range(4):
            nn.utils.vector_to_parameters(row.clone(), net.parameters())
            velocity = 0.5 * velocity + read_gradient(net, x, y) + 0.1 * row
            row = row - 0.2 * velocity
        expected = (row - context.broadcast) / s - (1 - s) / s * own_row
        torch.testing.assert_close(upload, expected, rtol=0, atol=1e-12)


@table_test("arguments", [{"classes": []}, {"classes": [-1]}, {"samples": 1.5}, {"share": 0.0}])
def test_fairness_attack_refuses_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"argument `{next(iter(arguments))}"):
        FairnessAttack(**arguments)


REALS = reals(torch.ones(4, 4), [[1.0, 0.0, 0.0]] * 4, [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("arrays", "favoured", "num_classes"), [(classes([9, 5, 12]), 7, 3), (REALS, 0, 0)]
)
def test_fairness_attack_refuses_data_without_its_classes(arrays, favoured, num_classes):
    client, attack = FedAvg(seeded(mlp), optimizer=sgd(0.1)), FairnessAttack([favoured])
    message = f"`classes` to be among the {num_classes} classes of the data but got {favoured}"
    with pytest.raises(ValueError, match=message):
        run_tried_rounds(client, shared_out(arrays), rounds=0, attack=attack, ids=[1])
