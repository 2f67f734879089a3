"""FLDetector against its algorithms in numpy over many rounds, and by hand."""

import copy
import io

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from sklearn.cluster import KMeans
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch.testing import assert_close

from pl_fed.aggregators import CRFL, Bucketing, Chain, FLDetector, FLTrust, Krum, Mean, Median
from pl_fed.aggregators.fl_detector import find_odd_scores
from pl_fed.attacks import RandomUpdates
from pl_fed.clients import FedAvg
from pl_fed.functional.hessian import HessianEstimate
from pl_fed.samplers import Uniform
from pl_fed.types import RoundContext

HESSIAN = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
CHANGES = torch.tensor([[1, 0, 0.5], [0, 1, -0.5]], dtype=torch.float64)


def multiply_by_bfgs(changes, differences, vector):
    """The product with the matrix that BFGS updates pair by pair."""
    scale = differences[-1] @ changes[-1] / (changes[-1] @ changes[-1])
    matrix = scale * np.eye(len(vector))
    for s, y in zip(changes, differences):
        product = matrix @ s
        matrix -= np.outer(product, product) / (s @ product)
        matrix += np.outer(y, y) / (y @ s)
    return matrix @ vector


class Paper:
    """The paper with every client's own history, in dictionaries."""

    def __init__(self, window):
        self.window = window
        self.models, self.merged = [], []
        self.last, self.distances, self.detected = {}, {}, set()

    def predict(self, client, model):
        step, upload = self.last[client]
        changes = np.diff(self.models[-self.window - 1 :], axis=0)
        differences = np.diff(self.merged[-self.window - 1 :], axis=0)
        return upload + multiply_by_bfgs(changes, differences, model - self.models[step])

    def round(self, clients, uploads, model):
        errors = {}
        if len(self.models) > self.window:
            for client, upload in zip(clients, uploads):
                oldest = len(self.models) - self.window - 1
                if client in self.last and self.last[client][0] >= oldest:
                    errors[client] = np.linalg.norm(self.predict(client, model) - upload)
        for client, error in errors.items():
            share = error / sum(errors.values())
            self.distances.setdefault(client, []).append(len(errors) * share)
        for client, upload in zip(clients, uploads):
            self.last[client] = (len(self.models), upload)
        self.models.append(model)
        self.merged.append(np.median(uploads, axis=0))
        return self.merged[-1]

    def scores(self):
        """The scores of clients with a full window, and those of the upper of two clusters."""
        scores = {
            client: np.mean(distances[-self.window :])
            for client, distances in self.distances.items()
            if len(distances) >= self.window
        }
        if len(scores) < 4:
            return scores, set()
        values = np.array(list(scores.values()))[:, None]
        kmeans = KMeans(2, n_init=10, random_state=0).fit(values)
        upper = kmeans.labels_ == kmeans.cluster_centers_.argmax()
        return scores, {client for client, odd in zip(scores, upper) if odd}


class Quadratics:
    """Clients that descend on quadratic losses; the last ones send noise."""

    def __init__(self, num_clients=10, num_hostile=3, d=15, seed=0):
        self.draw = np.random.default_rng(seed)
        self.centres = self.draw.normal(size=(num_clients, d))
        self.curvatures = self.draw.uniform(0.5, 1.5, d)
        self.hostile = set(range(num_clients - num_hostile, num_clients))

    def uploads(self, clients, model):
        rows = -0.1 * self.curvatures * (model - self.centres[clients])
        rows += 1e-3 * self.draw.normal(size=rows.shape)
        for row, client in zip(rows, clients):
            if client in self.hostile:
                row[:] = self.draw.normal(size=len(row))
        return rows


def simulate(world, window, rounds, cohort=None, stop=True):
    """Run both side by side; return the aggregator, the paper and the round of detection."""
    num_clients, d = world.centres.shape
    aggregator, paper, model = FLDetector(window), Paper(window), np.zeros(d)
    for number in range(rounds):
        clients = world.draw.permutation(num_clients)[: cohort or num_clients]
        uploads = world.uploads(clients, model)
        rejected = []
        now = RoundContext(
            seed=1,
            round=number,
            clients=torch.from_numpy(clients),
            broadcast=torch.from_numpy(model.copy()),
            reject=lambda ids, into=rejected: into.extend(ids.tolist()),
        )
        merged = aggregator(torch.from_numpy(uploads), torch.ones(len(clients)), now)
        expected = paper.round(clients.tolist(), uploads, model)
        if rejected or len(aggregator.detected):
            return aggregator, paper, number, rejected
        assert_close(merged, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
        compare_distances(aggregator, paper)
        model = model + expected
    return aggregator, paper, None, []


def compare_distances(aggregator, paper):
    """Compare the last distances of each client."""
    assert set(aggregator.distances.ids.tolist()) == set(paper.distances)
    for client, row in zip(aggregator.distances.ids.tolist(), aggregator.distances.rows):
        expected = paper.distances[client][-paper.window :]
        # a difference of long updates, by a matrix whose condition the world decides
        assert row[row >= 0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_hessian_product_equals_the_hand_computed_example():
    estimate = HessianEstimate.fit(CHANGES, CHANGES * HESSIAN)
    product = estimate.multiply(torch.tensor([0.2, 0.4, 0.0]))
    assert product.tolist() == pytest.approx([0.201657, 0.814517, 0.029034], abs=1e-6)
    newest = estimate.multiply(CHANGES[-1])
    assert_close(newest, CHANGES[-1] * HESSIAN, rtol=1e-12, atol=1e-12)


def test_distances_equal_the_hand_computed_example():
    """The prediction adds the product to the previous updates of four clients."""
    before = torch.tensor([[1, 1, 1], [1.2, 0.8, 1], [1, 1, 1.1], [0, 0, 0]], dtype=torch.float64)
    rows = [[1.2, 1.8, 1], [1.3, 1.6, 1], [1.2, 1.8, 1.1], [-2, -1, 3]]
    rows = torch.tensor(rows, dtype=torch.float64)
    aggregator = FLDetector(window=2)
    aggregator.models = torch.cat([torch.zeros(1, 3).double(), CHANGES.cumsum(0)])
    aggregator.updates = aggregator.models * HESSIAN
    aggregator.step = torch.tensor(3)
    aggregator.uploads.write(torch.arange(4), before)
    aggregator.steps.write(torch.arange(4), torch.full((4, 1), 2))
    broadcast = aggregator.models[-1] + torch.tensor([0.2, 0.4, 0.0])
    now = RoundContext(clients=torch.arange(4), broadcast=broadcast)
    aggregator(rows, torch.ones(4), now)
    latest = aggregator.distances.rows[:, -1].tolist()
    shares = [number / 4 for number in latest]  # the paper's distances, of their sum
    assert shares == pytest.approx([0.007575, 0.024871, 0.007575, 0.959979], abs=1e-6)


def test_product_equals_bfgs():
    draw = torch.Generator().manual_seed(0)
    for pairs in (1, 2, 5, 9):
        changes = torch.randn(pairs, 12, generator=draw, dtype=torch.float64)
        differences = changes * torch.linspace(0.5, 2, 12).double()
        vector = torch.randn(12, generator=draw, dtype=torch.float64)
        expected = multiply_by_bfgs(changes.numpy(), differences.numpy(), vector.numpy())
        product = HessianEstimate.fit(changes, differences).multiply(vector)
        assert_close(product, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_singular_systems_have_no_estimate():
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    assert HessianEstimate.fit(zeros, CHANGES) is None
    assert HessianEstimate.fit(CHANGES, zeros) is None
    with_zero = torch.cat([CHANGES, zeros[:1]])
    estimate = HessianEstimate.fit(with_zero, with_zero * HESSIAN)
    expected = HessianEstimate.fit(CHANGES, CHANGES * HESSIAN)
    assert torch.equal(estimate.multiply(HESSIAN), expected.multiply(HESSIAN))


@pytest.mark.parametrize("cohort", [None, 7])
@pytest.mark.slow
def test_distances_and_detection_equal_the_paper(cohort):
    detections = 0
    for seed in range(4):
        world = Quadratics(seed=seed)
        aggregator, paper, number, rejected = simulate(world, 4, 40, cohort)
        if number is None:
            continue
        scores, upper = paper.scores()
        detected = set(aggregator.detected.tolist())
        assert detected == upper
        assert set(rejected) == detected & set(rejected)
        assert not cohort or number >= 2 * 4
        assert cohort or (number == 2 * 4 and len(scores) == 10)
        detections += detected <= world.hostile
    assert detections >= 3


@pytest.mark.slow
def test_restart_goes_back_to_the_first_model_without_the_detected_clients():
    """After the detection, the rounds are those of a new aggregator for the other clients."""
    world, first = Quadratics(), torch.linspace(-1, 1, 15, dtype=torch.float64)
    aggregator, model, detected_in = FLDetector(4, restart=True), first, None
    anew = None
    for number in range(30):
        clients = torch.arange(10)
        uploads = torch.from_numpy(world.uploads(clients.numpy(), model.numpy()))
        now = RoundContext(seed=1, round=number, clients=clients, broadcast=model)
        merged = aggregator(uploads, torch.ones(10), now)
        if anew is None and len(aggregator.detected):
            detected_in, anew = number, FLDetector(4)
            assert_close(model + merged, first, rtol=0, atol=1e-12)
        elif anew is not None:
            others = ~torch.isin(clients, aggregator.detected)
            part = RoundContext(
                seed=1, round=number, clients=clients[others], broadcast=model.clone()
            )
            assert torch.equal(merged, anew(uploads[others], torch.ones(int(others.sum())), part))
            if len(anew.detected):
                break
        model = model + merged
    assert detected_in == 2 * 4
    assert set(aggregator.detected.tolist()) >= world.hostile


def test_restart_refuses_a_server_optimizer_that_does_more_than_add():
    data, client = shared_out(classes([8] * 6)), FedAvg(seeded(mlp), optimizer=sgd(0.1))
    with pytest.raises(ValueError, match="FLDetector"):
        run_rounds(client, data, aggregator=FLDetector(restart=True), server_optimizer=sgd(0.5))


@pytest.mark.slow
def test_benign_clients_are_mostly_not_detected():
    """The gap statistic errs at times, most with few rounds in a score."""
    worlds = [Quadratics(num_hostile=0, seed=seed) for seed in range(6)]
    assert sum(simulate(world, 10, 21)[2] is not None for world in worlds) <= 1


def test_a_client_alone_in_a_round_is_not_odd():
    for seed in range(6):
        world, aggregator, model = Quadratics(num_hostile=0, seed=seed), FLDetector(1), np.zeros(15)
        for number, clients in enumerate([np.arange(10)] * 3 + [np.arange(1)]):
            uploads = torch.from_numpy(world.uploads(clients, model))
            now = RoundContext(
                seed=1,
                round=number,
                clients=torch.from_numpy(clients),
                broadcast=torch.from_numpy(model.copy()),
            )
            model = model + aggregator(uploads, torch.ones(len(clients)), now).numpy()
            aggregator.detected = aggregator.detected[:0] if number < 3 else aggregator.detected
        assert aggregator.distances.rows[aggregator.distances.ids == 0].item() in (-1, 1)
        assert 0 not in aggregator.detected


def test_detected_clients_stay_out_and_the_window_begins_again():
    world = Quadratics()
    aggregator, _, _, rejected = simulate(world, 4, 40)
    assert set(rejected) == world.hostile
    assert len(aggregator.models) == 1
    clients = torch.arange(5, 10)
    uploads, model = torch.from_numpy(world.uploads(clients.numpy(), np.zeros(15))), torch.zeros(15)
    now = RoundContext(clients=clients, broadcast=model.double(), num_byzantine=2)
    merged = aggregator(uploads, torch.ones(5), now)
    assert_close(merged, uploads[:2].mean(0))
    memory = copy.deepcopy(aggregator.state_dict())
    now = now.select(torch.tensor([2, 3, 4]))
    assert not aggregator(uploads[2:], torch.ones(3), now).any()
    for name, value in aggregator.state_dict().items():
        assert torch.equal(value, memory[name]), "no update to predict from"


def test_median_merges_the_clients_that_are_too_few_for_the_inner_aggregator():
    aggregator = FLDetector(then=Krum(num_byzantine=1))
    rows = torch.tensor([[1.0], [2.0], [4.0], [9.0], [9.0], [9.0]])
    now = RoundContext(clients=torch.arange(6), broadcast=torch.zeros(1))
    assert aggregator(rows, torch.ones(6), now) in (2, 4, 9)
    aggregator.detected = torch.tensor([3, 4, 5])
    assert aggregator(rows, torch.ones(6), now) == 2, "Krum needs four uploads"
    with pytest.raises(ValueError, match="at least 4 rows for Krum"):
        FLDetector(then=Krum(num_byzantine=1))(rows[:3], torch.ones(3), now.select(torch.arange(3)))


def test_memory_resumes_in_the_middle_of_a_window():
    world = Quadratics()
    aggregator, _, _, _ = simulate(world, 4, 7)
    saved = io.BytesIO()
    torch.save(aggregator.state_dict(), saved)
    saved.seek(0)
    resumed = FLDetector(4)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    running = copy.deepcopy(aggregator)
    for number in range(7, 12):
        clients = np.arange(10)
        uploads = torch.from_numpy(world.uploads(clients, np.full(15, 0.1 * number)))
        broadcast = torch.full((15,), 0.1 * number).double()
        now = RoundContext(round=number, clients=torch.arange(10), broadcast=broadcast)
        results = [each(uploads, torch.ones(10), now) for each in (running, resumed)]
        assert torch.equal(*results)
    for name, value in running.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_no_split_of_equal_or_few_scores():
    for scores in ([0.1] * 6, [0.1, 0.1, 0.9], []):
        assert not find_odd_scores(np.array(scores), 0).any()
    assert find_odd_scores(np.array([0.1] * 5 + [0.9]), 0).tolist() == [False] * 5 + [True]


@exhaustive_but("6")
@pytest.mark.slow
@pytest.mark.parametrize("cohort", [9, 6])
def test_rounds_of_a_federation_detect_random_updates(cohort):
    client = FedAvg(seeded(mlp), optimizer=sgd(0.05), local_steps=2)
    outcome = run_rounds(
        client,
        shared_out(classes([20] * 9)),
        24,
        aggregator=FLDetector(window=3),
        sampler=Uniform(cohort),
        attack=RandomUpdates(std=20.0),
        ids=[2, 7],
    )
    dropped = [report["train/dropped"] for report in outcome.reports]
    assert dropped[:6] == [0] * 6
    assert sum(dropped) > 0


def test_arguments_and_the_inner_aggregator():
    with pytest.raises(ValueError, match="argument `window`"):
        FLDetector(window=0)
    with pytest.raises(TypeError, match="argument `then`"):
        FLDetector(then="Median")
    assert FLDetector(then=FLTrust()).needs_root
    assert FLDetector(then=CRFL()).sets_model
    assert not FLDetector().sets_model
    rows = torch.tensor([[1.0], [2.0], [9.0]])
    now = RoundContext(clients=torch.arange(3), broadcast=torch.zeros(1))
    for then in (Mean(), Median()):
        expected = then(rows, torch.ones(3), now)
        assert torch.equal(FLDetector(then=then)(rows, torch.ones(3), now), expected)
    with pytest.raises(ValueError, match=r"for FLDetector, .* but got Bucketing"):
        Chain([Bucketing()], FLDetector())
    with pytest.raises(ValueError, match=r"NaN or infinity in rows \[0\]"):
        FLDetector()(rows * torch.tensor([[torch.nan], [1], [1]]), torch.ones(3), now)
