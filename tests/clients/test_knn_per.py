"""kNN-Per against NumPy: stores, distances, shares, the choice of λ, and the mixed predictions."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained
from small_federations import (
    Cohorts,
    HalfSquares,
    classes,
    mlp,
    points,
    run_rounds,
    run_tried_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed import Federation
from pl_fed.clients import FedAvg, KNNPer
from pl_fed.clients.knn_per import neighbor_shares
from pl_fed.samplers import All

SIZES = [80, 3, 50, 25]  # client 1 has no validation samples, and fewer training samples than k
FRACTIONS = {"val_fraction": 0.15, "test_fraction": 0.3}


def local_rules(seed=0):
    """Return data whose classes follow another rule for each client, except for every tenth."""
    arrays = classes(SIZES, seed=seed)
    ruled = ((arrays.inputs[:, 0] > 0).long() + arrays.client) % 3
    arrays.targets[:] = torch.where(torch.arange(sum(SIZES)) % 10 > 0, ruled, arrays.targets)
    return shared_out(arrays, **FRACTIONS)


def make(**settings):
    return KNNPer(seeded(mlp), **{"optimizer": sgd(0.3), "local_epochs": 2, **settings})


def evaluate_test(result):
    """Return each client's numbers of the personal model on its test data."""
    clients = torch.arange(len(SIZES))
    with torch.inference_mode():
        result.federation.evaluate("test", clients)
    return result.federation.metrics("test")["personal"]


def split(row):
    return row[:20].reshape(5, 4), row[20:25], row[25:40].reshape(3, 5), row[40:]


def mix(w, store, labels, x, lam, neighbors, scale):
    """Return the mixed probabilities of samples, [samples, classes], sample by sample."""
    body, bias, weights, offsets = split(w)

    def features_of(samples):
        return np.tanh(samples @ body.T + bias)

    logits = features_of(x) @ weights.T + offsets
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shares = np.zeros_like(softmax)
    for sample, features in enumerate(features_of(x)):
        distances = np.sqrt(np.square(features_of(store) - features).sum(1))
        nearest = np.argsort(distances)[:neighbors]
        for entry in nearest:
            shares[sample, labels[entry]] += np.exp(-distances[entry] / scale)
        shares[sample] /= shares[sample].sum()
    return (1 - lam) * softmax + lam * shares


def samples_of(data, client, part):
    index = data.clients.part(part).samples(client)
    return data.clients.inputs[index].double().numpy(), data.clients.targets[index].numpy()


def choose(w, data, client, lams, lam, neighbors, scale):
    """Return the first λ with the most correct predictions on the validation data."""
    x, y = samples_of(data, client, "val")
    if not len(y):
        return lam
    store = samples_of(data, client, "train")
    correct = [(mix(w, *store, x, at, neighbors, scale).argmax(1) == y).sum() for at in lams]
    return lams[int(np.argmax(correct))]


@exhaustive_but("one_by_one")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_evaluations_equal_numpy(engine):
    lams, chosen = [place / 10 for place in range(11)], set()
    for seed, neighbors, scale in ((0, 10, 1.0), (1, 3, 0.3), (2, 1, 1.0), (3, 10, 0.05)):
        data = local_rules(seed)
        assert data.clients.val.sizes[1] == 0
        client = make(neighbors=neighbors, scale=scale, lam=0.45)
        result = trained(client, data, engine=engine)
        session, stacks = result.federation.session, engine == "stacked"
        session.states._find_own_samples().stacks = stacks
        session.evaluation.evaluator.runner.stacked = stacks
        metrics, w = evaluate_test(result), result.w.numpy()
        assert session.states._find_own_samples().stacks == stacks
        for k in range(len(SIZES)):
            store, (x, y) = samples_of(data, k, "train"), samples_of(data, k, "test")
            lam = choose(w, data, k, lams, 0.45, neighbors, scale)
            chosen.add(lam)
            p = mix(w, *store, x, lam, neighbors, scale)
            loss = -np.log(np.maximum(p[np.arange(len(y)), y], 1e-30)).sum()
            assert float(metrics.loss_sum[k]) == pytest.approx(loss, rel=1e-9)
            assert int(metrics.correct[k].sum()) == (p.argmax(1) == y).sum()
    assert len(chosen) > 3
    assert {0.45} < chosen


def test_shares_have_the_values_by_hand():
    features = torch.tensor([[0, 0], [1, 0], [0, 2]], dtype=torch.float64)
    labels, query = torch.tensor([0, 1, 1]), torch.tensor([[0.2, 0.5]], dtype=torch.float64)
    stored = torch.ones(3, dtype=torch.bool)
    shares = neighbor_shares(query, features, labels, stored, neighbors=2, num_classes=2)
    expected = torch.tensor([[0.5998599577, 0.4001400423]], dtype=torch.float64)
    torch.testing.assert_close(shares, expected, rtol=0, atol=1e-10)
    alone = neighbor_shares(query, features, labels, labels == 0, neighbors=2, num_classes=2)
    assert alone.tolist() == [[1.0, 0.0]]
    nothing = neighbor_shares(query, features, labels, ~stored, neighbors=2, num_classes=2)
    assert nothing.tolist() == [[0.0, 0.0]]
    far = neighbor_shares(1e5 + query, features, labels, stored, neighbors=9, num_classes=2)
    torch.testing.assert_close(far.sum(1), torch.ones(1, dtype=torch.float64))


def test_of_equally_near_samples_the_first_count_for_any_padding():
    """Features of whole numbers have many ties; a stack pads a client to the largest one."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randint(2, (40, 3), generator=draw).float()
    labels, queries = torch.randint(3, (40,), generator=draw), features[:8] + 0.25
    squares = (queries[:, None] - features).square().sum(2)
    nearest = np.argsort(squares.numpy().round(6), axis=1, kind="stable")[:, :5]
    weights = np.exp(-np.sqrt(np.take_along_axis(squares.numpy(), nearest, 1)))
    expected = np.stack([(weights * (labels.numpy()[nearest] == c)).sum(1) for c in range(3)], 1)
    expected /= expected.sum(1, keepdims=True)
    for padding in (0, 1, 24, 1000):
        shares = neighbor_shares(
            queries,
            torch.cat([features, torch.zeros(padding, 3)]),
            torch.cat([labels, torch.zeros(padding, dtype=torch.int64)]),
            is_stored=torch.arange(40 + padding) < 40,
            neighbors=5,
            num_classes=3,
        )
        np.testing.assert_allclose(shares.numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_global_model_is_that_of_fedavg_and_lambda_0_predicts_by_it():
    data = local_rules()
    plain = trained(FedAvg(seeded(mlp), optimizer=sgd(0.3), local_epochs=2), data)
    for engine in ("one_by_one", "stacked"):
        result = trained(make(lams=[], lam=0.0), data, engine=engine)
        torch.testing.assert_close(result.w, plain.w, rtol=0, atol=1e-12)
        losses = [result.metrics[model]["loss"] for model in ("global", "personal")]
        torch.testing.assert_close(*losses, equal_nan=True)
        assert result.kept == {}


@pytest.mark.slow
def test_nearest_own_sample_alone_remembers_the_training_data():
    data = local_rules()
    object.__setattr__(data.clients, "val", data.clients.train)
    result = trained(make(neighbors=1), data)
    assert result.metrics["personal"]["accuracy"].tolist() == [1.0] * 4
    assert (result.metrics["global"]["accuracy"] < 1).any()


@pytest.mark.slow
def test_a_client_that_never_trained_predicts_by_its_samples_too():
    data = local_rules()
    result = trained(make(lams=[], lam=1.0), data, sampler=Cohorts((0, 1)))
    losses = [result.metrics[model]["loss"] for model in ("global", "personal")]
    assert not torch.isclose(losses[0][2:], losses[1][2:]).any()


def test_a_client_s_own_predictions_are_no_net_that_python_could_get():
    federation = Federation(All(), seed=0)
    client = make()
    federation.setup(client, local_rules(), "test")
    for model in (None, "personal"):
        with pytest.raises(ValueError, match=r"`model` to be global for KNNPer, which predicts by"):
            federation.model_of(1, model)
    net = federation.model_of(1, "global")
    assert torch.equal(next(net.parameters()), next(client.global_model.parameters()))


class Unseen(nn.Module):
    """Unseen: a net that changes the outputs of its last layer."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return 2 * self.net(x)


@pytest.mark.slow
def test_net_without_a_head_is_refused_before_training():
    client = KNNPer(seeded(Unseen), optimizer=sgd())
    with pytest.raises(ValueError, match=r"Expected argument `net` to call its head 'net\.2' once"):
        run_tried_rounds(client, shared_out(classes(SIZES)), rounds=0)


@pytest.mark.slow
def test_data_without_classes_are_refused():
    client = KNNPer(seeded(lambda: mlp(inputs=1, num_classes=1)), criterion=HalfSquares())
    with pytest.raises(ValueError, match="Expected one class id for each sample for KNNPer"):
        run_rounds(client, shared_out(points([1.0, 2.0], [3.0])), rounds=0)


@table_test(
    "arguments, match",
    [
        ({"neighbors": 0}, "`neighbors`"),
        ({"lams": [0.5, 1.5]}, "`lams`"),
        ({"lam": -0.1}, "`lam`"),
        ({"scale": 0.0}, "`scale`"),
        ({"head": "9"}, "argument `head` to be a module with trainable"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        KNNPer(mlp(), **arguments)
