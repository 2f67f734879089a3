"""FedDBE against whole rounds in NumPy: own translations, and the pull of mean features."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained
from small_federations import (
    Cohorts,
    classes,
    mlp,
    run_rounds,
    run_tried_rounds,
    samples_of,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed.aggregators import Mean
from pl_fed.attacks import Backdoor, ConstrainedReplacement
from pl_fed.clients import FedAvg, FedDBE
from pl_fed.types import Batch

ENGINES = ["one_by_one", "stacked", "stacked_compiled"]
NUMEL = 20 + 15 + 3  # of the net below


def net():
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def slopes(model, v, x, y, centre, kappa, momentum, running):
    """Return the gradients in body, weights, biases and translation, and the running mean."""
    body, weights, biases = model
    z = np.tanh(x @ body.T)
    shifted = z if centre is None else z + v
    scores = shifted @ weights.T + biases
    shares = np.exp(scores - scores.max(1, keepdims=True))
    errors = (shares / shares.sum(1, keepdims=True) - np.eye(3)[y]) / len(x)
    running = (1 - momentum) * running + momentum * z.mean(0)
    by_z = errors @ weights
    by_v = np.zeros(5) if centre is None else by_z.sum(0)
    if centre is not None:
        by_z = by_z + kappa * momentum * (running - centre) / z.shape[1] / len(x)
    by_body = (by_z * (1 - z**2)).T @ x
    return (by_body, errors.T @ shifted, errors.sum(0)), by_v, running


def simulate(data, cohorts, by_samples, kappa, mean_momentum, lr=0.3):
    """Return the server's model, all translations, and the mean features."""
    first, _, head = seeded(net).double()
    model = tuple(p.detach().numpy() for p in (first.weight, head.weight, head.bias))
    samples = [samples_of(data, k) for k in range(data.clients.num_clients)]
    vs, centre = [np.zeros(5)] * len(samples), None
    for cohort in cohorts:
        models, means = [], []
        for k in cohort:
            x, y = samples[k][0].astype(np.float64), samples[k][1]
            own, running = model, np.zeros(5)
            for begin in [*range(0, len(x), 4)] * 2:
                batch = x[begin : begin + 4], y[begin : begin + 4]
                by, by_v, running = slopes(
                    own, vs[k], *batch, centre, kappa, mean_momentum, running
                )
                own = tuple(part - lr * slope for part, slope in zip(own, by))
                vs[k] = vs[k] - lr * by_v
            models.append(own)
            means.append(np.tanh(x @ own[0].T).mean(0))
        weights = [len(samples[k][1]) if by_samples else 1 for k in cohort]
        model = tuple(np.average(part, axis=0, weights=weights) for part in zip(*models))
        if centre is None:
            centre = np.average(means, axis=0, weights=weights)
    return model, np.stack(vs), centre


def check_rounds(weights, kappa, mean_momentum, engines):
    """Check that rounds equal NumPy, with any cohorts and sizes."""
    cohorts, close = [(0, 1, 2), (1, 2, 3), (0, 2, 3)], {"rtol": 0, "atol": 1e-9}
    for seed in range(2):
        data = shared_out(classes([17, 5, 11, 2], seed=seed), batch_size=4)
        settings = {"aggregator": Mean(weights), "shuffle": False, "chunk_size": 2}
        options = {"kappa": kappa, "mean_momentum": mean_momentum}
        client = FedDBE(seeded(net), optimizer=sgd(0.3), local_epochs=2, **options)
        outcomes = [
            run_rounds(client, data, 3, sampler=Cohorts(*cohorts), engine=engine, **settings)
            for engine in engines
        ]
        model, vs, centre = simulate(data, cohorts, weights == "samples", **options)
        assert np.abs(vs).min(1).max() > 1e-3  # they are trained
        flat = np.concatenate([part.ravel() for part in model])
        for outcome in outcomes:
            assert outcome.distance(outcomes[0]) <= 1e-10
            np.testing.assert_allclose(outcome.w[:NUMEL].numpy(), flat, **close)
            np.testing.assert_allclose(outcome.states["own"].numpy(), vs, **close)
            np.testing.assert_allclose(outcome.server_states["mean_features"], centre, **close)
            for v, row in zip(vs, outcome.v.numpy()):
                expected = [*flat[:35], *(model[2] + model[1] @ v), *np.zeros(5)]
                np.testing.assert_allclose(row, expected, **close)
            assert not outcome.w[NUMEL:].any()


@exhaustive_but("samples-20.0")
@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kappa"), [("uniform", 0.0), ("samples", 20.0)])
def test_rounds_equal_numpy_and_engines_each_other(uncompiled, weights, kappa):
    check_rounds(weights, kappa, 1.0, ENGINES)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "momentum"), [("uniform", 0.3), ("samples", 0.9)])
def test_running_mean_equals_numpy(weights, momentum):
    check_rounds(weights, 20.0, momentum, ["one_by_one"])


@pytest.mark.slow
def test_running_mean_lets_clients_run_one_by_one():
    client = FedDBE(seeded(net), mean_momentum=0.5, optimizer=sgd(0.1), local_steps=3)
    data = shared_out(classes([9, 7]))
    with pytest.warns(UserWarning, match="with mean_momentum below 1, each client keeps a running"):
        outcome = run_tried_rounds(client, data, rounds=2, engine="stacked")
    assert outcome.distance(run_rounds(client, data, rounds=2)) == 0


def test_loss_is_the_cross_entropy_of_translated_features_and_half_a_mean_square():
    """Features (1, 0) and (3, 2) of the input itself; target (0, 0): κ / d (4 + 1) / 2."""
    client = FedDBE(nn.Linear(2, 2), kappa=8.0).double()
    weights = torch.eye(2, dtype=torch.float64)
    with torch.no_grad():
        for tensor, value in zip(client.personal_model.parameters(), (weights, 0, 0.25)):
            tensor.copy_(torch.as_tensor(value))
    x = torch.tensor([[1.0, 0.0], [3.0, 2.0], [9.0, 9.0]], dtype=torch.float64)
    batch = Batch(x, torch.tensor([0, 1, 1]), torch.tensor([True, True, False]), torch.arange(3))
    one, zeros = torch.ones(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with client.reading({"has_mean": one, "target": zeros}):
        outputs = client.training_step(batch, 0)
    entropy = (np.log1p(np.exp(-1)) + np.log1p(np.exp(1))) / 2
    assert outputs["mean_distance"].item() == pytest.approx(1.25, abs=1e-12)
    assert outputs["loss"].item() == pytest.approx(entropy + 10, abs=1e-12)


def test_the_first_round_is_that_of_fedavg():
    data, settings = shared_out(classes([7, 3, 10])), {"local_epochs": 2}
    settings["optimizer"] = sgd(0.1, momentum=0.5, weight_decay=0.01)
    outcome = run_rounds(FedDBE(seeded(net), **settings), data, rounds=1)
    average = run_rounds(FedAvg(seeded(net), **settings), data, rounds=1)
    assert torch.equal(outcome.w[:NUMEL], average.w)
    assert not outcome.states["own"].any()


class Frozen(torch.optim.SGD):
    """Frozen: SGD that leaves vectors of five numbers, the translations, as they are."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.shape == (5,):
                parameter.grad = None
        super().step(closure)


@pytest.mark.slow
def test_without_translations_and_pull_it_is_fedavg():
    data, settings = shared_out(classes([7, 3, 10])), {"local_epochs": 2}
    client = FedDBE(
        seeded(net), kappa=0.0, optimizer=lambda params: Frozen(params, lr=0.1), **settings
    )
    outcome = run_rounds(client, data, rounds=3)
    average = run_rounds(FedAvg(seeded(net), optimizer=sgd(0.1), **settings), data, rounds=3)
    torch.testing.assert_close(outcome.w[:NUMEL], average.w, rtol=0, atol=1e-12)
    assert not outcome.states["own"].any()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pull_brings_mean_features_together():
    spreads = []
    for kappa in (0.0, 30.0):
        client = FedDBE(seeded(net), kappa=kappa, optimizer=sgd(0.1), local_epochs=2)
        result = run_rounds(client, shared_out(classes([40, 40, 40])), rounds=8)
        spreads.append(float(result.reports[-1]["train/mean_distance"]))
    assert spreads[1] < 0.5 * spreads[0]


def test_clients_with_broken_uploads_send_no_mean():
    arrays = classes([8, 4, 8])
    arrays.inputs[8:12] = torch.inf
    client = FedDBE(seeded(net), optimizer=sgd(0.1))
    broken = run_rounds(client, shared_out(arrays), rounds=1).server_states
    others = run_rounds(client, shared_out(arrays), 1, sampler=Cohorts((0, 2))).server_states
    assert broken["sent_share"] == 1
    torch.testing.assert_close(broken["mean_features"], others["mean_features"])


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [1.0, 0.5])
def test_models_that_leave_are_the_users_net(momentum):
    """Also if a mean runs; it is in no checkpoint."""
    client = FedDBE(seeded(net), mean_momentum=momentum, optimizer=sgd(0.3))
    result = trained(client, shared_out(classes([9, 7])), 3)
    assert "running_mean" not in result.client.state_dict()
    x = torch.randn(6, 4, dtype=torch.float64)
    body = [part for name, part in result.client.global_model.named_children() if name != "2"]
    head = result.client.global_model[2]
    for k, v in enumerate(result.kept["own"]):
        own = result.federation.model_of(k)
        assert own.state_dict().keys() == net().state_dict().keys()
        expected = head(nn.Sequential(*body)(x) + v)
        torch.testing.assert_close(own(x), expected, rtol=0, atol=1e-12)
        assert v.any()
    assert hasattr(result.client.personal_model[2], "translation")
    evaluator = result.federation.session.evaluation.evaluator
    (shared,) = evaluator.models(torch.tensor([0]), "global")
    assert shared.state_dict().keys() == net().state_dict().keys()


@pytest.mark.slow
def test_attackers_that_train_in_their_own_way_send_a_net():
    settings = {"attack": ConstrainedReplacement(Backdoor(target=0, size=2)), "ids": [1]}
    data = shared_out(classes([9, 7, 8]))
    outcome = run_rounds(FedDBE(seeded(net), optimizer=sgd(0.1)), data, rounds=2, **settings)
    assert outcome.w.isfinite().all()
    assert not outcome.w[NUMEL:].any()


def test_translations_never_leave_clients():
    client = FedDBE(seeded(net))
    assert client.unsent_positions.tolist() == list(range(NUMEL, NUMEL + 5))
    assert client.upload_numbers == NUMEL + 5 + 1  # the features, and the share


@pytest.mark.slow
def test_trial_before_training_accepts_convolutions():
    def convolutions():
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))

    data = shared_out(classes([6, 5], shape=(1, 4, 4)))
    outcome = run_tried_rounds(FedDBE(seeded(convolutions), optimizer=sgd(0.01)), data, rounds=2)
    assert outcome.v.isfinite().all()


@table_test(
    "arguments, match",
    [
        ({"kappa": -1.0}, "`kappa`"),
        ({"mean_momentum": 0.0}, "`mean_momentum`"),
        ({"mean_momentum": 1.5}, "`mean_momentum`"),
        ({"head": "9"}, "`head` to be a module with trainable parameters, such as 0, 2"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FedDBE(mlp(), **arguments)


def test_nets_without_a_linear_head_are_refused():
    for head in (nn.Linear(5, 3, bias=False), nn.Bilinear(5, 5, 3)):
        with pytest.raises(TypeError, match=r"trainable torch.nn.Linear with a bias but got"):
            FedDBE(nn.Sequential(nn.Linear(4, 5), head))
