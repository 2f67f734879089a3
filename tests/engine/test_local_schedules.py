"""Learning rates that change with the local steps of a round, in every engine."""

import copy
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from exhaustive import exhaustive_for
from further_cases import mark_further, mark_if
from lightning.pytorch import LightningModule
from small_federations import Given, Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, StepLR
from torch.testing import assert_close

import pl_fed
from pl_fed.clients import Ditto, DittoGreedy, FedAvg, Scaffold
from pl_fed.data import FederatedData
from pl_fed.optimizers import LocalCosine, LocalOneCycle
from pl_fed.optimizers.local_schedule import list_rates
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All

SIZES = [9, 20, 12, 4]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
    pytest.mark.usefixtures("temporary_working_folder"),
]


def optimizer_of(lr=0.2):
    return torch.optim.SGD([torch.zeros(1)], lr=lr)


# The rates


@table_test("steps", [1, 2, 7, 50])
def test_cosine_has_the_rates_of_torch(steps):
    own = LocalCosine(optimizer_of(), final=0.1).local_rates(0.2, steps, 0, 0)
    build = functools.partial(CosineAnnealingLR, T_max=steps, eta_min=0.02)
    assert own == pytest.approx(list_rates(build, 0.2, steps), rel=1e-12)


@table_test("steps", [2, 3, 7, 50])
def test_one_cycle_has_the_rates_of_torch(steps):
    own = LocalOneCycle(optimizer_of(), pct_start=0.4).local_rates(0.2, steps, 0, 0)
    build = functools.partial(
        OneCycleLR, max_lr=0.2, total_steps=steps, pct_start=0.4, cycle_momentum=False
    )
    assert own == list_rates(build, 0.2, steps)


def test_warm_up_rises_and_falls():
    own = LocalCosine(optimizer_of(), warmup=0.4).local_rates(3.0, 5, 0, 0)
    assert own == pytest.approx([1.0, 2.0, 3.0, 3 * 0.75, 3 * 0.25])
    assert LocalOneCycle(optimizer_of()).local_rates(0.2, 1, 0, 0) == [0.2]


@pytest.mark.parametrize(("steps", "share"), [(10, 0.1), (5, 0.2), (4, 0.25), (2, 0.5)])
def test_one_cycle_of_a_single_rising_step_begins_at_the_peak(steps, share):
    own = LocalOneCycle(optimizer_of(), pct_start=share, anneal_strategy="linear")
    lowest = 0.2 / 25 / 1e4
    expected = [0.2 + (lowest - 0.2) * t / (steps - 1) for t in range(steps)]
    assert own.local_rates(0.2, steps, 0, 0) == pytest.approx(expected, abs=1e-12)


@table_test(
    "make, message",
    [
        (functools.partial(LocalCosine, final=1.5), "`final` to be in"),
        (functools.partial(LocalCosine, warmup=-0.1), "`warmup` to be in"),
        (functools.partial(LocalOneCycle, pct_start=1.0), r"`pct_start` to be in \(0, 1\) but got"),
        (functools.partial(LocalOneCycle, div_factor=0.0), "`div_factor` to be above 0 but got 0"),
        (functools.partial(LocalOneCycle, anneal_strategy="x"), "`anneal_strategy` to be"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make(optimizer_of())


def test_a_schedule_over_rounds_gives_the_rate_of_the_round():
    optimizer = optimizer_of(0.8)
    schedule = LocalCosine(optimizer, rounds=functools.partial(StepLR, step_size=1, gamma=0.5))
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.8, 0.4, 0.2]
    state = schedule.state_dict()
    other = LocalCosine(optimizer_of(0.8), rounds=functools.partial(StepLR, step_size=1, gamma=0.5))
    other.load_state_dict(state)
    assert other.rounds.last_epoch == schedule.rounds.last_epoch == 3
    with pytest.raises(TypeError, match="`rounds` to be a schedule of rounds without a metric"):
        LocalCosine(optimizer_of(), rounds=LocalCosine)


# Rounds


def data_of(sizes=SIZES, **options):
    return shared_out(classes(sizes), **options)


SCHEDULES = {
    "cosine": functools.partial(LocalCosine, final=0.05, warmup=0.3),
    "one-cycle": LocalOneCycle,
    "cosine, over rounds too": functools.partial(
        LocalCosine, rounds=functools.partial(ExponentialLR, gamma=0.5)
    ),
}


@table_test("name", SCHEDULES)
@pytest.mark.slow
def test_federated_averaging_equals_loops_by_hand(name):
    data, schedule = data_of(), SCHEDULES[name]
    client = FedAvg(seeded(mlp), optimizer=sgd(0.3, momentum=0.5), lr_scheduler=schedule)
    got = run_rounds(client, data, rounds=2, shuffle=False)
    net = seeded(mlp).double()
    over_rounds = schedule(torch.optim.SGD(net.parameters(), lr=0.3))
    for round in range(2):
        round_lr = over_rounds.optimizer.param_groups[0]["lr"]
        changes = [
            train_by_hand(net, data, number, over_rounds, round_lr, round)
            for number in range(len(SIZES))
        ]
        with torch.no_grad():
            for place, parameter in enumerate(net.parameters()):
                parameter += sum(change[place] for change in changes) / len(SIZES)
        over_rounds.optimizer.step()
        over_rounds.step()
    assert_close(got.w, torch.cat([p.detach().flatten() for p in net.parameters()]))


def train_by_hand(net, data, client, schedule, round_lr, round):
    """Train a copy of a net on a client's minibatches, and return its changes."""
    own = copy.deepcopy(net)
    optimizer = torch.optim.SGD(own.parameters(), lr=round_lr, momentum=0.5)
    pieces = data.clients.train.samples(client).split(4)
    rates = schedule.local_rates(round_lr, len(pieces), round, 0)
    for index, rate in zip(pieces, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        inputs, targets = data.clients.inputs[index].double(), data.clients.targets[index]
        F.cross_entropy(own(inputs), targets).backward()
        optimizer.step()
    return [new.detach() - old.detach() for new, old in zip(own.parameters(), net.parameters())]


def adam(params):
    return torch.optim.Adam(params, lr=0.02)


CLIENTS = {
    "SGD": lambda schedule: FedAvg(seeded(mlp), optimizer=sgd(0.3), lr_scheduler=schedule),
    "momentum": lambda schedule, net=mlp: FedAvg(
        seeded(net),
        optimizer=sgd(0.1, momentum=0.9, weight_decay=0.01, dampening=0.3),
        lr_scheduler=schedule,
        local_epochs=2,
    ),
    "Adam": lambda schedule: FedAvg(seeded(mlp), optimizer=adam, lr_scheduler=schedule),
    "two models with work of their own": lambda schedule: Ditto(
        seeded(mlp), personal_steps=7, personal_lr=0.05, optimizer=sgd(0.3), lr_scheduler=schedule
    ),
}
ENGINES = ["stacked", "one_by_one_compiled", "stacked_compiled"]
CHOSEN = {
    ("SGD", "one_by_one_compiled"),
    ("momentum", "stacked_compiled"),
    ("Adam", "one_by_one_compiled"),
    *(("two models with work of their own", engine) for engine in ENGINES),
}


@exhaustive_for("two models with work of their own-stacked_compiled", "SGD-one_by_one_compiled")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        mark_if((name, engine) not in CHOSEN, name, engine)
        for name, engine in itertools.product(CLIENTS, ENGINES)
    ],
)
def test_engines_agree(uncompiled, name, engine):
    client = CLIENTS[name](SCHEDULES["cosine"])
    expected = run_rounds(client, data_of())
    got = run_rounds(client, data_of(), engine=engine, chunk_size=3)
    assert bool(uncompiled) == engine.endswith("compiled")
    assert got.distance(expected) < 1e-10
    constant = run_rounds(CLIENTS[name](None), data_of())
    assert constant.distance(expected) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", mark_further(["stacked", "stacked_compiled"], ["stacked_compiled"])
)
def test_kept_states_of_optimizers_agree(engine):
    client = CLIENTS["momentum"](SCHEDULES["one-cycle"], lambda: nn.Linear(4, 3))
    options = {"keep_optimizer_state": True, "rounds": 3}
    expected = run_rounds(client, data_of(), **options)
    assert run_rounds(client, data_of(), engine=engine, **options).distance(expected) < 1e-10


def test_control_variates_divide_by_the_sum_of_the_rates():
    """SCAFFOLD, option II: c_i = (w − w_i) / Σ η for c = c_i = 0; K η for a constant rate."""
    data = data_of([8, 8])
    schedule = functools.partial(LocalCosine, final=0.2)
    client = Scaffold(seeded(mlp), optimizer=sgd(0.3), lr_scheduler=schedule)
    start = torch.cat([p.detach().flatten() for p in seeded(mlp).double().parameters()])
    got = run_rounds(client, data, rounds=1, sampler=Only(0))
    length = sum(schedule(optimizer_of(0.3)).local_rates(0.3, 2, 0, 0))
    (name,) = (name for name in got.states if "control" in name)
    assert_close(got.states[name][0], (start - got.w) / length)


@pytest.mark.slow
def test_a_schedule_that_a_step_reads_is_refused():
    client = DittoGreedy(seeded(mlp), optimizer=sgd(), lr_scheduler=LocalCosine)
    with pytest.raises(
        ValueError, match="a schedule of rounds for DittoGreedy, whose steps need one"
    ):
        run_by_trainer(client)
    client = FedAvg(seeded(mlp), optimizer=sgd(), lr_scheduler=LocalCosine)
    with pytest.raises(ValueError, match="`accumulate_grad_batches` to be 1 for LocalCosine, whi"):
        run_by_trainer(client, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="to be 1 for LambdaLR with `interval: step`, which give"):
        run_by_trainer(FedAvg(Steps(warm_up)), accumulate_grad_batches=2)


# Modules


class Steps(LightningModule):
    """A module whose schedule counts steps, as many Lightning projects have one."""

    def __init__(self, make=None, frequency=1):
        super().__init__()
        self.net = mlp()
        self.make, self.frequency = make, frequency

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
        schedule = self.make(optimizer, self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": schedule,
                "interval": "step",
                "frequency": self.frequency,
            },
        }


def warm_up(optimizer, module):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) / (1 + step))


def one_cycle(optimizer, module, **options):
    steps = module.trainer.estimated_local_steps
    return OneCycleLR(optimizer, 0.3, total_steps=steps, **{"cycle_momentum": False, **options})


def run_by_trainer(
    client, folder=None, rounds=2, ckpt_path=None, sizes=SIZES, federation=None, **options
):
    trainer = pl_fed.Trainer(
        federation or pl_fed.Federation(seed=0),
        run_dir=None if folder is None else folder / "run",
        accelerator="cpu",
        precision="64-true",
        max_epochs=rounds,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = FederatedData(Given(classes(sizes)), batch_size=4, val_fraction=0.0, seed=0)
    trainer.fit(client, data, ckpt_path=ckpt_path)
    return trainer


@table_test("frequency", [1, 3])
@pytest.mark.slow
def test_a_schedule_of_steps_goes_on_over_rounds(frequency, tmp_path):
    """One client, no shuffling: federated averaging is the loop of Lightning, momentum aside."""
    folder = tmp_path / str(frequency)
    client = FedAvg(seeded(lambda: Steps(warm_up, frequency)))
    trainer = run_by_trainer(client, folder, rounds=3, sizes=[20], overfit_batches=1.0)
    net, clients = seeded(mlp).double(), trainer.federation.data
    rates = [group_rate for group_rate in warm_rates(frequency, 12)]
    pieces = clients.train.samples(0).split(4)
    assert len(pieces) == 4
    for round in range(3):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        for step, index in enumerate(pieces):
            optimizer.param_groups[0]["lr"] = rates[4 * round + step]
            optimizer.zero_grad()
            F.cross_entropy(net(clients.inputs[index]), clients.targets[index]).backward()
            optimizer.step()
    got = trainer.federation.client.model("global").net
    for own, expected in zip(got.parameters(), net.parameters(), strict=True):
        assert_close(own, expected)


def warm_rates(frequency, count):
    optimizer = optimizer_of(0.1)
    schedule = warm_up(optimizer, None)
    for step in range(count):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        if (step + 1) % frequency == 0:
            schedule.step()


@pytest.mark.slow
def test_one_cycle_of_a_module_spans_the_run_and_resumes(tmp_path):
    straight = run_by_trainer(FedAvg(seeded(lambda: Steps(one_cycle))), tmp_path / "a", rounds=4)
    assert straight.estimated_local_steps == 4 * 4  # 20 · 0.8 samples in minibatches of four
    first = run_by_trainer(FedAvg(seeded(lambda: Steps(one_cycle_of_four))), tmp_path / "b", 2)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = run_by_trainer(
        FedAvg(seeded(lambda: Steps(one_cycle))), tmp_path / "c", 4, tmp_path / "first.ckpt"
    )
    states = [t.federation.client.model("global").state_dict() for t in (straight, resumed)]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name])


def one_cycle_of_lightning(optimizer, module):
    steps = module.trainer.estimated_stepping_batches
    return OneCycleLR(optimizer, 0.3, total_steps=steps + 1, cycle_momentum=False)


def linear_by_a_lambda(optimizer, module):
    return LambdaLR(optimizer, lambda step: 1 - step / module.trainer.estimated_stepping_batches)


def linear_by_the_dataloader(optimizer, module):
    steps = len(module.trainer.datamodule.train_dataloader()) * module.trainer.max_epochs
    return LambdaLR(optimizer, lambda step: max(0, 1 - step / steps))


def linear_by_data_set_up_early(optimizer, module):
    module.trainer.fit_loop.setup_data()
    return linear_by_the_dataloader(optimizer, module)


def linear_by_the_own_dataloader(optimizer, module):
    steps = len(module.train_dataloader())
    return LambdaLR(optimizer, lambda step: max(0, 1 - step / steps))


@table_test(
    "make", [linear_by_the_dataloader, linear_by_data_set_up_early, linear_by_the_own_dataloader]
)
@pytest.mark.slow
def test_schedule_by_the_length_of_the_dataloader_is_refused(make):
    """It counts clients: with one client, the rate was 0 after 3 of 3 rounds' 18 local steps."""
    with pytest.raises(ValueError, match=r"steps from `self.trainer.estimated_stepping_batches`"):
        run_by_trainer(FedAvg(seeded(lambda: Steps(make))), rounds=1)


@table_test("make", [one_cycle_of_lightning, linear_by_a_lambda])
@pytest.mark.slow
def test_steps_of_a_module_are_local_steps_for_a_schedule_of_steps(make):
    client = FedAvg(seeded(lambda: Steps(make)))
    trainer = run_by_trainer(client, rounds=3)
    assert trainer.estimated_stepping_batches == 3  # rounds, for all others
    optimizer = optimizer_of(0.1)
    module = SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=3 * 4))
    schedule = make(optimizer, module)  # 20 · 0.8 samples of the largest client, in fours
    start = optimizer.param_groups[0]["initial_lr"]
    for round in range(3):
        for rate in client.local_schedule.local_rates(start, 4, round, 0):
            assert rate == optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()


def test_steps_of_the_largest_client_are_refused_with_privacy():
    """One more sample of it would change the rates of all others."""
    pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    privacy = pl_fed.DifferentialPrivacy(0.1, 0.01, noise_multiplier=1.0)
    federation = pl_fed.Federation(All(), privacy=privacy, seed=0)
    client = FedAvg(seeded(lambda: Steps(one_cycle_of_lightning)))
    with pytest.raises(ValueError, match=r"local steps with a number of its own for `federation"):
        run_by_trainer(client, federation=federation)
    client = FedAvg(seeded(lambda: Steps(one_cycle)), local_steps=2)
    trainer = SimpleNamespace(
        federation=federation,
        lightning_module=client,
        datamodule=shared_out(classes(SIZES), 4),
        run_settings=RunSettings,
        _max_rounds=3,
    )
    assert pl_fed.Trainer.estimated_local_steps.fget(trainer) == 3 * 2


def one_cycle_of_four(optimizer, module):
    return OneCycleLR(optimizer, 0.3, total_steps=16, cycle_momentum=False)


@table_test(
    "make, message",
    [
        (
            lambda optimizer, module: OneCycleLR(
                optimizer, 0.3, total_steps=5, cycle_momentum=False
            ),
            "each of the 8 local steps of a client in 2 rounds but got OneCycleLR for 6: give it"
            " total_steps=self.trainer.estimated_local_steps",
        ),
        (
            functools.partial(one_cycle, cycle_momentum=True),
            "alone but got OneCycleLR with cycle_momentum: set cycle_momentum=False",
        ),
    ],
)
def test_schedules_without_a_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        run_by_trainer(FedAvg(seeded(lambda: Steps(make))))


class LoggedRate(Steps):
    """Logs the rate of each step, as its optimizer and its schedule have it."""

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("last_rate", self.lr_schedulers().get_last_lr()[0])
        return super().training_step(batch, batch_idx)


def halve(optimizer, module):
    return ExponentialLR(optimizer, 0.5)


@table_test("engine", ["one_by_one", "stacked", "one_by_one_compiled"])
@pytest.mark.slow
def test_a_step_reads_its_own_rate(engine):
    data = shared_out(classes([8, 12]), drop_last=True)  # two and three steps
    client = FedAvg(seeded(lambda: LoggedRate(halve)))
    trainer = pl_fed.Trainer(
        pl_fed.Federation(seed=0, engine=pl_fed.EngineOptions(engine)),
        accelerator="cpu", max_epochs=2, logger=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if engine == "one_by_one":
        trainer.fit(client, data)
    else:
        with pytest.warns(UserWarning, match="`training_step` reads the optimizer or its schedule"):
            trainer.fit(client, data)
    rates = ((0.025 + 0.0125) / 2 + (0.0125 + 0.00625 + 0.003125) / 3) / 2
    for name in ("rate", "last_rate"):
        assert float(trainer.callback_metrics[f"train/{name}"]) == pytest.approx(rates)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
