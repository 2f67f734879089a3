"""DeepSight: small numbers by hand, the steps in numpy on a net, and rounds of a federation."""

import copy

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import HDBSCAN
from small_federations import classes, mlp, reals, run_rounds, seeded, sgd, shared_out
from torch import nn
from torch.testing import assert_close

from pl_fed.aggregators import Bucketing, Chain, DeepSight
from pl_fed.aggregators.deep_sight import find_suspicious, normalize_energies
from pl_fed.clients import FedAvg, FedRep
from pl_fed.nets.rows import RowLayout
from pl_fed.random import generator
from pl_fed.types import RoundContext

BIASES = torch.tensor(
    [[0.1, 0.1, 0], [0.1, 0.1, 0.1], [0.02, 0.02, 0.3], [0.1, 0, 0.1]], dtype=torch.float64
)
WEIGHTS = torch.tensor(
    [
        [[0.1, -0.1], [0.2, 0.1], [0.1, 0]],
        [[0.1, 0.1], [0.1, -0.2], [0.1, 0]],
        [[0, 0.05], [0.05, 0], [0.9, -0.8]],
        [[0.2, 0], [0.1, 0.1], [0.15, 0]],
    ],
    dtype=torch.float64,
)


class Model:
    """A small net, its context, and the nets of uploads."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.layout = RowLayout.from_parameters(self.net)
        self.broadcast = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self.rejected = []

    def copy(self, update=None):
        net = copy.deepcopy(self.net)
        if update is not None:
            nn.utils.vector_to_parameters(self.broadcast + update, net.parameters())
        return net

    def context(self, n, **fields):
        defaults = {
            "seed": 2,
            "round": 4,
            "clients": torch.arange(n),
            "broadcast": self.broadcast,
            "layout": self.layout,
            "net": self.copy,
            "inputs": torch.empty(0, 4, dtype=torch.float64),
            "reject": lambda clients: self.rejected.extend(clients.tolist()),
        }
        return RoundContext(**defaults | fields)

    def uploads(self, seed, n=14, hostile=4):
        """Benign updates near a common one; the last ones train only class 0."""
        draw = torch.Generator().manual_seed(seed)
        d = self.layout.numel
        rows = torch.randn(d, generator=draw).double() + 0.3 * torch.randn(n, d, generator=draw)
        views = self.layout.views(rows)
        views["2.weight"][n - hostile :, 1:] *= 0.01
        views["2.bias"][n - hostile :, 1:] *= 0.01
        views["2.weight"][n - hostile :, 0] = 1 + 0.05 * torch.rand(hostile, 6, generator=draw)
        return rows * torch.linspace(0.5, 1.5, n)[torch.randperm(n, generator=draw), None]


def cluster(values, smallest, **options):
    neighbours = smallest + 1  # scikit-learn counts the point itself
    labels = HDBSCAN(min_cluster_size=smallest, min_samples=neighbours, copy=True, **options)
    return labels.fit(values).labels_


def apart(labels):
    n = len(labels)
    return np.array(
        [[float(i != j and (labels[i] != labels[j] or labels[i] < 0)) for j in range(n)]
         for i in range(n)]
    )  # fmt: skip


def accept_by_numpy(model, uploads, num_inputs, smallest):
    """The steps of the paper, client by client, with one set of inputs in one batch."""
    views = {name: view.numpy() for name, view in model.layout.views(uploads).items()}
    energies = np.abs(views["2.bias"]) + np.abs(views["2.weight"]).sum(2)
    shares = energies**2 / (energies**2).sum(1, keepdims=True)
    exceedings = np.array([(row > max(0.01, 1 / 3) * row.max()).sum() for row in shares])
    suspicious = exceedings <= np.median(exceedings) / 2
    cosines = squareform(pdist(views["2.bias"], "cosine"))
    by_bias = apart(cluster(cosines, smallest, metric="precomputed"))
    distances = [by_bias, apart(cluster(shares, smallest))]
    by_set = []
    for number in range(3):
        inputs = torch.rand(num_inputs, 4, generator=generator(2, "deepsight", 4, number)).double()
        expected = model.copy()(inputs).softmax(1)
        ratios = [(model.copy(row)(inputs).softmax(1) / expected).mean(0) for row in uploads]
        by_set.append(apart(cluster(torch.stack(ratios).detach().numpy(), smallest)))
    distances.append(np.mean(by_set, axis=0))
    groups = cluster(
        np.mean(distances, axis=0), smallest, metric="precomputed", allow_single_cluster=True
    )
    return np.array([g >= 0 and suspicious[groups == g].mean() < 1 / 3 for g in groups]), suspicious


def test_shares_and_suspicion_equal_the_hand_computed_example():
    energies = BIASES.abs() + WEIGHTS.abs().sum(2)
    shares = normalize_energies(energies)
    expected = [
        [0.346154, 0.615385, 0.038462],
        [0.310345, 0.551724, 0.137931],
        [0.001222, 0.001222, 0.997556],
        [0.467532, 0.207792, 0.324675],
    ]
    assert_close(shares, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    assert find_suspicious(shares).tolist() == [False, False, True, False]


def test_degenerate_energies():
    energies = torch.tensor([[0.0, 0], [1e300, 1e300], [torch.inf, 1]], dtype=torch.float64)
    shares = normalize_energies(energies)
    assert shares.tolist() == [[0, 0], [0.5, 0.5], [0, 0]]
    assert find_suspicious(torch.tensor([[0.0, 0], [0.4, 0.6], [0.5, 0.5]])).tolist() == [
        *(True, False, False)
    ]
    assert not find_suspicious(torch.zeros(3, 4)).any()
    assert not find_suspicious(torch.ones(3, 1)).any()


@pytest.mark.slow
def test_result_equals_the_steps_in_numpy():
    numbers_accepted, numbers_suspicious = set(), set()
    for seed in range(8):
        model = Model(seed)
        uploads = model.uploads(seed)
        accepted, suspicious = accept_by_numpy(model, uploads, 300, 5)
        norms = uploads.norm(dim=1).numpy()
        clipped = uploads.numpy() * np.minimum(1, np.median(norms) / norms)[:, None]
        expected = clipped[accepted].mean(0) if accepted.any() else 0 * clipped[0]
        merged = DeepSight(num_inputs=300)(uploads, torch.ones(14), model.context(14))
        assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
        assert model.rejected == np.flatnonzero(~accepted).tolist()
        numbers_accepted.add(int(accepted.sum()))
        numbers_suspicious.add(int(suspicious.sum()))
    assert len(numbers_accepted) > 1, "the inputs should not have one answer"
    assert 4 in numbers_suspicious


def test_result_does_not_depend_on_the_order_of_rows_or_on_batches():
    model = Model()
    uploads, order = model.uploads(0), torch.randperm(14, generator=torch.manual_seed(0))
    expected = DeepSight(num_inputs=1100)(uploads, torch.ones(14), model.context(14))
    now = model.context(14, clients=order)
    merged = DeepSight(num_inputs=1100)(uploads[order], torch.ones(14), now)
    assert_close(merged, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_hostile_models_give_finite_results():
    model = Model()
    for value in (1e30, -1e38, 1e300, 0.0):
        uploads = model.uploads(0)
        uploads[12:] = value
        merged = DeepSight(num_inputs=20)(uploads, torch.ones(14), model.context(14))
        assert merged.isfinite().all()
        assert merged.norm() <= uploads[:12].norm(dim=1).max()


@pytest.mark.slow
def test_small_cohorts_and_equal_rows():
    model = Model()
    for n in (1, 2, 3, 4, 9):
        row = torch.linspace(-1, 1, model.layout.numel).double()
        merged = DeepSight(num_inputs=20)(row.repeat(n, 1), torch.ones(n), model.context(n))
        assert_close(merged, row)
        zeros = torch.zeros(n, len(row)).double()
        assert not DeepSight(num_inputs=20)(zeros, torch.ones(n), model.context(n)).any()


@pytest.mark.parametrize("algorithm", [FedAvg, FedRep])
@pytest.mark.slow
def test_rounds_of_a_federation(algorithm):
    client = algorithm(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    data = shared_out(classes([9, 8, 7, 9, 8, 7]))
    outcome = run_rounds(client, data, 2, aggregator=DeepSight(num_inputs=50))
    assert outcome.reports[-1]["train/dropped"] < 6
    assert outcome.reports[-1]["train/update_norm"] > 0


def test_nets_and_inputs_that_do_not_fit_are_refused():
    model, aggregator = Model(), DeepSight(num_inputs=20)
    uploads, ones = model.uploads(0), torch.ones(14)
    cases = {
        r"`context.layout` .* but got None": {"layout": None},
        r"`net` to end with a linear layer for DeepSight": {
            "layout": RowLayout.from_parameters(nn.Conv2d(1, 1, 1))
        },
        r"linear layer with a bias for DeepSight but got weight without": {
            "layout": RowLayout.from_parameters(nn.Linear(15, 3, bias=False))
        },
        r"`data` to have one tensor .* but got torch.int64": {
            "inputs": torch.empty(0, 4, dtype=torch.int64)
        },
        r"`data` to have one tensor .* but got dict": {"inputs": {"ids": torch.empty(0, 4)}},
        r"`context.net` and `context.inputs` .* but got None": {"net": None},
        r"`net` to return outputs \[batch, classes\]": {
            "net": lambda update=None: lambda inputs: inputs[:, 0]
        },
    }
    for words, fields in cases.items():
        with pytest.raises(ValueError, match=words):
            aggregator(uploads, ones, model.context(14, **fields))
    with pytest.raises(ValueError, match="argument `min_cluster_size`"):
        DeepSight(min_cluster_size=1)


def test_refusal_comes_before_training():
    client = FedAvg(seeded(lambda: nn.Sequential(nn.Linear(4, 3, bias=False))), optimizer=sgd())
    with pytest.raises(ValueError, match=r"a bias for DeepSight but got 0\.weight"):
        run_rounds(client, shared_out(classes([5, 5, 5])), 0, aggregator=DeepSight())


def test_net_with_one_output_gets_a_warning():
    """The softmax of one output is 1, so that all models look alike."""
    client = FedAvg(seeded(lambda: nn.Linear(4, 1)), criterion=nn.MSELoss(), optimizer=sgd())
    data = shared_out(reals(torch.randn(15, 4), torch.randn(15, 1), [0, 1, 2] * 5))
    with pytest.warns(UserWarning, match="DeepSight compares the scores of classes, but weight"):
        run_rounds(client, data, 1, aggregator=DeepSight(num_inputs=20))


class StepsAlone(LightningModule):
    """A module without a ``forward``, as the first page of pl_fed shows one."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_module_without_a_forward_is_refused_before_training():
    client = FedAvg(seeded(StepsAlone), optimizer=sgd())
    with pytest.raises(ValueError, match=r"for DeepSight but its `forward` failed: .*StepsAlone"):
        run_rounds(client, shared_out(classes([5, 5, 5])), 0, aggregator=DeepSight())


def test_buckets_work():
    model = Model()
    chain = Chain([Bucketing()], DeepSight(num_inputs=20))
    assert chain(model.uploads(0), torch.ones(14), model.context(14)).isfinite().all()
