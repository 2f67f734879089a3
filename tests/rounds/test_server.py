"""The server: FedAvg to the bit, FedOpt, and what both remember through a checkpoint."""

import copy
import warnings

import pytest
import torch
from tables import table_test

from pl_fed.aggregators import Aggregator, Mean, Median
from pl_fed.optimizers import Yogi
from pl_fed.rounds.server import Server
from pl_fed.types import RoundContext


class Momentum(Aggregator):
    """A mean that remembers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(3))

    def forward(self, uploads, weights, context):
        self.memory = 0.5 * self.memory + uploads.mean(0)
        return self.memory.clone()

    def max_byzantine(self, num_uploads):
        return 0


class Longer(Momentum):
    """The same with a memory of another length."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(5)


def sgd(**options):
    return lambda params: torch.optim.SGD(params, **options)


OPTIMIZERS = {
    "SGD": sgd(lr=1.0),
    "momentum": sgd(lr=0.5, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Yogi": lambda params: Yogi(params, lr=0.1),
}


def make_uploads(round, dtype=torch.float32):
    draw = torch.Generator().manual_seed(round)
    return torch.randn(4, 3, generator=draw, dtype=torch.float64).to(dtype)


def step(server, row, round=0, before=lambda _: None):
    return server.step(row, make_uploads(round, row.dtype), torch.ones(4), RoundContext(), before)


class Slowing(torch.optim.SGD):
    """Counts its steps in an attribute, which no state dict has."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.param_groups[0]["lr"] = 1 / self.steps
        super().step(closure)


@pytest.mark.parametrize("build", [*OPTIMIZERS.values(), Slowing], ids=[*OPTIMIZERS, "Slowing"])
def test_optimizer_with_a_memory_of_its_own_gets_a_warning(build):
    """A resumed run would go on as from its first step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Server(Mean(), build).warn_of_lost_memory()
    texts = [str(warning.message) for warning in caught]
    assert [text.partition(" keeps")[0] for text in texts] == (
        ["Slowing of `federation.server_optimizer`"] if build is Slowing else []
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_with_learning_rate_1_is_fedavg_to_the_bit(dtype):
    server = Server(Mean(), sgd(lr=1.0))
    row = torch.tensor([1.0, -2.0, 1e-3], dtype=dtype)
    for round in range(5):
        before = row.clone()
        update = step(server, row, round)
        mean = make_uploads(round, dtype).mean(0)
        assert torch.equal(update, mean)
        assert torch.equal(row, before + mean)


def test_step_leaves_the_uploads_unchanged():
    uploads = make_uploads(0)
    saved = uploads.clone()
    Server(Mean(), sgd(lr=1.0)).step(
        torch.zeros(3), uploads, torch.ones(4), RoundContext(), lambda _: None
    )
    assert torch.equal(uploads, saved)


def test_weights_and_context_reach_the_aggregator():
    server = Server(Mean("samples"), sgd(lr=1.0))
    row = torch.zeros(1)
    uploads, weights = torch.tensor([[1.0], [5.0]]), torch.tensor([3, 1])
    server.step(row, uploads, weights, RoundContext(), lambda _: None)
    assert row.tolist() == [2.0]


def test_the_pseudo_gradient_is_the_negative_update():
    calls = []
    row = torch.zeros(3)

    def look(optimizer):
        (parameter,) = optimizer.param_groups[0]["params"]
        calls.append((parameter.grad.clone(), parameter.detach().clone(), row.clone()))

    step(Server(Mean(), sgd(lr=1.0)), row, before=look)
    ((gradient, parameter, before),) = calls
    assert torch.equal(gradient, -make_uploads(0).mean(0))
    assert parameter.tolist() == before.tolist() == [0.0] * 3, "it is called before the step"


def test_a_hook_may_change_the_gradient():
    """As gradient clipping on the server would."""
    row = torch.zeros(3)

    def halve(optimizer):
        optimizer.param_groups[0]["params"][0].grad.mul_(0.5)

    step(Server(Mean(), sgd(lr=1.0)), row, before=halve)
    assert torch.equal(row, make_uploads(0).mean(0) / 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fedopt_equals_the_optimizer_on_the_pseudo_gradient(name):
    server, row = Server(Mean(), OPTIMIZERS[name]), torch.ones(3)
    parameter = torch.nn.Parameter(torch.ones(3))
    alone = OPTIMIZERS[name]([parameter])
    for round in range(4):
        step(server, row, round)
        parameter.grad = -make_uploads(round).mean(0)
        alone.step()
        assert torch.equal(row, parameter.data)


def test_step_starts_from_a_model_moved_by_others():
    server, row = Server(Mean(), sgd(lr=1.0)), torch.zeros(3)
    step(server, row)
    row.fill_(7.0)  # as a checkpoint does when it is loaded
    step(server, row, 1)
    assert torch.equal(row, torch.full((3,), 7.0) + make_uploads(1).mean(0))


def save_and_load(state, folder):
    torch.save(state, folder / "server.ckpt")
    return torch.load(folder / "server.ckpt", weights_only=True)


@pytest.mark.parametrize("saved_at", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_server_equals_uninterrupted_server(tmp_path, name, saved_at):
    server, row = Server(Momentum(), OPTIMIZERS[name]), torch.ones(3)
    for round in range(6):
        if round == saved_at:
            state, saved = save_and_load(server.state_dict(row), tmp_path), row.clone()
        step(server, row, round)
    resumed = Server(Momentum(), OPTIMIZERS[name])
    resumed.load_state_dict(state)
    for round in range(saved_at, 6):
        step(resumed, saved, round)
    assert torch.equal(saved, row)


def test_loaded_state_is_saved_again_before_the_first_step(tmp_path):
    server, row = Server(Momentum(), OPTIMIZERS["Adam"]), torch.ones(3)
    step(server, row)
    state = save_and_load(server.state_dict(row), tmp_path)
    again = Server(Momentum(), OPTIMIZERS["Adam"])
    again.load_state_dict(state)
    second = again.state_dict(row)["optimizer"]
    assert second["state"][0]["step"] == 1
    assert torch.equal(second["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_state_contains_aggregator_and_optimizer():
    server, row = Server(Momentum(), OPTIMIZERS["momentum"]), torch.ones(3)
    step(server, row)
    mean = make_uploads(0).mean(0)
    state = server.state_dict(row)
    assert torch.equal(state["aggregator"]["memory"], mean)
    assert torch.equal(state["optimizer"]["state"][0]["momentum_buffer"], -mean)


def test_reset_clears_aggregator_and_optimizer():
    """As for a second fit with the same federation."""
    server, row = Server(Momentum(), OPTIMIZERS["momentum"]), torch.zeros(3)
    step(server, row)
    step(server, row, 1)
    server.reset()
    again, fresh = torch.zeros(3), torch.zeros(3)
    step(server, again)
    step(Server(Momentum(), OPTIMIZERS["momentum"]), fresh)
    assert torch.equal(again, fresh)


def test_reset_clears_a_loaded_state_before_its_use():
    server, row = Server(Momentum(), OPTIMIZERS["momentum"]), torch.zeros(3)
    step(server, row)
    state = copy.deepcopy(server.state_dict(row))
    server.load_state_dict(state)
    server.reset()
    assert server.state_dict(row)["optimizer"]["state"] == {}
    assert server.state_dict(row)["aggregator"]["memory"].tolist() == [0.0] * 3


def test_state_of_another_optimizer_is_refused():
    state = Server(Mean(), OPTIMIZERS["Adam"]).state_dict(torch.ones(3))
    with pytest.raises(ValueError, match="server optimizer SGD but got one with Adam"):
        Server(Mean(), OPTIMIZERS["SGD"]).load_state_dict(state)


@table_test(
    ("aggregator", "words"),
    [
        (Mean(), "aggregator Mean but got one with Momentum and its memory: restore"),
        (Longer(), "aggregator Longer but got one with Mom"),
    ],
)
def test_state_of_another_aggregator_is_refused(aggregator, words):
    state = Server(Momentum(), sgd(lr=1.0)).state_dict(torch.ones(3))
    with pytest.raises(ValueError, match=words):
        Server(aggregator, sgd(lr=1.0)).load_state_dict(state)


def test_aggregator_without_a_memory_is_no_start_for_one_with_a_memory():
    state = Server(Mean(), sgd(lr=1.0)).state_dict(torch.ones(3))
    with pytest.raises(ValueError, match=r"got one with Mean without a memory: restore that agg"):
        Server(Momentum(), sgd(lr=1.0)).load_state_dict(state)


def test_stateless_aggregators_may_be_exchanged():
    state = Server(Mean(), sgd(lr=1.0)).state_dict(torch.ones(3))
    Server(Median(), sgd(lr=1.0)).load_state_dict(state)


def test_server_created_in_inference_mode_steps_outside():
    """A validation before the fit saves or asks for the state within it."""
    server = Server(Mean(), OPTIMIZERS["Adam"])
    with torch.inference_mode():
        row = torch.zeros(3)
        server.state_dict(row)
    step(server, torch.zeros(3))


def test_an_optimizer_that_needs_a_closure_is_refused():
    match = "Expected argument `server_optimizer` to build .* but got LBFGS, which needs a closure"
    with pytest.raises(ValueError, match=match):
        Server(Mean(), lambda params: torch.optim.LBFGS(params))


@pytest.mark.parametrize(
    ("optimizer", "adds"),
    [
        (sgd(lr=1.0), True),
        (sgd(lr=0.9), False),
        (sgd(lr=1.0, momentum=0.5), False),
        (sgd(lr=1.0, weight_decay=0.1), False),
        (sgd(lr=1.0, maximize=True), False),
        (lambda params: torch.optim.Adam(params, lr=1.0), False),
    ],
)
def test_only_adds_is_true_if_a_step_adds_the_merged_update(optimizer, adds):
    server, row, update = Server(Mean(), optimizer), torch.ones(3), torch.tensor([[1.0, -2.0, 3.0]])
    assert server.only_adds == adds
    server.step(row, update, torch.ones(1), RoundContext(), lambda _: None)
    assert not adds or torch.equal(row, 1 + update[0])
