"""The local optimizer of a LightningModule has all that the module has set."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from small_federations import classes, mlp, run_rounds, seeded, shared_out
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LRScheduler, OneCycleLR

from pl_fed.clients import Ditto, FedAvg
from pl_fed.clients.client_rounds import read_rates
from pl_fed.clients.module_optimizer import ModuleOptimizer
from pl_fed.engine.choice import COMPILED


class Net(LightningModule):
    """A net with an optimizer by a function of the module."""

    def __init__(self, build):
        super().__init__()
        self.net = mlp()
        self.build = build

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.build(self)


def build_one_model(build):
    """Return the module's optimizer, and a local one with a schedule, of the same parameters."""
    local = ModuleOptimizer(Net(build))
    return local, local([{"params": [*local.module.parameters()], "name": "global"}])


def test_rate_of_an_optimizer_that_finds_its_own_is_unknown():
    """Adafactor of transformers has the learning rate None with ``relative_step``."""
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "name": "global"}])
    optimizer.param_groups[0]["lr"] = None
    assert read_rates(optimizer, torch.ones(1), 2)["global"].isnan().tolist() == [True]


class Scaled(torch.optim.SGD):
    """An optimizer with an option that is an attribute, and no option of the groups."""

    def __init__(self, params, lr, scale):
        super().__init__(params, lr=lr)
        self.scale = scale


class Hidden(torch.optim.SGD):
    """An optimizer whose attribute has another name than the argument."""

    def __init__(self, params, scale):
        super().__init__(params, lr=0.1)
        self.factor = 2 * scale


def test_description_has_short_numbers():
    """The first rate of OneCycleLR with a peak of 0.003 is 0.00011999999999999988."""
    local, _ = build_one_model(
        lambda m: torch.optim.AdamW(m.parameters(), 0.00011999999999999988, foreach=True)
    )
    assert local.describe() == "AdamW(lr=0.00012, foreach=True) of the module"


def test_attributes_of_an_optimizer_are_those_of_the_module():
    _, optimizer = build_one_model(lambda m: Scaled(m.parameters(), 0.1, scale=3.0))
    assert (optimizer.scale, optimizer.param_groups[0]["lr"]) == (3.0, 0.1)

    def change(module):
        optimizer = Scaled(module.parameters(), 0.1, scale=3.0)
        optimizer.scale = optimizer.late = 5.0
        return optimizer

    _, optimizer = build_one_model(change)
    assert (optimizer.scale, optimizer.late) == (5.0, 5.0)


def test_optimizer_that_cannot_be_built_again_is_refused():
    with pytest.raises(
        ValueError, match=r"Expected Hidden of Net.configure_optimizers to be built"
    ):
        build_one_model(lambda m: Hidden(m.parameters(), scale=3.0))


def test_state_that_an_optimizer_begins_with_is_that_of_the_module():
    def build(module):
        first, *others = module.parameters()
        groups = [{"params": [first], "initial_accumulator_value": 0.5}, {"params": others}]
        return torch.optim.Adagrad(groups, lr=0.1)  # torch reads the value of the class alone

    _, optimizer = build_one_model(build)
    assert all((state["sum"] == 0).all() for state in optimizer.state.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=5),
        lambda optimizer: CyclicLR(optimizer, 0.1, 0.3, step_size_up=2),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_schedule_of_epochs_also_changes_the_momentum(kind, make):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def build(module):
        optimizer = kind(module.parameters(), lr=0.1, **options)
        return [optimizer], [make(optimizer)]

    local, optimizer = build_one_model(build)
    schedule = local.build_schedule(optimizer)
    ((expected,), (expected_schedule,)) = build(Net(None))
    name = "momentum" if options else "betas"
    assert optimizer.param_groups[0][name] == expected.param_groups[0][name]
    for step in range(4):
        if step == 2:  # a checkpoint
            saved, state = schedule.state_dict(), optimizer.state_dict()
            local, optimizer = build_one_model(build)
            schedule = local.build_schedule(optimizer)
            optimizer.load_state_dict(state)
            schedule.load_state_dict(saved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step of an optimizer
            schedule.step()
            expected_schedule.step()
        for option in ("lr", name):
            assert optimizer.param_groups[0][option] == expected.param_groups[0][option]


class Decay(LRScheduler):
    """A schedule of weight decay."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


def test_model_with_an_option_of_its_own_keeps_it():
    def build(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [Decay(optimizer)]

    local = ModuleOptimizer(Net(build))
    parameters = [nn.Parameter(p.detach().clone()) for p in local.module.parameters()]
    own = {"params": parameters, "name": "own", "weight_decay": 0.0}
    optimizer = local([{"params": [*local.module.parameters()], "name": "global"}, own])
    schedule = local.build_schedule(optimizer)
    optimizer.step()
    schedule.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0]


def test_rate_that_is_a_tensor_follows_the_schedule():
    def build(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.4))
        return [optimizer], [ExponentialLR(optimizer, 0.5)]

    local, optimizer = build_one_model(build)
    schedule = local.build_schedule(optimizer)
    for rate in (0.2, 0.1):
        optimizer.step()
        schedule.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rate)


def with_hooks(module):
    """Return an optimizer with gradients of norm 0.1, and weights of at most 0.3."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def normalize(optimizer, arguments, options):
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in gradients]))
        for grad in gradients:
            grad.mul_(0.1 / norm)

    def clamp(optimizer, arguments, options):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.detach().clamp_(-0.3, 0.3)

    optimizer.register_step_pre_hook(normalize)
    optimizer.register_step_post_hook(clamp)
    return optimizer


SIZES = [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked", *COMPILED])
def test_hooks_on_steps_are_called_for_each_client_and_model(engine):
    net, data = seeded(lambda: Net(with_hooks)), shared_out(classes(SIZES))
    start = nn.utils.parameters_to_vector(net.double().parameters()).detach()
    models = []
    for client in range(len(SIZES)):
        own = seeded(lambda: Net(with_hooks)).double()
        optimizer = own.configure_optimizers()
        index = data.clients.train.samples(client)
        F.cross_entropy(
            own.net(data.clients.inputs[index].double()), data.clients.targets[index]
        ).backward()
        optimizer.step()
        models.append(nn.utils.parameters_to_vector(own.parameters()).detach())
    algorithms = {"global": FedAvg(net), "personal": Ditto(net, lam=0.0)}
    for client in algorithms.values():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = run_rounds(client, data, rounds=1, engine=engine)
        words = [
            w for w in caught if "the local optimizer has hooks on its steps" in str(w.message)
        ]
        assert bool(words) == (engine != "one_by_one")
        torch.testing.assert_close(outcome.w, torch.stack(models).mean(0), rtol=0, atol=1e-12)
        if len(outcome.v):
            torch.testing.assert_close(outcome.v, torch.stack(models), rtol=0, atol=1e-12)
    assert float((start - models[0]).norm()) > 0.1
