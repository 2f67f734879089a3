"""Clients that do not stack run one by one, with one warning and with the right numbers."""

import warnings

import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adafactor, Muon

from pl_fed import EngineOptions, Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.samplers import All

RUN_ONE_BY_ONE = "Clients are run one by one"
SIZES = [7, 3, 10, 2]


class Activated(nn.Module):
    """A net with a function after its first layer."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Counting(nn.Module):
    """A net that counts its minibatches in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.net(x) / self.seen.clamp(min=1)


class Bounded(nn.Module):
    """A net that bounds its temperature in each step, as that of CLIP."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = mlp(), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.temperature.clamp_(0.99, 1.01)
        return self.net(x) * self.temperature.exp()


class Standardizing(nn.Module):
    """A net that mixes the samples of a minibatch, but has no layer of a mixing type."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x - x.mean(dim=0))


class OwnSGD(SGD):
    """An optimizer of the user."""


class Penalized(nn.Module):
    """A net whose outputs shrink with its weights, which it reads from a list."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.weights = [*self.net.parameters()]

    def forward(self, x):
        return self.net(x) / (1 + 1e-3 * sum(weight.square().sum() for weight in self.weights))


class IgnoresTheMask(FedAvg):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.global_model(batch.inputs), batch.targets)


class Ids(nn.Embedding):
    """An embedding of the signs of the inputs."""

    def __init__(self, **options):
        super().__init__(2, 2, **options)

    def forward(self, x):
        return super().forward((x > 0).long())


def without_bias():
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))


def fedavg(net, optimizer=None, kind=FedAvg):
    return lambda: kind(seeded(net), optimizer=optimizer or sgd(0.1), local_epochs=2)


CASES = {
    "BatchNorm": (fedavg(lambda: Activated(nn.BatchNorm1d(5))), "mixes the samples"),
    "BatchNorm without statistics": (
        fedavg(lambda: Activated(nn.BatchNorm1d(5, track_running_stats=False))),
        "mixes the samples",
    ),
    "frozen BatchNorm without statistics": (
        fedavg(
            lambda: Activated(nn.BatchNorm1d(5, track_running_stats=False).requires_grad_(False)),
        ),
        "mixes the samples",
    ),
    "Embedding of frequencies": (
        fedavg(lambda: nn.Sequential(Ids(scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, 3))),
        "mixes the samples",
    ),
    "mixed samples": (fedavg(Standardizing), "depends on masked"),
    "a branch on the data": (
        fedavg(lambda: Activated(lambda h: h.tanh() if h.sum() > 0 else h.sigmoid())),
        "data-dependent",
    ),
    "a number out of a tensor": (fedavg(lambda: Activated(lambda h: h * h.sum().item())), "item"),
    "dropout from torch's generator": (
        fedavg(lambda: Activated(lambda h: F.dropout(h, 0.5))),
        "random",
    ),
    "a buffer that changes": (
        fedavg(lambda: Counting()),
        "changes a buffer of the net (global_model.seen)",
    ),
    "autocast in a step": (
        fedavg(lambda: Activated(torch.autocast("cpu", torch.bfloat16)(torch.tanh))),
        "enters torch.autocast, and torch.vmap would bypass it",
    ),
    "a parameter that changes in place": (fedavg(Bounded), "changes trained parameters in place"),
    "Adafactor": (fedavg(mlp, lambda p: Adafactor(p, lr=0.01)), "whether Adafactor updates"),
    "Muon": (fedavg(without_bias, lambda p: Muon(p, lr=0.01)), "whether Muon updates"),
    "an optimizer of the user": (fedavg(mlp, lambda p: OwnSGD(p, lr=0.1)), "OwnSGD updates"),
    "a list of weights": (fedavg(Penalized), "from a list, an object or a function"),
    "an objective that ignores the mask": (fedavg(mlp, kind=IgnoresTheMask), "depends on masked"),
    "Ditto with BatchNorm": (
        lambda: Ditto(
            seeded(lambda: Activated(nn.BatchNorm1d(5))), optimizer=sgd(0.1), local_steps=3,
            personal_steps=1,
        ),
        "mixes the samples",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_unstackable_client_is_reported_once_and_runs_one_by_one(case):
    make, reason = CASES[case]
    client, data = make(), shared_out(classes(SIZES), batch_size=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_rounds(client, data, rounds=3, engine="stacked", chunk_size=2)
    (message,) = [text for text in map(str, (w.message for w in caught)) if RUN_ONE_BY_ONE in text]
    assert reason in message
    expected = run_rounds(client, data, rounds=3, engine="one_by_one")
    assert outcome.distance(expected) == 0
    assert not torch.equal(outcome.w, client.row("global").data.double())


def test_compiled_step_changes_no_completed_model_in_place(uncompiled):
    client = Ditto(seeded(Bounded), optimizer=sgd(0.1), local_steps=3, personal_steps=1)
    data = shared_out(classes(SIZES), batch_size=5)
    expected = run_rounds(client, data, engine="one_by_one")
    with pytest.warns(UserWarning, match="changes trained parameters in place, also those of a"):
        outcome = run_rounds(client, data, engine="one_by_one_compiled")
    assert outcome.distance(expected) == 0


def test_one_by_one_warns_of_no_unstackable_client(recwarn):
    make, _ = CASES["BatchNorm"]
    run_rounds(make(), shared_out(classes(SIZES), batch_size=5), engine="one_by_one")
    assert not [warning for warning in recwarn if RUN_ONE_BY_ONE in str(warning.message)]


@pytest.mark.slow
def test_error_in_the_objective_is_raised():
    class Broken(FedAvg):
        def training_step(self, batch, batch_idx):
            if self.training:  # the trial before training passes
                raise KeyError("my mistake")
            return super().training_step(batch, batch_idx)

    client = Broken(seeded(mlp), optimizer=sgd())
    with (
        pytest.warns(UserWarning, match=RUN_ONE_BY_ONE),
        pytest.raises(KeyError, match="my mistake"),
    ):
        run_rounds(client, shared_out(classes(SIZES)), engine="stacked")


@table_test("engine", ["one_by_one", "stacked"])
@table_test("returned", [None, {"other": torch.zeros(1)}, {"loss": 1.0}], ids=str)
def test_training_step_without_a_loss_is_refused(returned, engine):
    class Silent(FedAvg):
        def training_step(self, batch, batch_idx):
            return returned

    client = Silent(seeded(mlp), optimizer=sgd())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError, match="Expected `training_step` to return"):
            run_rounds(client, shared_out(classes(SIZES)), engine=engine)


@table_test("engine", ["one_by_one", "stacked"])
@table_test("name", ["cohort", "update_norm"])
def test_training_step_with_a_reserved_output_name_is_refused(name, engine):
    class Careless(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, name: loss.detach()}

    client = Careless(seeded(mlp), optimizer=sgd())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=f"names that a round .* itself but got `{name}`"):
            run_rounds(client, shared_out(classes(SIZES)), engine=engine)


@pytest.mark.slow
def test_every_new_client_of_a_federation_is_checked():
    federation = Federation(All(), engine=EngineOptions("stacked"), seed=0)
    data = shared_out(classes(SIZES), batch_size=5)

    def one_round(client):
        federation.setup(client, data, "fit")
        client.train()
        federation.run_round(0, client.configure_optimizers())

    with pytest.warns(UserWarning, match=RUN_ONE_BY_ONE):
        one_round(CASES["BatchNorm"][0]())
    with pytest.warns(UserWarning, match=RUN_ONE_BY_ONE):
        one_round(CASES["Muon"][0]())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", RUN_ONE_BY_ONE)
        one_round(FedAvg(seeded(mlp), optimizer=sgd()))


@table_test("engine", ["one_by_one", "stacked"])
@table_test("centre", ["global", "personal", "elsewhere"])
def test_model_in_training_is_refused_as_the_centre_of_a_pull(engine, centre):
    """Such a pull would be zero, or its centre would move."""

    class Aliased(Ditto):
        def squared_distance(self, model):
            return super().squared_distance("personal", centre)

    client = Aliased(seeded(mlp), optimizer=sgd())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match = rf"to be a row of the round \(broadcast, .*\) but got '{centre}'"
        with pytest.raises(ValueError, match=match):
            run_rounds(client, shared_out(classes(SIZES)), engine=engine)


class WarmsUp(FedAvg):
    """Pulls its model to the broadcast from the second step on."""

    def training_step(self, batch, batch_idx):
        loss = self.loss("global", batch)
        return loss + self.squared_distance("personal") if batch_idx else loss


def test_rows_that_only_later_steps_read_are_available():
    client = WarmsUp(seeded(mlp), optimizer=sgd(0.1), local_epochs=2)
    data = shared_out(classes([9, 7, 5]))
    stacked = run_rounds(client, data, engine="stacked")
    assert stacked.distance(run_rounds(client, data, engine="one_by_one")) < 1e-12


class Columns(nn.Module):
    """A net with dropout on a tensor whose last dimension is the samples."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(x).t()).t().tanh())


def test_dropout_that_depends_on_padding_is_not_stacked():
    client = FedAvg(seeded(Columns), optimizer=sgd(0.1), local_epochs=2)
    data = shared_out(classes([9, 7, 5]))
    expected = run_rounds(client, data)
    with pytest.warns(UserWarning, match="stacked: the loss .* depends on masked samples"):
        outcome = run_rounds(client, data, engine="stacked")
    assert outcome.distance(expected) == 0


class Flags(FedAvg):
    def training_step(self, batch, batch_idx):
        loss = self.loss("global", batch)
        return {
            "loss": loss,
            "positive": loss.detach() > 0,
            "samples": batch.targets.numel() + 0 * batch.targets[0],
        }


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_flags_and_counts_are_averaged(engine):
    client = Flags(seeded(mlp), optimizer=sgd(0.1), local_steps=4)
    (report,) = run_rounds(client, shared_out(classes([8, 8])), rounds=1, engine=engine).reports
    assert (float(report["train/positive"]), float(report["train/samples"])) == (1.0, 4.0)
