"""The adapter to torchjd: with small methods by hand, and with torchjd's own on whole uploads."""

import sys

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.testing import assert_close

from pl_fed.aggregators import Mean, TorchJD
from pl_fed.clients import FedAvg
from pl_fed.types import RoundContext

METHODS = {  # name -> arguments
    "UPGrad": {},
    "CAGrad": {"c": 0.5},
    "NashMTL": {"n_tasks": 5},
    "AlignedMTL": {},
    "DualProj": {},
    "IMTLG": {},
    "MGDA": {},
    "FairGrad": {"alpha": 1.0},
}


class Equal(nn.Module):
    """Equal weights."""

    def forward(self, products):
        return torch.full((len(products),), 1 / len(products))


class Diagonal(nn.Module):
    """The relative squared lengths as weights."""

    def forward(self, products):
        return products.diagonal()


class Failing(nn.Module):
    def forward(self, products):
        raise RuntimeError("no solution")


class Answer(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, products):
        return torch.tensor(self.answer)


class Draw(nn.Module):
    def forward(self, products):
        return torch.rand(len(products))


def merge(aggregator, uploads, **context):
    context = RoundContext(**{"clients": torch.arange(len(uploads)), **context})
    return aggregator(uploads, torch.ones(len(uploads)), context)


def draw_uploads(n=5, d=20, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_uploads_are_summed_by_the_weights_of_the_method():
    uploads = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    assert merge(TorchJD(Equal()), uploads).tolist() == [0.5, 1.5]
    assert merge(TorchJD(Diagonal()), uploads).tolist() == pytest.approx([1 / 5, 27 / 5])
    assert merge(TorchJD(Diagonal()), 1e-20 * uploads).tolist() == pytest.approx([2e-21, 5.4e-20])
    assert merge(TorchJD(Equal()), torch.zeros(3, 2)).tolist() == [0.0, 0.0]


def test_weights_follow_the_clients_and_draws_the_round():
    uploads, order = draw_uploads(), torch.tensor([3, 0, 4, 1, 2])
    expected = merge(TorchJD(Draw()), uploads, seed=2, round=7)
    assert_close(merge(TorchJD(Draw()), uploads[order], clients=order, seed=2, round=7), expected)
    assert not torch.equal(merge(TorchJD(Draw()), uploads, seed=2, round=8), expected)
    before = torch.random.get_rng_state()
    merge(TorchJD(Draw()), uploads)
    assert torch.equal(torch.random.get_rng_state(), before)


@table_test(
    ("method", "message"),
    [
        (Failing(), "to weigh 2 uploads but Failing raised RuntimeError: no solution"),
        (Answer([1.0, float("nan")]), "to give 2 finite weights but Answer gave"),
        (Answer([1.0]), r"to give 2 finite weights but Answer gave \[1.0\]"),
    ],
    ids=str,
)
def test_failures_of_a_method_are_one_sentence(method, message):
    with pytest.raises(ValueError, match=f"Expected argument `method` of TorchJD {message}"):
        merge(TorchJD(method), torch.eye(2))


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"`method` to be the name of an aggregator .* but got int"):
        TorchJD(3)
    with pytest.raises(ValueError, match="`options` to be empty beside a built `method`"):
        TorchJD(Equal(), {"c": 1})


def test_missing_package_has_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(ModuleNotFoundError, match=r"package torchjd .* `pip install pl_fed\[torch"):
        TorchJD("UPGrad")


# With torchjd


def build(name):
    pytest.importorskip("torchjd")
    return TorchJD(name, METHODS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:You are solving a parameterized problem")
def test_result_equals_torchjd_on_the_whole_uploads(name):
    """The merged row is that of the method on uploads of mean squared length 1."""
    methods = pytest.importorskip("torchjd.aggregation")
    aggregator = build(name)
    for seed in range(3):
        uploads = draw_uploads(seed=seed)
        uploads[0] *= -3
        unit = uploads.square().sum(1).mean().sqrt()
        expected = getattr(methods, name)(**METHODS[name])(uploads / unit) * unit
        merged = merge(aggregator, uploads)  # again: no state of the round before
        assert_close(merged, expected, rtol=1e-5, atol=1e-7)
        assert_close(merge(aggregator, uploads), merged, rtol=0, atol=0)


@pytest.mark.slow
def test_upgrad_equals_its_projections_by_scipy():
    """Each update is projected onto the cone of directions that hurt none; then the mean."""
    pytest.importorskip("torchjd")
    for seed in range(3):
        uploads = draw_uploads(4, 6, seed)
        uploads[0] = -uploads[1] + 0.3 * uploads[0]
        rows = uploads.numpy()
        projected = [
            minimize(
                lambda x, row=row: ((x - row) ** 2).sum() / 2,
                row,
                jac=lambda x, row=row: x - row,
                constraints={"type": "ineq", "fun": rows.dot, "jac": lambda x, rows=rows: rows},
                method="SLSQP",
                options={"ftol": 1e-14, "maxiter": 500},
            ).x
            for row in rows
        ]
        merged = merge(TorchJD("UPGrad"), uploads).numpy()
        np.testing.assert_allclose(merged, np.mean(projected, 0), atol=2e-3)  # torchjd's ridge
        assert (rows @ merged > -1e-3).all()


@pytest.mark.slow
def test_wrong_names_and_options_are_refused():
    pytest.importorskip("torchjd")
    with pytest.raises(ValueError, match=r"`method` to be one of .*UPGrad.* but got 'Upgrad'"):
        TorchJD("Upgrad")
    with pytest.raises(ValueError, match=r"but got 'ExcessMTL'"):
        TorchJD("ExcessMTL")
    with pytest.raises(ValueError, match=r"`options` to be arguments of CAGrad of torchjd but got"):
        TorchJD("CAGrad", {"radius": 1.0})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_upgrad_lowers_the_worst_loss_of_the_mean():
    """The client with inverted labels has a lower loss than under the mean."""
    arrays = classes([10, 10, 10, 10], num_classes=2)
    labels = (arrays.inputs[:, 0] > 0).long()
    arrays.targets[:] = torch.where(arrays.client == 3, 1 - labels, labels)

    def worst_loss(aggregator):
        client = FedAvg(seeded(lambda: mlp(num_classes=2)), optimizer=sgd(0.2), local_steps=1)
        data = shared_out(arrays, batch_size=10)
        row = run_rounds(client, data, 40, aggregator=aggregator).w
        net = seeded(lambda: mlp(num_classes=2)).double()
        torch.nn.utils.vector_to_parameters(row, net.parameters())
        outputs = net(arrays.inputs.double())
        losses = nn.functional.cross_entropy(outputs, arrays.targets, reduction="none")
        return max(losses[arrays.client == k].mean().item() for k in range(4))

    assert worst_loss(build("UPGrad")) < 0.95 * worst_loss(Mean())
