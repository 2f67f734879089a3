"""FairFed against loops over samples in NumPy: weights alone, and whole rounds with training."""

import copy
from dataclasses import replace
from fractions import Fraction

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import (
    Cohorts,
    Only,
    classes,
    reals,
    run_rounds,
    samples_of,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

import pl_fed
from pl_fed.aggregators import CRFL, QFFL, Chain, Clipping, FairFed, Mean
from pl_fed.attacks import Attack, RandomLabels
from pl_fed.clients import FedAvg
from pl_fed.functional.group_fairness import count_groups
from pl_fed.preflight.privacy_rules import describe_unfit_aggregator
from pl_fed.samplers import Uniform
from pl_fed.types import Batch, ClientContext, RoundContext

SIZES = [40, 60, 30, 50, 20]


def with_groups(arrays, seed=7):
    """Give the samples one of two groups; the last client has none of the second."""
    groups = torch.randint(2, (len(arrays),), generator=torch.Generator().manual_seed(seed))
    groups[arrays.client == arrays.client.max()] = 0
    return replace(arrays, groups=groups, group_names=("old", "young"))


def make_data(num_classes=2, **kwargs):
    return shared_out(with_groups(classes(SIZES, num_classes=num_classes)), **kwargs)


def count(samples, num_classes=2):
    """Return the counts of (group, target, prediction), [1, 3, 2, classes]."""
    groups, targets, predicted = torch.tensor(samples, dtype=torch.int64).view(-1, 3).T
    return count_groups(torch.zeros_like(groups), groups, targets, predicted, (1, 2, num_classes))


def rate(samples, condition, event):
    """Return the share of an event among (group, target, prediction); ``None`` without any."""
    hits = [event(*sample) for sample in samples if condition(*sample)]
    return np.mean(hits) if hits else None


def gap(samples, metric, positive=1):
    """Return F of (group, target, prediction); ``None`` if it is undefined."""
    first, second = (
        rate(
            samples,
            lambda g, y, _, a=a: g == a and (metric == "demographic_parity" or y == positive),
            lambda _, __, predicted: predicted == positive,
        )
        for a in (0, 1)
    )
    return None if None in (first, second) else first - second


class Reference:
    """FairFed by loops over samples, with the weights ω̄ of all clients."""

    def __init__(self, sizes, beta, metric="equal_opportunity", positive=1):
        self.omega = np.array(sizes) / np.sum(sizes)
        self.beta, self.metric, self.positive = beta, metric, positive

    def weigh(self, samples):
        """Return ω of a cohort, from the samples by client: (group, target, prediction)."""
        pooled = [sample for own in samples.values() for sample in own]
        wanted, deltas = gap(pooled, self.metric, self.positive), {}
        for client, own in samples.items():
            found = gap(own, self.metric, self.positive)
            if found is None or wanted is None:
                found, target = (
                    rate(part, lambda *_: True, lambda _, y, p: y == p) for part in (own, pooled)
                )
            else:
                target = wanted
            if found is not None:
                deltas[client] = abs(target - found)
        for client, delta in deltas.items():
            self.omega[client] -= self.beta * (delta - np.mean(list(deltas.values())))
        used = np.maximum(self.omega[list(samples)], 0)
        return used / used.sum() if used.sum() > 0 else used


# Small numbers


def merge(aggregator, counts, samples, clients=None, num_samples=0):
    """Return the weights of the uploads."""
    clients = torch.arange(len(counts)) if clients is None else torch.tensor(clients)
    context = RoundContext(clients=clients, group_counts=torch.cat(counts), num_samples=num_samples)
    identity = torch.eye(len(counts), dtype=torch.float64)
    return aggregator(identity, torch.tensor(samples), context).tolist()


RIGHT, WRONG = 1, 0
FIRST = count([(0, 1, RIGHT)] * 2 + [(1, 1, RIGHT)] * 2)  # F_k = 0
SECOND = count([(0, 1, RIGHT)] * 2 + [(1, 1, RIGHT)] * 3 + [(1, 1, WRONG)] * 3)  # F_k = 1/2
ONE_GROUP = count([(0, 1, RIGHT)] * 3 + [(0, 0, 1)])  # no F_k, and an accuracy of 3/4


def test_weights_of_two_clients_by_hand():
    """F = 1 − 5/8, so Δ = 3/8 and 1/8, with mean 1/4."""
    fairfed = FairFed(beta=1.0)
    assert merge(fairfed, [FIRST, SECOND], [4, 8]) == pytest.approx([5 / 24, 19 / 24], abs=1e-15)
    assert fairfed.excess.rows.flatten().tolist() == [1 / 8, -1 / 8]
    second = merge(fairfed, [FIRST, SECOND], [4, 8])
    assert second == pytest.approx([1 / 12, 11 / 12], abs=1e-15)
    third = merge(fairfed, [FIRST, SECOND], [4, 8])
    assert third == [0.0, 1.0], "1/3 − 3/8 is negative"


def test_accuracies_replace_the_gap_of_a_client_of_one_group():
    """F = 1 − 5/8 of 7 and 8 positives, Acc = (4 + 5 + 3) / 16."""
    fairfed = FairFed(beta=0.5)
    deltas = [Fraction(3, 8), Fraction(1, 8), abs(Fraction(12, 16) - Fraction(3, 4))]
    omega = [
        Fraction(n, 16) - Fraction(1, 2) * (delta - sum(deltas) / 3)
        for n, delta in zip((4, 8, 4), deltas)
    ]
    merged = merge(fairfed, [FIRST, SECOND, ONE_GROUP], [4, 8, 4])
    assert merged == pytest.approx([float(each) for each in omega], abs=1e-15)


def test_demographic_parity_counts_all_targets():
    """F_k = 1/2 − 0 and 0 − 1; F = 1/3 − 1/2, so Δ = 2/3 and 5/6."""
    first = count([(0, 0, 1), (0, 1, 0), (1, 0, 0)])
    second = count([(0, 0, 0), (1, 0, 1)])
    fairfed = FairFed(beta=1.0, metric="demographic_parity")
    expected = [3 / 5 + 1 / 12, 2 / 5 - 1 / 12]
    assert merge(fairfed, [first, second], [3, 2]) == pytest.approx(expected, abs=1e-15)


def test_absent_clients_keep_their_weights():
    fairfed = FairFed(beta=1.0)
    merge(fairfed, [FIRST, SECOND], [4, 8], clients=[5, 2], num_samples=24)
    before = fairfed.excess.read(torch.tensor([5, 2]), torch.zeros(1)).flatten().tolist()
    assert before == [1 / 8, -1 / 8]
    merge(fairfed, [FIRST, ONE_GROUP], [4, 12], clients=[7, 5], num_samples=24)
    assert fairfed.excess.ids.tolist() == [2, 5, 7]
    assert fairfed.excess.rows[0].tolist() == [-1 / 8]


def test_weights_start_at_shares_of_all_clients():
    """4/24 − 1/8 and 8/24 + 1/8, of 24 samples in the federation."""
    merged = merge(FairFed(beta=1.0), [FIRST, SECOND], [4, 8], num_samples=24)
    assert merged == pytest.approx([1 / 12, 11 / 12], abs=1e-15)


def test_a_cohort_without_a_weight_leaves_the_model():
    fairfed = FairFed(beta=1.0)
    fairfed.excess.write(torch.tensor([0, 1]), torch.ones(2, 1, dtype=torch.float64))
    assert merge(fairfed, [FIRST, SECOND], [4, 8]) == [0.0, 0.0]


def test_undefined_gaps_and_no_samples():
    nothing = count([])
    fairfed = FairFed(beta=1.0)
    assert merge(fairfed, [nothing, nothing], [1, 3]) == [0.25, 0.75]
    merged = merge(fairfed, [nothing, ONE_GROUP, ONE_GROUP], [0, 1, 3])
    assert merged == [0.0, 0.25, 0.75], "all gaps are undefined, and all accuracies equal"


def test_groups_may_change_places():
    """The sign of a gap depends on the order of the groups; the weights do not."""
    draw = np.random.default_rng(1)
    for metric in ("equal_opportunity", "demographic_parity"):
        counts = [count(draw.integers(0, 2, (30, 3))) for _ in range(4)]
        flipped = [each.flip(2) for each in counts]
        first, second = (merge(FairFed(0.3, metric), each, [30] * 4) for each in (counts, flipped))
        assert first == pytest.approx(second, abs=1e-15)


@pytest.mark.parametrize("metric", ["equal_opportunity", "demographic_parity"])
def test_rounds_of_weights_equal_loops_over_samples(metric):
    draw = np.random.default_rng(2)
    for num_classes, size, beta in ((2, 6, 0.2), (3, 4, 1.0), (4, 2, 3.0)):
        sizes = draw.integers(1, 12, size=6)
        positive = int(draw.integers(num_classes))
        aggregator = FairFed(beta, metric, positive)
        reference = Reference(sizes, beta, metric, positive)
        for _ in range(12):
            clients = draw.permutation(6)[:size].tolist()
            samples = {
                k: [
                    (int(draw.integers(2)), *draw.integers(num_classes, size=2).tolist())
                    for _ in range(sizes[k])
                ]
                for k in clients
            }
            merged = merge(
                aggregator,
                [count(own, num_classes) for own in samples.values()],
                sizes[clients].tolist(),
                clients,
                num_samples=int(sizes.sum()),
            )
            np.testing.assert_allclose(merged, reference.weigh(samples), rtol=0, atol=1e-12)


# Runs


class Watched(FairFed):
    """Keeps the context of a round."""

    def forward(self, uploads, weights, context):
        self.last_context = context
        return super().forward(uploads, weights, context)


def softmax(scores):
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def train(weight, bias, x, y, steps, lr):
    """Return weight and bias after full gradient steps on the mean cross-entropy."""
    for _ in range(steps):
        errors = (softmax(x @ weight.T + bias) - np.eye(len(bias))[y]) / len(x)
        weight, bias = weight - lr * errors.T @ x, bias - lr * errors.sum(0)
    return weight, bias


def run_in_numpy(data, start, cohorts, fairfed, steps=3, lr=0.3):
    """Return the row of a linear net after rounds of full gradient steps."""
    weight, bias = (p.detach().double().numpy() for p in start.parameters())
    for cohort in cohorts:
        samples, models = {}, []
        for k in cohort:
            x, y = samples_of(data, k)
            groups = data.clients.groups[data.clients.train.samples(k)].tolist()
            predicted = (x.astype(float) @ weight.T + bias).argmax(1).tolist()
            samples[k] = list(zip(groups, y.tolist(), predicted, strict=True))
            models.append(train(weight, bias, x.astype(float), y, steps, lr))
        omega = fairfed.weigh(samples)
        weight, bias = (np.tensordot(omega, parts, 1) for parts in zip(*models))
    return np.concatenate([weight.flatten(), bias])


COHORTS = [[0, 1, 4], [4, 2, 0], [2, 3, 1], [1, 4, 2]]


@exhaustive_but("one_by_one")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@table_test(
    ("metric", "num_classes", "cohorts"),
    [
        ("equal_opportunity", 2, [[*range(5)]] * 4),
        ("equal_opportunity", 3, COHORTS),
        ("demographic_parity", 2, COHORTS),
    ],
)
@pytest.mark.slow
def test_rounds_equal_numpy(engine, metric, num_classes, cohorts):
    """Whole rounds with full gradients, and a client of one group."""
    data = make_data(num_classes, batch_size=100)
    client = FedAvg(seeded(lambda: nn.Linear(4, num_classes)), optimizer=sgd(0.3), local_steps=3)
    reference = Reference(SIZES, 0.4, metric)
    settings = {"engine": engine, "chunk_size": 2, "sampler": Cohorts(*cohorts)}
    outcome = run_rounds(client, data, len(cohorts), aggregator=FairFed(0.4, metric), **settings)
    expected = run_in_numpy(data, client.global_model, cohorts, reference)
    np.testing.assert_allclose(outcome.w, expected, rtol=0, atol=1e-9)
    assert np.abs(reference.omega - np.array(SIZES) / 200).max() > 0.01, "the weights moved"


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.slow
def test_zero_step_equals_the_mean_by_samples_exactly(engine):
    client = FedAvg(seeded(linear), optimizer=sgd(0.1), local_steps=3)
    data, settings = make_data(), {"rounds": 3, "sampler": Uniform(3), "engine": engine}
    expected = run_rounds(client, data, aggregator=Mean("samples"), **settings)
    assert run_rounds(client, data, aggregator=FairFed(0.0), **settings).distance(expected) == 0
    assert run_rounds(client, data, aggregator=FairFed(0.5), **settings).distance(expected) > 0


@pytest.mark.slow
def test_zero_step_averages_running_statistics_by_samples():
    client = FedAvg(
        seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))),
        optimizer=sgd(0.1),
        local_steps=3,
    )
    data, settings = make_data(), {"rounds": 3, "sampler": Uniform(3)}
    expected = run_rounds(client, data, aggregator=Mean("samples"), **settings)
    outcome = run_rounds(client, data, aggregator=FairFed(0.0), **settings)
    assert outcome.distance(expected) < 1e-12
    assert run_rounds(client, data, aggregator=Mean(), **settings).distance(expected) > 1e-3


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_byzantine_clients_count_their_poisoned_labels(engine):
    data, attack = make_data(3), RandomLabels()
    client = FedAvg(seeded(lambda: nn.Linear(4, 3)), optimizer=sgd(0.1), local_steps=1)
    federation = pl_fed.Federation(
        Only(3, 0, 2),
        Watched(),
        adversary=pl_fed.Adversary(attack=attack, ids=[0, 3]),
        engine=pl_fed.EngineOptions(engine),
        seed=5,
    )
    federation.setup(client, data, "fit")
    start = copy.deepcopy(client.global_model)
    federation.run_round(0, client.train().configure_optimizers())
    context = federation.server.aggregator.last_context
    assert context.clients.tolist() == [3, 0, 2]
    assert context.num_samples == sum(SIZES)
    for k, found in zip(context.clients.tolist(), context.group_counts):
        index = data.clients.train.samples(k)
        x, targets = data.clients.inputs[index], data.clients.targets[index]
        if k != 2:
            batch = Batch(x, targets, None, index)
            targets = attack.poison(batch, ClientContext(5, 0, k, 3)).targets
            assert not torch.equal(targets, data.clients.targets[index])
        groups, predicted = data.clients.groups[index], start(x).argmax(1)
        samples = [*zip(groups.tolist(), targets.tolist(), predicted.tolist())]
        assert torch.equal(found, count(samples, 3)[0])


def two_groups():
    return with_groups(classes(SIZES, num_classes=2))


def linear():
    return nn.Linear(4, 2)


def fit(
    folder,
    rounds,
    ckpt_path=None,
    source=two_groups,
    net=linear,
    criterion=None,
    aggregator=None,
):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Uniform(3), aggregator or FairFed(0.5), seed=0),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    options = {} if criterion is None else {"criterion": criterion}
    client = FedAvg(seeded(net), optimizer=sgd(0.1), **options)
    trainer.fit(client, shared_out(source()), ckpt_path=ckpt_path)
    return client.row("global").data, trainer.federation.server.aggregator.excess.rows


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    expected = fit(tmp_path / "a", 6)
    fit(tmp_path / "b", 3)
    found = fit(tmp_path / "b", 6, ckpt_path="last")
    assert all(map(torch.equal, found, expected))


# Needs and refusals


def test_wrappers_and_chains_pass_the_need_on():
    assert Chain([Clipping()], FairFed()).needs_group_counts
    assert CRFL(aggregator=FairFed()).needs_group_counts
    assert not QFFL().needs_group_counts


@table_test(
    ("arguments", "name"),
    [({"beta": -0.1}, "beta"), ({"metric": "parity"}, "metric"), ({"positive": -1}, "positive")],
)
def test_invalid_arguments_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be"):
        FairFed(**arguments)


def test_missing_counts_are_refused():
    context = RoundContext(clients=torch.arange(2), group_counts=FIRST)
    with pytest.raises(ValueError, match=r"group_counts` to be of shape \[2, 3, groups, classes\]"):
        FairFed()(torch.eye(2), torch.ones(2), context)


def without_groups():
    return classes(SIZES, num_classes=2)


def with_three_groups():
    arrays = classes(SIZES, num_classes=2)
    return replace(arrays, groups=torch.arange(len(arrays)) % 3)


def real_targets():
    arrays = classes(SIZES)
    return with_groups(reals(arrays.inputs, arrays.inputs[:, :1], arrays.client))


class Steps(pl.LightningModule):
    """A net with steps of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@table_test(
    ("words", "changes"),
    [
        ("group of each sample for FairFed, .* but got none", {"source": without_groups}),
        ("`group` of the data to name two groups .* got 3", {"source": with_three_groups}),
        (
            "one class for each sample for FairFed.*but got Regression",
            {"source": real_targets, "net": lambda: nn.Linear(4, 1), "criterion": nn.MSELoss()},
        ),
        ("one class for each sample for FairFed.*but got LightningTask", {"net": Steps}),
        ("`positive` of FairFed .* 0 to 1, but got 2", {"aggregator": FairFed(positive=2)}),
        (
            "group of each sample for FairFed",
            {"aggregator": CRFL(aggregator=FairFed()), "source": without_groups},
        ),
    ],
)
@pytest.mark.slow
def test_unfit_data_are_refused_before_training(tmp_path, words, changes):
    with pytest.raises(ValueError, match=f"^Expected .*{words}"):
        fit(tmp_path, 1, **changes)


def test_attackers_with_own_knowledge_see_no_counts():
    spies = []

    class Spy(Attack):
        """Keeps its context."""

        def forge(self, honest, own, context):
            spies.append(context)
            return own

    for knowledge in ("own", "all"):
        adversary = {"attack": Spy(), "ids": [1], "knowledge": knowledge}
        client = FedAvg(linear(), optimizer=sgd(0.1), local_steps=1)
        run_rounds(client, make_data(), 1, aggregator=FairFed(), **adversary)
    shapes = [(len(context.group_counts), context.num_samples) for context in spies]
    assert shapes == [(0, 0), (5, 200)]


def test_private_runs_refuse_it():
    refusal = describe_unfit_aggregator(FairFed(), 8)
    assert "FairFed, which reads the clients' samples by group" in refusal
    assert describe_unfit_aggregator(FairFed()) is not None
