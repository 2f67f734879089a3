"""The trial of a net and its criterion on a few samples."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from lightning import LightningModule
from small_federations import classes, mlp, reals, run_tried_rounds, seeded, sgd, shared_out
from stateful_modules import Stateful
from tables import table_test
from torch import nn
from torchmetrics import MeanAbsoluteError, MetricCollection
from torchmetrics.classification import MulticlassAUROC

from pl_fed import Federation, clients
from pl_fed.clients import (
    Ditto,
    FedALA,
    FedAS,
    FedAvg,
    FedBABU,
    FedPer,
    FedRep,
    KNNPer,
    SimpleTuning,
)
from pl_fed.data import Arrays, DataSource, FederatedData
from pl_fed.models import MLP
from pl_fed.partitioners import IID
from pl_fed.preflight.net_trial import NetFacts, find_net_facts
from pl_fed.preflight.trial import Trial
from pl_fed.samplers import All
from pl_fed.tasks import Task
from pl_fed.tasks.module_facts import ModuleFacts

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


class Large(nn.Linear):
    """Large: takes more memory than any machine has, in all calls or from a local step on."""

    in_steps = False

    def forward(self, x):
        if self.training or not self.in_steps:
            torch.empty(1 << 50)
        return super().forward(x)


@pytest.mark.parametrize("in_steps", [False, True])
def test_lack_of_memory_is_no_fault_of_net_or_data(in_steps):
    """It was one of the net's inputs, or appeared in the first round."""
    net = Large(4, 3)
    net.in_steps = in_steps
    data = shared_out(classes((5, 4)), batch_size=4)
    with pytest.raises(RuntimeError, match=r"^\[enforce fail.*memory"):
        Federation(All(), seed=0).setup(clients.FedAvg(net), data, "fit")


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


def test_facts_are_returned_and_not_set():
    """The federation alone writes what a trial finds."""
    data = make_clients(torch.arange(40).reshape(20, 2), torch.arange(20) % 3, 3)
    client = Ditto(nn.Linear(2, 3), criterion=nn.CrossEntropyLoss(reduction="mean"))
    before = dict(vars(client)), dict(vars(client.task))
    facts = find_net_facts(Trial(client, data))
    assert facts == NetFacts(takes_integers=False, averages_samples=True)
    assert before == (vars(client), vars(client.task))


class ForgottenBatchFirst(nn.Module):
    """Forgotten batch first: a recurrence over the samples of a batch, not over their steps."""

    def __init__(self):
        super().__init__()
        self.recurrence, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.recurrence(x)[0][:, -1])


class CountingAndDropping(nn.Sequential):
    """A net that counts its calls, and drops numbers, in evaluation mode, too."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(24, 3), nn.Dropout())
        self.calls = 0

    def train(self, mode=True):
        return super().train(True)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_net_whose_outputs_depend_on_the_other_samples_of_a_batch_is_told():
    """Each client's metrics were those of a batch with samples of other clients."""
    data = make_clients(torch.randn(20, 6, 4), torch.arange(20) % 3, 3)
    with pytest.warns(UserWarning, match="of ForgottenBatchFirst .* without `batch_first=True`"):
        facts = find_net_facts(Trial(Ditto(seeded(ForgottenBatchFirst)), data))
    assert facts.mixes_samples
    independent = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 3))
    for net in (independent, seeded(CountingAndDropping)):
        assert not find_net_facts(Trial(Ditto(net), data)).mixes_samples


def test_facts_of_a_module_are_returned_and_not_set():
    data = make_clients(torch.rand(20, 4), torch.arange(20) % 3, 3)
    client = Ditto(Stateful())
    facts = find_net_facts(Trial(client, data)).module
    assert facts.step_names == ()
    assert client.task.facts == ModuleFacts()


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


@table_test(
    ("targets", "criterion", "remedy"),
    [
        (torch.ones(20, 2).long(), nn.CrossEntropyLoss, "several labels of a sample as floating"),
        (torch.ones(20, 2).long(), nn.BCEWithLogitsLoss, "several labels of a sample as floating"),
        (torch.ones(20, 2).long(), nn.BCELoss, "several labels of a sample as floating"),
        (torch.rand(20), nn.CrossEntropyLoss, "as class ids, call targets.long()"),
    ],
)
def test_remedy_of_targets_of_another_type_fits_the_type(targets, criterion, remedy):
    data = make_clients(torch.rand(20, 4), targets, 0)
    with pytest.raises(ValueError, match=re.escape(remedy)):
        try_net(Ditto(nn.Linear(4, 2), criterion=criterion()), data)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_class_ids_that_broadcast_over_outputs_are_refused():
    """Outputs [2, 2] and class ids [2] broadcast in a batch of two, and in no other."""
    data = make_clients(torch.rand(20, 4), torch.arange(20) % 2, 2)
    words = "`criterion` to take outputs of shape [3, 2] and targets of shape [3] (torch.int64) but"
    with pytest.raises(ValueError, match=re.escape(words)):
        try_net(Ditto(nn.Linear(4, 2), criterion=nn.MSELoss()), data)


@pytest.mark.filterwarnings("ignore:Using a target size")
@table_test("criterion", [nn.MSELoss, nn.SmoothL1Loss, nn.PoissonNLLLoss])
@table_test(("shape", "wide"), [((20,), True), ((20, 1), False)])
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


BUILDERS = {
    "two optimizers": (
        lambda groups: (torch.optim.SGD(groups), torch.optim.Adam(groups)),
        TypeError,
        "`optimizer` to build one torch.optim.Optimizer but got tuple",
    ),
    "a list of parameters": (
        lambda groups: torch.optim.SGD([p for p in groups if p.ndim > 1]),
        ValueError,
        "a local optimizer from parameter groups but that failed: 'dict' object has no attribute",
    ),
}


@table_test(("build", "kind", "words"), BUILDERS.values(), ids=BUILDERS)
def test_function_that_builds_no_optimizer_is_refused(build, kind, words):
    with pytest.raises(kind, match=words):
        run_tried_rounds(FedAvg(mlp(), optimizer=build), shared_out(classes([4, 4])))


class Classifier(LightningModule):
    """A module that takes real numbers."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.last(x), y)


class Noise(nn.Module):
    """Noise on real numbers; it fails on integers."""

    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize("make", [Classifier, mlp])
def test_augmentation_for_real_numbers_makes_integers_real(make):
    arrays = classes([6, 6])
    integers = replace(arrays, inputs=(3 * arrays.inputs).long())
    client = FedAvg(make())
    Federation(All(), seed=0).setup(client, shared_out(integers, augment=[Noise()]), "fit")
    assert not client.takes_integers


def test_augmentation_that_fails_is_named():
    data = shared_out(classes([6, 6]), augment=[nn.Linear(5, 5)])
    with pytest.raises(ValueError, match=r"`augment` to take inputs of shape \[2, 4\] but that fa"):
        Federation(All(), seed=0).setup(FedAvg(mlp()), data, "fit")


class Listed(nn.Module):
    """A net whose outputs shrink with its weights, which it reads from a list or from its layer."""

    def __init__(self, lists):
        super().__init__()
        self.body, self.head, self.lists = nn.Linear(4, 5), nn.Linear(5, 3), lists
        self.weights = [self.body.weight]

    def forward(self, x):
        (weight,) = self.weights if self.lists else (self.body.weight,)
        return self.head(self.body(x).tanh() / (1 + weight.square().sum()))


@pytest.mark.parametrize("kind", [FedAS, FedRep, KNNPer])
@pytest.mark.slow
def test_algorithms_that_call_a_net_with_other_weights_refuse_one_that_reads_its_own(kind):
    """The list would keep the net's own weights, also one by one."""
    data = shared_out(classes([6, 8]))
    run_tried_rounds(kind(seeded(lambda: Listed(lists=False)), optimizer=sgd(0.1)), data)
    refused = kind(seeded(lambda: Listed(lists=True)), optimizer=sgd(0.1))
    with pytest.raises(ValueError, match=f"other weights by {kind.__name__} but .* from a list"):
        run_tried_rounds(refused, data)


class Averaged(nn.Module):
    """A net with a copy for a moving average, which is its last module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.average = torch.optim.swa_utils.AveragedModel(self.net)

    def forward(self, x):
        return self.net(x)


HEADS = [
    *((FedPer, "own"), (FedRep, "own"), (FedBABU, "head"), (SimpleTuning, "own")),
    (FedALA, "mixed"),
]


@pytest.mark.parametrize(("kind", "argument"), HEADS)
@pytest.mark.slow
def test_default_head_without_a_gradient_is_refused(kind, argument):
    """It would be the copy's, and all clients would share the head that they train."""
    data = shared_out(classes([6, 8]))
    words = f"`{argument}` to name .* `average.module.2`, without a gradient: .*'net.2'"
    with pytest.raises(ValueError, match=words):
        run_tried_rounds(kind(seeded(Averaged)), data)
    Federation(All(), seed=0).setup(kind(seeded(Averaged), **{argument: ["net.2"]}), data, "fit")


class HeadFirst(nn.Module):
    """A net that defines its head before its body, and has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.scale * self.head(self.body(x).tanh())


@pytest.mark.parametrize(("kind", "argument"), HEADS)
@pytest.mark.slow
def test_default_head_that_is_not_called_last_gets_a_warning(kind, argument):
    """Clients kept the body, and shared the head, without a word."""
    data = shared_out(classes([6, 8]))
    words = f"`model.{argument}` of .* calls `head` after it.*: \\['head'\\]`"
    with pytest.warns(UserWarning, match=words):
        Federation(All(), seed=0).setup(kind(seeded(HeadFirst)), data, "fit")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`model")
        for net, arguments in ((HeadFirst, {argument: ["head"]}), (mlp, {})):
            Federation(All(), seed=0).setup(kind(seeded(net), **arguments), data, "fit")


def test_head_with_a_parametrized_weight_is_a_whole_layer():
    """Clients kept its weight alone, and shared its bias."""
    net = nn.Sequential(nn.Linear(4, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))
    assert FedPer(net).own == ("1",)


class Masked(Task):
    """Masked: the squared error of the numbers that a mask of the targets marks."""

    def losses(self, outputs, targets):
        return torch.where(targets["seen"], (outputs - targets["y"]) ** 2, 0).sum(1)

    def metrics(self):
        return MetricCollection({"mae": MeanAbsoluteError()})

    def metric_inputs(self, outputs, targets):
        return outputs * targets["seen"], targets["y"] * targets["seen"]


class ThreeInputs(Masked):
    def metric_inputs(self, outputs, targets):
        return outputs, targets["y"], targets["seen"]


def masked_numbers():
    seen = torch.arange(6)[:, None] > torch.tensor([0, 3])
    targets = {"y": torch.arange(12.0).reshape(6, 2), "seen": seen}
    return shared_out(Arrays(torch.randn(6, 4), targets, torch.tensor([0, 0, 0, 1, 1, 1])))


def test_targets_may_hold_a_mask():
    Federation(All(), seed=0).setup(FedAvg(nn.Linear(4, 2), task=Masked()), masked_numbers(), "fit")


def test_metrics_of_a_task_take_two_values():
    client = FedAvg(nn.Linear(4, 2), task=ThreeInputs())
    expected = "Expected `metric_inputs` of the task ThreeInputs to return two values.* got 3 val"
    with pytest.raises(ValueError, match=expected):
        Federation(All(), seed=0).setup(client, masked_numbers(), "fit")


class OtherColumns(Masked):
    def predictions(self, outputs):
        return {"best": outputs.argmax(1), "top": outputs.amax(1)}


def test_predictions_of_a_task_have_a_column_of_this_name():
    client = FedAvg(nn.Linear(4, 2), task=OtherColumns())
    with pytest.raises(ValueError, match="to return a column `prediction` but got best, top: ren"):
        Federation(All(), seed=0).setup(client, masked_numbers(), "fit")


class OneClassEach(Masked):
    def metric_inputs(self, outputs, targets):
        return outputs.argmax(1), targets["y"].argmax(1)


def test_a_metric_that_fails_is_told_with_the_values_that_it_got():
    client = FedAvg(nn.Linear(4, 2), task=OneClassEach())
    federation = Federation(All(), seed=0, metrics={"auroc": MulticlassAUROC(2)})
    words = r"outputs of shape \[2\] and targets of shape \[2\], as its `metric_inputs` returns"
    with pytest.raises(
        ValueError, match=rf"`auroc` of the task OneClassEach to take {words} them, but"
    ):
        federation.setup(client, masked_numbers(), "fit")


@pytest.mark.parametrize(("last", "number"), [(nn.Softmax(1), 1), (nn.LogSoftmax(1), 0)])
def test_probabilities_instead_of_logits_get_a_warning(last, number):
    """The cross entropy took a softmax of a softmax, and learned slowly, without a word."""
    client = FedAvg(nn.Sequential(seeded(mlp), last))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Federation(All(), seed=0).setup(client, shared_out(classes([6, 8])), "fit")
    told = [str(w.message) for w in caught if "Remove the softmax" in str(w.message)]
    assert len(told) == number
