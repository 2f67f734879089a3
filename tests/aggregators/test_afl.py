"""AFL against its formula in NumPy over rounds with cohorts, and on a federation."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.testing import assert_close

from pl_fed.aggregators import AFL, Mean
from pl_fed.clients import FedAvg
from pl_fed.samplers import All
from pl_fed.types import RoundContext


def merge(aggregator, uploads, losses, clients=None, num_clients=0):
    clients = torch.arange(len(uploads)) if clients is None else torch.as_tensor(clients)
    losses = torch.as_tensor(losses, dtype=torch.float64)
    context = RoundContext(clients=clients, start_losses=losses, num_clients=num_clients)
    return aggregator(torch.as_tensor(uploads), torch.ones(len(uploads)), context)


def nearest_on_the_simplex(values):
    """Return the projection by the support: the largest one with positive weights."""
    for size in range(len(values), 0, -1):
        support = np.argsort(-values)[:size]
        point = np.zeros(len(values))
        point[support] = values[support] - (values[support].sum() - 1) / size
        if (point >= 0).all():
            return point
    raise AssertionError


@pytest.mark.parametrize(
    ("lr", "shares"), [(0.1, [0.8 / 3, 0.95 / 3, 1.25 / 3]), (1.0, [0.0, 0.0, 1.0])]
)
def test_weights_equal_hand_computed_ones(lr, shares):
    uploads = torch.eye(3, dtype=torch.float64)
    for order, merged in (("before", [1 / 3] * 3), ("after", shares)):
        afl = AFL(lr, order)
        assert merge(afl, uploads, [0.5, 1.0, 2.0]).tolist() == pytest.approx(merged, abs=1e-15)
        assert afl.mixture.shares.tolist() == pytest.approx(shares, abs=1e-15)


@pytest.mark.slow
def test_rounds_equal_the_formula():
    """Cohorts, both orders; λ of absent clients changes by the projection only."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        num_clients, lr = int(draw.integers(2, 9)), float(draw.uniform(0.01, 0.3))
        before, after = AFL(lr), AFL(lr, "after")
        expected = np.full(num_clients, 1 / num_clients)
        for _ in range(6):
            cohort = draw.permutation(num_clients)[: draw.integers(1, num_clients + 1)]
            uploads = draw.normal(size=(len(cohort), 5))
            losses = draw.uniform(0, 3, len(cohort))
            old = expected.copy()
            expected[cohort] += lr * losses
            expected = nearest_on_the_simplex(expected)
            for afl, mixture in ((before, old), (after, expected)):
                own = mixture[cohort]
                mean = own @ uploads / own.sum() if own.sum() else np.zeros(5)
                merged = merge(afl, uploads, losses, cohort, num_clients)
                np.testing.assert_allclose(merged.numpy(), mean, rtol=0, atol=1e-9)
                np.testing.assert_allclose(afl.mixture.shares, expected, rtol=0, atol=1e-12)


def test_running_statistics_have_the_weights_of_the_parameters():
    """The whole weight goes to the client with the largest loss: its model is the global one."""

    def make():
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    arrays = classes([8, 8, 8])
    arrays.inputs[16:] += 6
    data, settings = shared_out(arrays, batch_size=8), {"optimizer": sgd(0.1), "local_steps": 2}
    client = FedAvg(seeded(make), **settings)
    joint = run_rounds(client, data, 1, aggregator=AFL(1e6, "after"))
    alone = [run_rounds(client, data, 1, sampler=Only(k)) for k in range(3)]
    (chosen,) = [run for run in alone if torch.allclose(run.w, joint.w, rtol=0, atol=1e-12)]
    assert_close(joint.w_statistics, chosen.w_statistics, rtol=0, atol=1e-12)


def test_step_of_zero_is_the_mean_in_every_round():
    afl, uploads = AFL(0.0), torch.randn(4, 3, dtype=torch.float64)
    for _ in range(3):
        assert_close(merge(afl, uploads, [0.0, 1.0, 5.0, 2.0]), uploads.mean(0))


def test_cohort_of_clients_without_weight_leaves_the_model():
    afl = AFL(1.0)
    merge(afl, torch.eye(3), [0.0, 0.0, 2.0])
    assert merge(afl, torch.ones(2, 3), [0.5, 0.5], [0, 1]).tolist() == [0.0] * 3


def test_clients_that_join_later_get_their_share():
    afl = AFL(0.0)
    merge(afl, torch.eye(2), [1.0, 1.0], num_clients=2)
    merge(afl, torch.eye(2), [1.0, 1.0], [0, 3], num_clients=4)
    assert afl.mixture.shares.tolist() == pytest.approx([0.25] * 4)


def test_client_that_leaves_is_one_outside_of_the_cohort():
    left, absent = AFL(0.1), AFL(0.1)
    for number in (4, 3, 3):
        losses = [0.5, 1.0, 1.5, 2.0][:number]
        rows = [merge(left, torch.eye(number), losses, num_clients=number)]
        rows.append(merge(absent, torch.eye(number), losses, num_clients=4))
        assert torch.equal(*rows)
        assert torch.equal(left.mixture.shares, absent.mixture.shares)
    assert len(left.mixture.shares) == 4
    assert left.mixture.shares[3] > 0


@table_test(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, r"`lr` to be .* but got -0\.1"),
        ({"merge": "later"}, r"`merge` to be .* but got 'later'"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"Expected argument {message}"):
        AFL(**arguments)


def test_missing_losses_and_ids_are_refused():
    with pytest.raises(ValueError, match="one for each of the 2 uploads, for AFL but got"):
        merge(AFL(), torch.eye(2), [1.0])
    with pytest.raises(ValueError, match="2 different ids, one for each upload, for AFL"):
        merge(AFL(), torch.eye(2), [1.0, 2.0], [3, 3])


@exhaustive_but("after")
@pytest.mark.slow
@pytest.mark.parametrize("merge", ["before", "after"])
def test_afl_lowers_the_worst_loss_of_the_mean(merge):
    """The client with inverted labels has a lower loss than under the mean."""
    arrays = classes([10, 10, 10, 10], num_classes=2)
    labels = (arrays.inputs[:, 0] > 0).long()
    arrays.targets[:] = torch.where(arrays.client == 3, 1 - labels, labels)

    def worst_loss(aggregator):
        client = FedAvg(seeded(lambda: mlp(num_classes=2)), optimizer=sgd(0.2), local_steps=1)
        data = shared_out(arrays, batch_size=10)
        row = run_rounds(client, data, 40, sampler=All(), aggregator=aggregator).w
        net = seeded(lambda: mlp(num_classes=2)).double()
        torch.nn.utils.vector_to_parameters(row, net.parameters())
        outputs = net(arrays.inputs.double())
        losses = torch.nn.functional.cross_entropy(outputs, arrays.targets, reduction="none")
        return max(losses[arrays.client == k].mean().item() for k in range(4))

    assert worst_loss(AFL(0.1, merge)) < 0.8 * worst_loss(Mean())
