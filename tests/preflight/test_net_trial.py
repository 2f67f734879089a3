"""What is looked at before training, and after each round."""

import math
import re
import warnings

import pytest
import torch
from small_federations import classes, mlp, reals, sections, seeded, sgd, shared_out
from torch import nn

from pl_fed import Adversary, Federation, StorageOptions, clients
from pl_fed.aggregators import MDA, Clipping, GeometricMedian, Mean
from pl_fed.attacks import SameValue
from pl_fed.clients import Ditto
from pl_fed.data import Arrays, DataSource, FederatedData
from pl_fed.models import MLP
from pl_fed.nets.rows import finite_rows
from pl_fed.partitioners import IID
from pl_fed.preflight.net_trial import find_net_facts
from pl_fed.preflight.trial import Trial
from pl_fed.rounds.broken_clients import NonFiniteLossError, check_broken_share
from pl_fed.rounds.byzantine_clients import draw_byzantine, mark_byzantine
from pl_fed.rounds.trained_cohort import UploadStatus
from pl_fed.samplers import All

DATA = shared_out(classes([5, 8, 4]))
MEANS = {
    "FedADMM": {},
    "FLAME": {},
    "L2SGD": {},
    "LpProj": {"dimensions": 2},
    "MeanRegularized": {},
    "Mocha": {},
}

# A global model that is the mean of what clients keep


def set_up(name, arguments, *defence, **settings):
    client = getattr(clients, name)(seeded(mlp), **arguments)
    Federation(All(), *defence, seed=0, **sections(**settings)).setup(client, DATA, "fit")


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


@pytest.mark.parametrize(("name", "arguments"), MEANS.items())
@pytest.mark.parametrize("first", [[], [Clipping()]])
@pytest.mark.parametrize("then", [Mean, GeometricMedian])
def test_mean_over_all_clients_refuses_weighting_by_samples(name, arguments, first, then):
    match = f"`weighting` of {then.__name__} to be 'uniform' for {name}, .* but got 'samples'"
    with pytest.raises(ValueError, match=match):
        set_up(name, arguments, then(weighting="samples"), pre_aggregators=first)
    set_up(name, arguments, then(), pre_aggregators=first)


@pytest.mark.parametrize(("name", "arguments"), MEANS.items())
def test_mean_over_all_clients_warns_of_another_server_optimizer(name, arguments):
    match = f"The global model of {name} is the mean over all clients only if"
    others = [adam, sgd(0.5), sgd(1.0, momentum=0.9), sgd(1.0, weight_decay=0.1)]
    for optimizer in others:
        with pytest.warns(UserWarning, match=match):
            set_up(name, arguments, server_optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is the mean over all clients only.*")
        set_up(name, arguments)
        set_up("FedAvg", {}, Mean("samples"), server_optimizer=adam)
        set_up("MeanRegularized", {"mean": "cohort"}, server_optimizer=adam)


def test_too_many_byzantine_clients_for_an_aggregator_are_refused_before_training():
    federation = Federation(All(), MDA(), adversary=Adversary(expected=21), seed=0)
    with pytest.raises(ValueError, match="`num_byzantine` to be at most 20 for MDA"):
        federation.setup(clients.FedAvg(seeded(mlp)), shared_out(classes([1] * 43)), "fit")


# Byzantine clients


def test_warning_if_the_fraction_rounds_to_no_client():
    with pytest.warns(
        UserWarning, match=r"No client is Byzantine: `federation.adversary.fraction` = 0.1"
    ):
        set_up("FedAvg", {}, fraction=0.1, attack=SameValue())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*No client is Byzantine.*")
        set_up("FedAvg", {}, fraction=0.4, attack=SameValue())
        set_up("FedAvg", {}, fraction=0.0)


@pytest.mark.parametrize("nobody", [{}, {"fraction": 0.0}, {"fraction": 0}, {"ids": []}])
def test_warning_if_an_attack_has_no_byzantine_client(nobody):
    with pytest.warns(UserWarning, match="No client is Byzantine, so SameValue does nothing: set"):
        set_up("FedAvg", {}, attack=SameValue(), **nobody)


TARGETS = {
    "one real number": (torch.randn(6, 1), 1),
    "several": (torch.randn(6, 3).abs(), 3),
    "labels": (torch.tensor([[1.0, 1.0, 0.0]] * 6), 3),
}


@pytest.mark.parametrize("targets", TARGETS)
def test_real_valued_targets_need_a_criterion(targets):
    """The cross entropy of one output is always 0."""
    y, width = TARGETS[targets]
    data = shared_out(reals(torch.randn(6, 4), y, [0, 0, 0, 1, 1, 1]))
    federation = Federation(All(), seed=0)
    client = clients.FedAvg(torch.nn.Linear(4, width))
    with pytest.raises(ValueError, match="`criterion` to be a loss of real-valued targets, as tor"):
        federation.setup(client, data, "fit")


def test_class_probabilities_are_accepted_as_targets():
    y = torch.rand(6, 3).softmax(1)
    data = shared_out(reals(torch.randn(6, 4), y, [0, 0, 0, 1, 1, 1]))
    Federation(All(), seed=0).setup(clients.FedAvg(torch.nn.Linear(4, 3)), data, "fit")


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [(0, 10, 0), (0.2, 10, 2), (0.29, 10, 2), (1, 7, 7), (0.05, 10, 0), (0.7, 10, 7), (0.3, 10, 3)],
)
def test_fraction_is_rounded_down(fraction, clients, expected):
    assert int(draw_byzantine(fraction, clients, seed=0).sum()) == expected


def test_rounding_of_the_fraction_loses_no_byzantine_client():
    for num_clients in range(1, 101):
        for count in range(num_clients + 1):
            draw = draw_byzantine(count / num_clients, num_clients, seed=0)
            assert int(draw.sum()) == count, (count, num_clients)


def test_seed_draws_the_byzantine_clients():
    def draw(seed):
        return draw_byzantine(0.3, 50, seed).nonzero().flatten().tolist()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    clients = {client for seed in range(60) for client in draw(seed)}
    assert clients == set(range(50)), "everybody's turn comes"


def test_more_byzantine_clients_include_fewer():
    """Attacks of different strength are comparable."""
    few, many = draw_byzantine(0.2, 50, 3), draw_byzantine(0.6, 50, 3)
    assert bool(many[few].all())


def test_listed_ids_are_byzantine():
    assert mark_byzantine([4, 0], 5).tolist() == [True, False, False, False, True]
    assert mark_byzantine([], 3).tolist() == [False] * 3


@pytest.mark.parametrize("ids", [[5], [-1], [0, 9, 2]])
def test_unknown_ids_are_refused(ids):
    with pytest.raises(ValueError, match=r"adversary.ids` to be client ids from 0 to 4 but got \["):
        mark_byzantine(ids, 5)


# How much memory states may take


@pytest.mark.parametrize("memory", [0, 1, 10**12, 0.001, 1.0])
def test_budget_is_a_share_or_bytes(memory):
    assert StorageOptions(memory=memory).memory == memory


@pytest.mark.parametrize("memory", [-1, 0.0, -0.5, 1.5, 1e9, math.nan])
def test_budget_out_of_range_is_refused(memory):
    words = (
        rf"storage.memory` to be a share in \(0, 1\] or a number of bytes \(int\) but got {memory}"
    )
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        StorageOptions(memory=memory)


@pytest.mark.parametrize("memory", ["8GB", None, True])
def test_budget_of_another_type_is_refused(memory):
    with pytest.raises(
        TypeError, match=f"`federation.storage.memory` to be a share .* but got {memory!r}"
    ):
        StorageOptions(memory=memory)


# Whether the net fits the data


class ArraySource(DataSource):
    """Arrays made by a test."""

    def __init__(self, arrays):
        self.arrays = arrays

    def load(self):
        return self.arrays


def try_net(client, data):
    client.choose_task(data.targets, data.num_classes)
    find_net_facts(Trial(client, data))


def make_clients(x, y, num_classes):
    source = ArraySource(Arrays(x, y, num_classes=num_classes))
    return FederatedData(source, IID(), 2, seed=0).clients


@pytest.fixture
def pictures():
    return make_clients(torch.rand(20, 1, 4, 4), torch.arange(20) % 3, 3)


def test_matching_net_is_accepted(pictures):
    client = Ditto(MLP(16, [], 3))
    client.train()
    try_net(client, pictures)
    assert client.training, "the mode is put back"


def test_matching_net_is_accepted_with_a_single_sample():
    data = make_clients(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]), 3)
    try_net(Ditto(MLP(16, [], 3)), data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_net_of_half_precision_is_refused(pictures, dtype):
    with pytest.raises(ValueError, match=f"of float32 or float64 but got {dtype}: small steps"):
        try_net(Ditto(MLP(16, [], 3).to(dtype)), pictures)


def test_check_leaves_the_client_unchanged(pictures):
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    client = Ditto(net)
    before = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    try_net(client, pictures)
    assert all(torch.equal(before[name], now) for name, now in client.state_dict().items())
    assert all(parameter.grad is None for parameter in client.parameters())


def test_net_in_double_precision_is_accepted(pictures):
    try_net(Ditto(MLP(16, [], 3).double()), pictures)


class Tuple(MLP):
    def forward(self, x):
        return super().forward(x), x


class TwoArguments(MLP):
    def forward(self, x, y):
        return super().forward(x)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (MLP(16, [], 4), r"3 classes, shape \[batch, 3\], but got \[2, 4\] for 2 samples"),
        (
            MLP(15, [], 3),
            r"inputs of shape \[1, 4, 4\] \(torch.float32\) but MLP failed: .*cannot be multiplied",
        ),
        (nn.Linear(4, 3), r"shape \[batch, 3\], but got \[2, 1, 4, 3\]"),
        (Tuple(16, [], 3), "`net` to return a tensor but got tuple"),
        (TwoArguments(16, [], 3), "TwoArguments failed: .*missing 1 required positional argument"),
        (nn.Conv2d(3, 3, 1), "Conv2d failed: .*channels"),
    ],
)
def test_mismatched_net_is_refused(pictures, net, words):
    client = Ditto(net)
    client.train()
    with pytest.raises(ValueError, match=words) as failed:
        try_net(client, pictures)
    assert str(failed.value).startswith("Expected argument `net` to ")
    assert "\n" not in str(failed.value)
    assert client.training


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 2)])
def test_real_targets_are_accepted(shape):
    data = make_clients(torch.rand(20, 4), torch.rand(shape), 0)
    width = shape[1] if len(shape) > 1 else 1
    net = nn.Linear(4, width) if len(shape) > 1 else nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    try_net(Ditto(net, criterion=nn.MSELoss()), data)
    try_net(Ditto(net.double(), criterion=nn.MSELoss()), data)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_class_ids_that_broadcast_over_outputs_are_refused():
    """Outputs [2, 2] and class ids [2] broadcast in a batch of two, and in no other."""
    data = make_clients(torch.rand(20, 4), torch.arange(20) % 2, 2)
    words = "`criterion` to take outputs of shape [3, 2] and targets of shape [3] (torch.int64) but"
    with pytest.raises(ValueError, match=re.escape(words)):
        try_net(Ditto(nn.Linear(4, 2), criterion=nn.MSELoss()), data)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("criterion", [nn.MSELoss, nn.SmoothL1Loss, nn.PoissonNLLLoss])
@pytest.mark.parametrize(("shape", "wide"), [((20,), True), ((20, 1), False)])
def test_outputs_that_broadcast_over_targets_are_refused(criterion, shape, wide):
    """Shapes [2, 1] and [2] broadcast to all pairs."""
    net = nn.Linear(4, 1) if wide else nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    data = make_clients(torch.rand(20, 4), torch.rand(shape), 0)
    shapes = ("[2]", "[2, 1]") if wide else ("[2, 1]", "[2]")
    words = f"`net` to return outputs of the targets' shape {shapes[0]} but got {shapes[1]}"
    with pytest.raises(ValueError, match=re.escape(words)):
        try_net(Ditto(net, criterion=criterion()), data)


class Gaussian(nn.Module):
    """The likelihood of a target by a mean and the logarithm of a variance."""

    def forward(self, outputs, targets):
        mean, log_var = outputs.unbind(1)
        losses = (log_var + (targets - mean) ** 2 / log_var.exp()) / 2
        return losses if self.reduction == "none" else losses.mean()

    reduction = "mean"


def test_criterion_may_take_several_outputs_per_target():
    data = make_clients(torch.rand(20, 4), torch.rand(20), 0)
    try_net(Ditto(nn.Linear(4, 2), criterion=Gaussian()), data)


def test_real_targets_are_cast_to_the_dtype_of_the_net():
    data = make_clients(torch.rand(20, 4), torch.rand(20, 2), 0)
    net = nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()).double()
    try_net(Ditto(net, criterion=nn.BCELoss()), data)  # it takes one dtype only


def test_criterion_that_fails_on_the_targets_is_refused():
    data = make_clients(torch.rand(20, 4), torch.rand(20), 0)
    with pytest.raises(
        ValueError,
        match=r"`criterion` .* shape \[2, 3\] .* shape \[2\] \(torch.float32, where class ids are"
        r" integers\) but Cross",
    ):
        try_net(Ditto(nn.Linear(4, 3)), data)


# Broken uploads


def broken_check(losses, rows, byzantine=(), max_share=0.0, misshapen=()):
    is_byzantine = torch.zeros(6, dtype=torch.bool)
    is_byzantine[list(byzantine)] = True
    clients = torch.tensor([5, 0, 3])
    losses, finite = torch.tensor(losses), finite_rows(torch.tensor(rows))
    sent = torch.where(finite & losses.isfinite(), UploadStatus.VALID, UploadStatus.NOT_FINITE)
    sent[list(misshapen)] = UploadStatus.MALFORMED
    return check_broken_share(sent, ~is_byzantine[clients], losses, clients, 7, max_share)


GOOD_ROWS = [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("max_share", "raises"), [(0.0, True), (0.3, True), (0.34, False), (1, False)]
)
def test_allowed_share_of_broken_uploads(max_share, raises):
    if raises:
        with pytest.raises(NonFiniteLossError, match="client 0 got a loss of nan: "):
            broken_check([1.0, math.nan, 3.0], GOOD_ROWS, max_share=max_share)
    else:
        assert broken_check([1.0, math.nan, 3.0], GOOD_ROWS, max_share=max_share) == 1


def test_error_names_one_broken_client_and_counts_the_others():
    match = "client 5 got a loss of nan, as did 1 more of 3: "
    with pytest.raises(NonFiniteLossError, match=match):
        broken_check([math.nan, 1.0, math.inf], GOOD_ROWS, max_share=0.5)


def test_error_distinguishes_wrong_length_from_divergence():
    with pytest.raises(NonFiniteLossError, match="client 3 got rows of another kind or length"):
        broken_check([1.0, 2.0, 3.0], GOOD_ROWS, misshapen=[2])


def test_finite_uploads_are_accepted():
    broken_check([1.0, 3e38, 0.0], GOOD_ROWS)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_error_of_a_broken_loss_names_round_client_and_cause(loss):
    with pytest.raises(
        NonFiniteLossError, match=rf"in round 7 client 3 got a loss of {loss}: .* learning rate"
    ):
        broken_check([1.0, 2.0, loss], GOOD_ROWS)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_broken_model_with_a_finite_loss_is_an_error(number):
    with pytest.raises(
        NonFiniteLossError, match="in round 7 client 0 got a model with NaN or infinity"
    ):
        broken_check([1.0, 2.0, 3.0], [[1.0], [number], [3.0]])


def test_byzantine_clients_may_diverge():
    broken_check([1.0, math.nan, 3.0], [[1.0], [math.inf], [3.0]], byzantine=[0])
    with pytest.raises(NonFiniteLossError, match="client 5"):
        broken_check([math.nan, math.nan, 3.0], GOOD_ROWS, byzantine=[0])
