"""Compiled steps: their numbers, the steps that are refused, and the warnings."""

import ctypes
import shutil
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from further_cases import covering, mark_further, mark_if
from small_federations import Recurrent, classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F  # noqa: N812

from pl_fed import EngineOptions, Federation
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine import LocalSettings, compiled
from pl_fed.engine.choice import COMPILED, STACKED
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform
from pl_fed.tasks import Task

pytestmark = pytest.mark.slow

RUN_EAGERLY = "Local steps run eagerly, as they cannot be compiled"
SIZES = [7, 3, 10, 1]  # in minibatches of 4: the first client has a full one
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="there is no C++ compiler",
)
each_compiled = pytest.mark.parametrize("engine", COMPILED)


@contextmanager
def assert_engine_warnings(*expected):
    """Check that the warnings about engines begin with these texts, one warning for each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    messages = [text for text in messages if "Local steps run" in text or "Clients are run" in text]
    assert len(messages) == len(expected), messages
    for message, beginning in zip(messages, expected):
        assert message.startswith(beginning), messages


# Steps that the compiler compiles


def sgd_with_all_options(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05)


def batch_norm_net():
    """A net whose second BatchNorm uses the statistics of the batch: its size must be known."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2),
        nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


class Scaled(nn.Module):
    """A net with a parameter without numbers, which comes first, and one without dimensions."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.last, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(x) * self.scale + self.empty.sum()


def dropout_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))


def scaled_dropout_net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), Scaled())


# Each takes ten seconds. Between them: both engines, one model and two, dropout, running
# statistics, a convolution, an optimizer with a state. A compiled stack with dropout has its own
# test below.
COMPILED_CASES = {  # engine, client, shape of a sample
    "FedAvg, stacked": (
        "stacked_compiled", lambda: FedAvg(seeded(Scaled), sgd_with_all_options), (4,)
    ),
    "Ditto with dropout, one by one": (
        "one_by_one_compiled",
        lambda: Ditto(seeded(scaled_dropout_net), 0.5, optimizer=sgd(0.1), local_epochs=3),
        (4,),
    ),
    "FedAvg with BatchNorm, one by one": (
        "one_by_one_compiled",
        lambda: FedAvg(seeded(batch_norm_net), optimizer=sgd(0.1), local_epochs=2),
        (2, 4, 4),
    ),
}  # fmt: skip


@needs_a_compiler
@pytest.mark.parametrize(
    "case", mark_further(COMPILED_CASES, {*COMPILED_CASES} - {"FedAvg, stacked"})
)
def test_compiled_run_equals_eager_run(case):
    engine, make, shape = COMPILED_CASES[case]
    client, data = make(), shared_out(classes(SIZES, shape))
    eager = run_rounds(client, data)
    with assert_engine_warnings():
        compiled = run_rounds(client, data, engine=engine, chunk_size=3)
    assert eager.distance(compiled) <= 1e-10


class Weighted(nn.Module):
    """A net with a constant: a buffer outside of its state dict, and so no running statistic."""

    def __init__(self, factor):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("factor", torch.linspace(1, factor, 3), persistent=False)

    def forward(self, x):
        """Return logits."""
        return self.layer(x) * self.factor


def count_cache_lookups(function):
    """Return the number of graphs from the compiler's cache, and of graphs that bypassed it."""
    names = ("fxgraph_cache_hit", "fxgraph_cache_bypass")
    before = [counters["inductor"][name] for name in names]
    function()
    return [counters["inductor"][name] - n for name, n in zip(names, before)]


@needs_a_compiler
def test_compiled_graph_is_reused_for_equal_constants_only(monkeypatch):
    data = shared_out(classes(SIZES))

    def assert_compiled_run_equals_eager_run(factor):
        client = FedAvg(seeded(lambda: Weighted(factor)), sgd(0.1))
        eager = run_rounds(client, data)
        compiled = run_rounds(client, data, engine="one_by_one_compiled")
        assert eager.distance(compiled) <= 1e-10

    assert_compiled_run_equals_eager_run(2.0)
    assert count_cache_lookups(lambda: assert_compiled_run_equals_eager_run(2.0)) == [1, 0]
    assert_compiled_run_equals_eager_run(3.0)
    monkeypatch.setattr(compiled, "_MAX_CACHED_CONSTANTS", 2)  # a lookup reads all constants
    assert count_cache_lookups(lambda: assert_compiled_run_equals_eager_run(2.0)) == [0, 1]


class ReportsDropout(FedAvg):
    """A client that reports the positions that its dropout keeps, as a number."""

    def training_step(self, batch, batch_idx):
        kept = self.global_model[0](torch.ones_like(batch.inputs)) > 0
        powers = 2.0 ** torch.arange(kept.shape[-1], dtype=batch.inputs.dtype)
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "kept": (kept * powers).sum() * (1 + batch_idx)}


@needs_a_compiler
def test_draws_of_compiled_dropout_are_bit_equal():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    data = shared_out(classes([8, 8, 8], (6,)))
    outcomes = [
        run_rounds(ReportsDropout(net, sgd(0.1)), data, engine=engine)
        for engine in ("one_by_one", "stacked_compiled")
    ]
    kept = [[float(report["train/kept"]) for report in outcome.reports] for outcome in outcomes]
    assert kept[0] == kept[1]
    assert kept[0][0] != kept[0][1]


@each_compiled
def test_every_full_minibatch_has_the_compiled_shapes_for_any_cohort(
    monkeypatch, uncompiled, engine
):
    answers, takes = [], compiled.CompiledStep.takes

    def record(step, inputs):
        answers.append(takes(step, inputs))
        return answers[-1]

    monkeypatch.setattr(compiled.CompiledStep, "takes", record)
    data = shared_out(classes([4, 8, 8, 16, 24, 12]))
    client = FedAvg(seeded(dropout_net), optimizer=sgd(0.1))
    run_rounds(client, data, sampler=Uniform(3), rounds=5, engine=engine)
    assert len(answers) > 20
    assert all(answers)


class Transposed(RandomLabels):
    """Byzantine clients whose inputs have another memory layout."""

    def poison(self, batch, context):
        """Return inputs with another memory layout, and random labels."""
        transposed = batch.inputs.T.contiguous().T
        assert transposed.stride() != batch.inputs.stride()
        return super().poison(batch._replace(inputs=transposed), context)


@each_compiled
def test_compiled_run_equals_eager_run_with_poisoned_inputs_of_another_layout(uncompiled, engine):
    data = shared_out(classes([8, 8, 8]))
    client, settings = FedAvg(seeded(mlp), optimizer=sgd(0.1)), {"attack": Transposed(), "ids": [1]}
    eager = run_rounds(client, data, **settings)
    compiled = run_rounds(client, data, engine=engine, **settings)
    assert eager.distance(compiled) <= 1e-10


# Steps that cannot be compiled


@each_compiled
def test_missing_compiler_is_reported_once(monkeypatch, engine):
    def fail(*_, **__):
        raise RuntimeError("No working C++ compiler found.\nA page of advice")

    monkeypatch.setattr(compiled, "compile_graph", fail)
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes(SIZES))
    with assert_engine_warnings(f"{RUN_EAGERLY}: No working C++ compiler found."):
        outcome = run_rounds(client, data, rounds=3, engine=engine, chunk_size=2)
    eager = engine.removesuffix("_compiled")
    assert outcome.distance(run_rounds(client, data, rounds=3, engine=eager, chunk_size=2)) == 0


@each_compiled
def test_compiled_step_with_wrong_numbers_is_detected(monkeypatch, engine):
    def compile_wrongly(graph, *_, **__):
        def run(weight, *tensors):
            gradients = graph(weight, *tensors)
            weight.mul_(1.1)
            return gradients

        return run

    monkeypatch.setattr(compiled, "compile_graph", compile_wrongly)
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes(SIZES))
    with assert_engine_warnings(
        f"{RUN_EAGERLY}: a compiled step gave other numbers than an eager one"
    ):
        outcome = run_rounds(client, data, engine=engine)
    assert outcome.distance(run_rounds(client, data)) <= 1e-10


class WithActivation(nn.Module):
    """A net with a function after its first layer."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x).tanh()))


def client_with(step, net=mlp):
    """Return a client that minimises ``step(client, loss, batch_idx)``."""

    class Changed(FedAvg):
        def training_step(self, batch, batch_idx):
            return step(self, super().training_step(batch, batch_idx), batch_idx)

    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.5]))
    client = Changed(seeded(net), optimizer=sgd(0.1), local_epochs=2, criterion=criterion)
    client.register_buffer("power", torch.tensor(1.5))
    return client


def identity(client, loss, batch_idx):
    return loss


REFUSED = {
    "a draw from torch's generator": (
        identity,
        lambda: WithActivation(lambda h: F.dropout(h, 0.5)),
    ),
    "a branch on the loss": (lambda c, loss, i: loss * 2 if loss > 1.1 else loss, mlp),
    "a number taken out": (lambda c, loss, i: loss * loss.item(), mlp),
    "a branch on the step": (lambda c, loss, i: loss * 3 if i == 1 else loss, mlp),
    "a table of steps": (lambda c, loss, i: loss * {0: 1.0, 1: 2.0}.get(int(i), 3.0), mlp),
    "a key of a dict": (lambda c, loss, i: loss * {k: k + 1 for k in range(9)}[i], mlp),
    "a number out of a buffer": (lambda c, loss, i: loss * float(c.power), mlp),
    "an array of numpy": (
        identity,
        lambda: WithActivation(lambda h: h * torch.from_numpy(h.detach().cpu().numpy())),
    ),
    "numpy's own function": (
        identity,
        lambda: WithActivation(lambda h: h * torch.as_tensor(np.tanh(np.asarray(h.detach())))),
    ),
    "a list": (
        identity,
        lambda: WithActivation(lambda h: h * torch.tensor(h.detach().tolist(), dtype=h.dtype)),
    ),
}


@pytest.mark.parametrize(("case", "engine"), covering(REFUSED, COMPILED))
def test_refused_step_is_reported_once_and_runs_eagerly(uncompiled, engine, case):
    step, net = REFUSED[case]
    client, data = client_with(step, net), shared_out(classes([3, *SIZES]))
    torch.manual_seed(1)
    expected = run_rounds(client, data, rounds=3)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_rounds(client, data, rounds=3, engine=engine, chunk_size=1)
    assert sum(RUN_EAGERLY in str(warning.message) for warning in caught) == 1
    assert outcome.distance(expected) <= 1e-10
    assert torch.equal(torch.random.get_rng_state(), generator_state)


def test_reason_of_a_step_that_reads_the_buffer_that_it_changes_is_this_buffer():
    client = client_with(lambda c, loss, i: loss * c.power.add_(1.0))
    reason = rf"{RUN_EAGERLY}: training changes a buffer .*\(power\)"
    with pytest.warns(UserWarning, match=reason):
        run_rounds(client, shared_out(classes([4])), rounds=1, engine="one_by_one_compiled")


def test_error_in_the_objective_is_raised():
    def broken(client, loss, batch_idx):
        raise KeyError("mistake")

    data = shared_out(classes(SIZES))
    warns = pytest.warns(UserWarning, match=f"{RUN_EAGERLY}: KeyError 'mistake'")
    with warns, pytest.raises(KeyError, match="mistake"):
        run_rounds(client_with(broken), data, engine="one_by_one_compiled")


class StubTrainer:
    """The part of a trainer that a client reads."""

    current_epoch = 0


def run_changing_rounds(client, engine, change, rounds=6, autocast=None, dtype=torch.float64):
    """Run rounds, each after ``change(client, round)``; return the global row and the engine."""
    client = client.to(dtype)
    client.trainer = trainer = StubTrainer()
    federation = Federation(All(), engine=EngineOptions(engine), seed=0)
    change(client, 0)  # the algorithm is tried when the federation is set up
    settings = RunSettings(LocalSettings(autocast or nullcontext))
    federation.setup(client, shared_out(classes(SIZES)), "fit", settings=settings)
    client.train()
    optimizer = client.configure_optimizers()
    for round in range(rounds):
        trainer.current_epoch = round
        change(client, round)
        federation.run_round(round, optimizer)
    assert client.trainer is trainer
    return client.row("global").data.clone(), federation.engine_choice.current


def set_private(client, round):
    client._scale = 1.0 + round


def set_numpy(client, round):
    client.scale = np.linspace(1, 2, 9)[round]


def set_options(client, round):
    client.options = type("Options", (), {"__repr__": lambda self: str(self.scale)})()
    client.options.scale = 1.0 + round


CHANGED = {
    "a number": (lambda c, loss, i: loss * c.scale, lambda c, r: setattr(c, "scale", 1.0 + r)),
    "a private number": (lambda c, loss, i: loss * c._scale, set_private),
    "numpy's number": (lambda c, loss, i: loss * float(c.scale), set_numpy),
    "a list": (
        lambda c, loss, i: loss * sum(c.scales), lambda c, r: setattr(c, "scales", [1.0, r]),
    ),
    "an object": (lambda c, loss, i: loss * c.options.scale, set_options),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *(
            mark_if(case not in ("a private number", "an object"), case, "one_by_one_compiled")
            for case in CHANGED
        ),
        ("a number", "stacked_compiled"),
    ],
)
def test_step_that_changes_every_round_is_compiled_four_times_and_then_runs_eagerly(
    uncompiled, engine, case
):
    step, change = CHANGED[case]
    expected, _ = run_changing_rounds(client_with(step), "one_by_one", change)
    with assert_engine_warnings(
        f"{RUN_EAGERLY}: shapes, options or attributes of the client change"
    ):
        row, current = run_changing_rounds(client_with(step), engine, change)
    assert len(uncompiled) == 4
    assert current == engine.removesuffix("_compiled")
    assert (row - expected).abs().max() <= 1e-10


@each_compiled
def test_step_that_changes_once_is_compiled_again(uncompiled, engine):
    step, _ = CHANGED["a number"]

    def change(client, round):
        client.scale = 2.0 if round > 2 else 1.0

    expected, _ = run_changing_rounds(client_with(step), "one_by_one", change, rounds=5)
    with assert_engine_warnings():
        row, current = run_changing_rounds(client_with(step), engine, change, rounds=5)
    assert (len(uncompiled), current) == (2, engine)
    assert (row - expected).abs().max() <= 1e-10


class Tempered(Task):
    """A task of one's own whose temperature may change."""

    def __init__(self, temperature=1.0):
        self.temperature = temperature

    def losses(self, outputs, targets):
        return F.cross_entropy(outputs / self.temperature, targets, reduction="none")


def replace_weights(client, round):
    client.criterion.weight = torch.tensor([1.0, 1.0 + (round > 1), 2.0], dtype=torch.float64)


def replace_buffer(client, round):
    client.power = torch.tensor(1.0 + (round > 1), dtype=torch.float64)


def change_task(client, round):
    client.task.temperature = 1.0 + (round > 1)


REPLACED = {
    "the weights of classes": (lambda: client_with(identity), replace_weights),
    "a buffer": (lambda: client_with(lambda c, loss, i: loss * c.power), replace_buffer),
    "a value of a task": (
        lambda: FedAvg(seeded(mlp), optimizer=sgd(0.1), task=Tempered(), local_steps=2),
        change_task,
    ),
}


@pytest.mark.parametrize(("case", "engine"), covering(REPLACED, COMPILED))
def test_step_follows_tensors_that_a_callback_replaces(uncompiled, engine, case):
    make, change = REPLACED[case]
    expected, _ = run_changing_rounds(make(), "one_by_one", change, rounds=3)
    with assert_engine_warnings():
        row, current = run_changing_rounds(make(), engine, change, rounds=3)
    assert current == engine
    assert len(uncompiled) <= 3
    assert (row - expected).abs().max() <= 1e-10


def read_trainer(client, loss, batch_idx):
    return loss * (1 + client.trainer.current_epoch)


def read_epoch(client, loss, batch_idx):
    return loss * (1 + client.current_epoch)


@pytest.mark.parametrize(("step", "engine"), covering([read_trainer, read_epoch], COMPILED))
def test_step_that_reads_the_trainer_runs_eagerly(uncompiled, engine, step):
    def keep(client, round):
        pass

    expected, _ = run_changing_rounds(client_with(step), "one_by_one", keep, rounds=3)
    with assert_engine_warnings(
        f"{RUN_EAGERLY}: `training_step` reads the trainer (current_epoch)"
    ):
        row, _ = run_changing_rounds(client_with(step), engine, keep, rounds=3)
    assert (row - expected).abs().max() <= 1e-10


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize(
    ("step", "engine"),
    covering([read_trainer, CHANGED["a number"][0]], STACKED),
    ids=["epoch-stacked", "epoch-stacked_compiled", "number-stacked", "number-stacked_compiled"],
)
def test_stack_in_mixed_precision_follows_changes_of_the_step(uncompiled, engine, step):
    """In mixed precision, a stack is traced for one client, even if it is not compiled."""
    settings = {"autocast": bfloat16, "dtype": torch.float32}
    change = CHANGED["a number"][1]
    expected, _ = run_changing_rounds(client_with(step), "one_by_one", change, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row, current = run_changing_rounds(client_with(step), engine, change, **settings)
    constant, _ = run_changing_rounds(client_with(step), "one_by_one", reset, **settings)
    assert (row - expected).abs().max() < 5e-2 * (expected - constant).abs().max() + 2e-2
    assert current == ("one_by_one" if step is read_trainer else "stacked")


def reset(client, round):
    """Keep the numbers of the first round."""
    client.scale = 1.0
    client.trainer.current_epoch = 0


@pytest.mark.parametrize("engine", ["one_by_one", "stacked", *COMPILED])
def test_new_tensors_of_a_step_have_the_precision_of_the_run(uncompiled, engine):
    """Double precision sets torch's default dtype around the steps."""

    @contextmanager
    def double():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    dtypes = set()

    def record_dtype(client, loss, batch_idx):
        dtypes.add(torch.zeros(1).dtype)
        return loss

    data = shared_out(classes(SIZES))
    run_rounds(client_with(record_dtype), data, engine=engine, autocast=double)
    assert dtypes == {torch.float64}


class ReadsMemory(nn.Module):
    """A net that reads its input's memory, invisibly for a trace."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = x.contiguous()
        content = bytearray(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()))
        return self.last(x + torch.frombuffer(content, dtype=x.dtype).view(x.shape))


def test_minibatch_that_became_a_constant_is_detected():
    """The compiled step is compared on other inputs than those of the trace."""
    data = shared_out(classes([8, 8]), batch_size=4)

    def client():
        return FedAvg(seeded(ReadsMemory), optimizer=sgd(0.1), local_epochs=2)

    expected = run_rounds(client(), data, rounds=2)
    with pytest.warns(UserWarning, match=RUN_EAGERLY):
        outcome = run_rounds(client(), data, rounds=2, engine="one_by_one_compiled")
    assert outcome.distance(expected) <= 1e-10


def test_parameters_without_dimensions_or_numbers_are_trained(uncompiled):
    """``COMPILED_CASES`` compile such parameters with either engine."""
    data = shared_out(classes([8, 8]), batch_size=4)

    def run(net, engine="one_by_one"):
        return run_rounds(Ditto(seeded(net), optimizer=sgd(0.1)), data, rounds=2, engine=engine)

    outcome = run(Scaled)
    for engine in ("stacked", *COMPILED):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*stacked|.*compiled")
            assert outcome.distance(run(Scaled, engine)) <= 1e-10, engine
    unscaled = run(lambda: Scaled().last)
    assert not torch.equal(outcome.v[:, :-1], unscaled.v), "the scale is trained"
    assert (outcome.v[:, -1] != 1.5).all()
    assert (outcome.v - outcome.v[:1]).abs().max() > 0


class Attentive(nn.Module):
    """A net with attention, an operator that may draw, but does not without dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
        self.attention, self.drop = nn.MultiheadAttention(4, 2, batch_first=True), nn.Dropout(0.0)

    def forward(self, x):
        x = self.first(x.view(len(x), 2, 2))
        return self.last(self.drop(self.attention(x, x, x, need_weights=False)[0]).mean(1))


@needs_a_compiler
@pytest.mark.exhaustive
def test_recurrent_layers_stay_compiled():
    assert_net_stays_compiled(Recurrent, "one_by_one_compiled")


@each_compiled
def test_attention_stays_traced(uncompiled, engine):
    """The trace alone decides whether an operator that may draw is compiled."""
    assert_net_stays_compiled(Attentive, engine)
    assert uncompiled


def assert_net_stays_compiled(net, engine):
    """Check the numbers of a compiled engine, and that it does not fall back."""
    client = FedAvg(seeded(net), optimizer=sgd(0.5), local_steps=3)
    data = shared_out(classes(SIZES))
    with assert_engine_warnings():
        outcome = run_rounds(client, data, rounds=6, engine=engine)
    assert outcome.distance(run_rounds(client, data, rounds=6)) < 1e-10


def test_cuda_graphs_may_change_their_inputs(monkeypatch):
    """Torch captures a CUDA graph only if all inputs that it changes are static."""
    from torch._inductor import compile_fx

    seen, compile_inner = [], compile_fx._compile_fx_inner

    def note(graph, inputs, **options):
        compiled = compile_inner(graph, inputs, **options)
        seen.append((set(options["static_input_idxs"]), set(compiled.mutated_input_idxs)))
        return compiled

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", note)
    net = seeded(lambda: nn.Linear(4, 3))
    client = FedAvg(net, optimizer=sgd(0.1, momentum=0.5), local_epochs=2)
    data = shared_out(classes([5, 2, 3]))
    expected = run_rounds(client, data)
    settings = {"engine": "stacked_compiled", "chunk_size": 3}
    with torch._functorch.config.patch("enable_autograd_cache", False):
        outcome = run_rounds(client, data, compile_mode="reduce-overhead", **settings)
    assert outcome.distance(expected) <= 1e-10
    ((static, mutated),) = seen
    assert mutated
    assert mutated <= static


# Code that runs in the backward pass


class Checkpointed(nn.Module):
    """A net that computes its hidden layer again in the backward pass."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.requires_grad_() if self.use_reentrant else x
        hidden = torch.utils.checkpoint.checkpoint(
            lambda inputs: self.first(inputs).tanh(), x, use_reentrant=self.use_reentrant
        )
        return self.last(hidden)


class Hooked(nn.Module):
    """A net with a hook that reads a parameter in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * self.last.weight.detach().sum())
        return self.last(hidden)


class Recomputing(torch.autograd.Function):
    """A product that reads the factor from its module in the backward pass."""

    @staticmethod
    def forward(context, x, module):
        context.module = module
        return x * module.factor.detach()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.module.factor.detach(), None


class WithFunction(nn.Module):
    """A net whose own autograd function reads a parameter in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.factor = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return Recomputing.apply(self.first(x), self) + 0 * self.factor


@pytest.mark.filterwarnings("ignore:Local steps run eagerly")
@pytest.mark.filterwarnings("ignore:Clients are run one by one")
@pytest.mark.parametrize("make_net", [Checkpointed, Hooked, WithFunction], ids=lambda m: m.__name__)
def test_backward_pass_reads_the_weights_of_the_client(uncompiled, make_net):
    """The engine one_by_one trains the module itself, as plain PyTorch does."""
    client = FedAvg(seeded(make_net), optimizer=sgd(0.5), local_steps=4)
    data = shared_out(classes([8, 8, 8]))
    expected = run_rounds(client, data, rounds=3)
    for engine in ("stacked", *COMPILED):
        assert run_rounds(client, data, rounds=3, engine=engine).distance(expected) <= 1e-10
