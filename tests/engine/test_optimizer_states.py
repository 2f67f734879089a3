"""Clients keep the states of their local optimizers between rounds if `engine` asks for it."""

import copy
import warnings

import pytest
import torch
from further_cases import mark_further
from small_federations import (
    Only,
    VariedCohorts,
    classes,
    mlp,
    run_rounds,
    sections,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg, FedPer, Finetuning, Scaffold
from pl_fed.samplers import All, Uniform

SIZES = [7, 3, 10, 1, 5]  # in minibatches of 4, so that clients count their steps differently


def build(optimizer, **options):
    return lambda parameters: optimizer(parameters, **options)


OPTIMIZERS = {
    "SGD": sgd(0.1, momentum=0.9),
    "SGD with dampening": sgd(0.1, momentum=0.9, dampening=0.3),
    "Adam": build(torch.optim.Adam, lr=0.02, weight_decay=0.01, amsgrad=True),
    "AdamW": build(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "RMSprop": build(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": build(torch.optim.NAdam, lr=0.02),
    "RAdam": build(torch.optim.RAdam, lr=0.02),
    "Adamax": build(torch.optim.Adamax, lr=0.02),
    "Adagrad": build(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": build(torch.optim.Adadelta, lr=0.5),
    "Rprop": build(torch.optim.Rprop, lr=0.01),
    "ASGD": build(torch.optim.ASGD, lr=0.1, lambd=0.1, t0=1),
}


LIKE_OTHERS = {"SGD", "AdamW", "RMSprop", "RAdam", "Adamax", "Adadelta"}  # in their states


def keep(client, data, engine="one_by_one", **settings):
    """Run rounds with kept states; no engine may fall back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Local steps run eagerly")
        warnings.filterwarnings("error", "Clients are run one by one")
        return run_rounds(client, data, engine=engine, keep_optimizer_state=True, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_further(OPTIMIZERS, LIKE_OTHERS))
def test_engines_agree_for_every_optimizer_with_a_kept_state(name):
    data = shared_out(classes(SIZES))
    client = Ditto(
        seeded(mlp), optimizer=OPTIMIZERS[name], local_epochs=2, personal_epochs=1, personal_lr=0.03
    )
    settings = {"rounds": 2, "sampler": Uniform(3)}
    one_by_one = keep(client, data, **settings)
    for chunk_size in (None, 2):
        stacked = keep(client, data, "stacked", chunk_size=chunk_size, **settings)
        assert one_by_one.distance(stacked) < 1e-12
    assert one_by_one.distance(run_rounds(client, data, **settings)) > 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD with dampening", "Adam"])
def test_compiled_engines_agree_with_a_kept_state(name, uncompiled):
    data = shared_out(classes(SIZES))
    client = FedAvg(seeded(mlp), OPTIMIZERS[name])
    settings = {"rounds": 3, "sampler": Uniform(3)}
    one_by_one = keep(client, data, **settings)
    for engine in ("one_by_one_compiled", "stacked_compiled"):
        uncompiled.clear()
        assert one_by_one.distance(keep(client, data, engine, **settings)) < 1e-12, engine
        assert uncompiled


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("name", ["SGD with dampening", "AdamW", "RMSprop"])
def test_client_alone_takes_the_steps_of_one_optimizer(name, engine):
    """With one client and one local step, rounds are the steps of one plain optimizer."""
    data = shared_out(classes([4]))
    client = FedAvg(seeded(mlp), OPTIMIZERS[name], local_steps=1)
    outcome = keep(client, data, engine, rounds=5)
    net = copy.deepcopy(client.global_model).double()
    optimizer = OPTIMIZERS[name](net.parameters())
    batch = data.clients.to(torch.device("cpu"), torch.float64).training_samples(0)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch.inputs), batch.targets).backward()
        optimizer.step()
    row = nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(outcome.w, row, rtol=0, atol=1e-13)


def test_momentum_continues_for_the_clients_of_a_cohort_only():
    """The momentum of SGD after T steps with gradient g is g (1 + β + ... + β^(T−1))."""

    class Constant(FedAvg):
        """The gradient of every parameter is 1."""

        def training_step(self, batch, batch_idx):
            return torch.stack([p.sum() for p in self.parameters_of("global").values()]).sum()

    data = shared_out(classes([4, 4, 4]))
    client = Constant(nn.Linear(4, 3), sgd(0.1, momentum=0.5), local_steps=2)
    outcome = keep(client, data, rounds=3, sampler=VariedCohorts([0, 1], [1], [1]))
    states = outcome.states["global.optimizer"]
    assert states[0].tolist() == [1.5] * 15 + [1.0] * 2, "momentum, and a flag for each tensor"
    assert states[1].tolist() == [sum(0.5**k for k in range(6))] * 15 + [1.0] * 2
    assert states[2].tolist() == [0.0] * 17


@pytest.mark.slow
def test_state_of_a_broken_client_stays_as_before_the_round():
    class Diverging(FedAvg):
        """Client 1 diverges from round 1 on."""

        now = False

        def training_step(self, batch, batch_idx):
            is_broken = self.now & (self.read("client")[0] == 1)
            return super().training_step(batch, batch_idx) * torch.where(is_broken, torch.nan, 1.0)

    client = Diverging(seeded(mlp), OPTIMIZERS["Adam"], local_steps=1).double()
    federation = Federation(All(), seed=0, **sections(keep_optimizer_state=True))
    federation.setup(client, shared_out(classes([4, 4, 4])), "fit")
    client.train()
    optimizer = client.configure_optimizers()
    rows = []
    for round in range(2):
        client.now = torch.tensor(round > 0)
        federation.run_round(round, optimizer)
        rows.append(federation.store.read("global.optimizer", torch.arange(3)))
    assert (rows[0] == rows[1]).all(1).tolist() == [False, True, False]
    assert rows[1].isfinite().all()


@pytest.mark.slow
def test_algorithms_with_several_models_and_parts_keep_all_states():
    data = shared_out(classes(SIZES))
    for make in (FedPer, Finetuning):
        client = make(seeded(mlp), optimizer=OPTIMIZERS["Adam"])
        outcome = keep(client, data, sampler=Only(0, 2))
        trained = {f"{model}.optimizer" for model in client.trained}
        assert trained == {name for name in outcome.states if name.endswith(".optimizer")}
        assert outcome.distance(keep(client, data, "stacked", sampler=Only(0, 2))) < 1e-12


class Counting(torch.optim.Optimizer):
    """Signed descent whose state has a number of Python, a tensor of another shape, and None."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["nothing"] = None
            state["mean"] = state.get("mean", 0) + parameter.grad.mean().reshape(1, 1)
            parameter -= self.param_groups[0]["lr"] * state["mean"].squeeze() / state["count"]


def test_optimizer_of_a_user_keeps_numbers_and_tensors_of_any_shape():
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].scale = nn.Parameter(torch.tensor(1.0))  # a single number
    client = FedAvg(net, Counting, local_steps=2)
    client.keeps_optimizer_state = True
    assert client.optimizer_layouts["global"].names == ("count", "mean")

    class Scaled(FedAvg):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.global_model[0].scale

    client = Scaled(net, Counting, local_steps=2)
    outcome = run_rounds(client, shared_out(classes([4, 4])), keep_optimizer_state=True, rounds=3)
    assert outcome.states["global.optimizer"][:, 3:6].tolist() == [[6.0] * 3] * 2


@pytest.mark.slow
def test_single_number_as_parameter_keeps_its_moments_in_a_stack():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.scale * x[:, :3]

    client = FedAvg(Single(), OPTIMIZERS["Adam"], local_epochs=2)
    data, settings = shared_out(classes(SIZES)), {"rounds": 3, "sampler": Uniform(3)}
    one_by_one = keep(client, data, **settings)
    assert one_by_one.distance(keep(client, data, "stacked", **settings)) < 1e-13


class Listing(torch.optim.SGD):
    """Keeps a list."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["history"] = [1.0]


class Central(torch.optim.SGD):
    """Keeps a state that belongs to no parameter."""

    def step(self, closure=None):
        super().step(closure)
        self.state["all"]["count"] = 1


class Late(torch.optim.SGD):
    """Keeps something from its second step on."""

    def step(self, closure=None):
        super().step(closure)
        state = self.state[self.param_groups[0]["params"][0]]
        if "first" in state:
            state["second"] = torch.ones(1)
        state["first"] = torch.ones(1)


class CountingInGroups(torch.optim.SGD):
    """Keeps its number of steps among the options of each group, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class CountingByItself(torch.optim.SGD):
    """Keeps its number of steps in an attribute, which no state dict has."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.steps
        super().step(closure)


REFUSED = {
    "SGD without momentum": (sgd(), r"has SGD without one: set false\.$"),
    "a list": (build(Listing, lr=0.1), "tensors and numbers .* but got list for `history`: set"),
    "one for all": (build(Central, lr=0.1), "a state for each parameter alone but got Central"),
    "a number of each group": (
        build(CountingInGroups, lr=0.1, momentum=0.9),
        "each parameter but CountingInGroups counts in the option `steps` of its parameter groups",
    ),
    "an attribute": (
        build(CountingByItself, lr=0.1, momentum=0.9),
        "all that it remembers but CountingByItself keeps other values .*: set",
    ),
    "a closure": (
        build(torch.optim.LBFGS),
        "steps from gradients alone .* but that failed: .*clos",
    ),
    "a later entry": (build(Late, lr=0.1), r"same state in every step \(first\) but got `second`"),
}


@table_test(("optimizer", "words"), REFUSED.values(), ids=REFUSED)
def test_unsuitable_optimizers_are_refused_in_one_sentence(optimizer, words):
    with pytest.raises(ValueError, match=f"^Expected .*{words}") as info:
        keep(FedAvg(mlp(), optimizer), shared_out(classes([8])))
    assert str(info.value).count("Expected") == 1


def test_algorithm_without_a_state_of_its_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"true` but Scaffold has SGD without one: set false\.$"):
        keep(Scaffold(mlp()), shared_out(classes([8])))


def test_option_is_a_boolean():
    with pytest.raises(TypeError, match=r"keep_optimizer_state` to be true or false but got 'yes'"):
        sections(keep_optimizer_state="yes")


@pytest.mark.slow
def test_checkpoint_of_another_choice_is_refused():
    data = shared_out(classes([4, 4]))

    def federation_of(kept):
        client = FedAvg(seeded(mlp), OPTIMIZERS["Adam"])
        federation = Federation(All(), seed=0, **sections(keep_optimizer_state=kept))
        federation.setup(client, data, "fit")
        return federation

    kept, restarted = federation_of(True), federation_of(False)
    state = "global with exp_avg, exp_avg_sq, max_exp_avg_sq, step"
    with pytest.raises(ValueError, match=rf"local optimizers none but got one with {state}: set "):
        restarted.load_state_dict(kept.state_dict())
    with pytest.raises(ValueError, match=rf"local optimizers {state} but got one with none: set "):
        kept.load_state_dict(restarted.state_dict())
    kept.load_state_dict(kept.state_dict())


@pytest.mark.slow
def test_evaluation_neither_reads_nor_needs_kept_states():
    client = FedAvg(seeded(mlp), OPTIMIZERS["Adam"]).double()
    federation = Federation(All(), seed=0, **sections(keep_optimizer_state=True))
    data, other = (shared_out(classes([4, 4], seed=seed)) for seed in (0, 1))
    federation.setup(client, data, "fit")
    client.train()
    federation.run_round(0, client.configure_optimizers())
    assert federation.session.states.begin(torch.arange(2)).optimizer_states == {}
    assert len(federation.clients_without_training()) == 0
    federation.setup(client, other, "test")  # the global model may be tested on any data
