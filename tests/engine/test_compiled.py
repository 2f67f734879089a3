"""Steps that are compiled: that they are, what is refused, and what is said then."""

import ctypes
import shutil
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from small_federations import Recurrent, classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F  # noqa: N812

from pl_fed import EngineOptions, Federation
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine import LocalSettings, compiled
from pl_fed.engine.choice import COMPILED, STACKED
from pl_fed.models import DittoCelebaCNN
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform

pytestmark = pytest.mark.slow

SAYING = "Local steps run eagerly, as they cannot be compiled"
SIZES = [7, 3, 10, 1]  # with batches of 4, the first client has a whole one
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="there is no C++ compiler",
)
each_compiled = pytest.mark.parametrize("engine", COMPILED)


@contextmanager
def saying(*expected):
    """What is said of engines is this, word for word in its beginning, and each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught]
    said = [each for each in said if "Local steps run" in each or "Clients are run" in each]
    assert len(said) == len(expected), said
    for one, other in zip(said, expected):
        assert one.startswith(other), said


# Compiled in truth


def all_options(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05)


def batch_norm_net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )


def dropout_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))


TRUE = {  # engine, client, shape of a sample
    "FedAvg, stacked": ("stacked_compiled", lambda: FedAvg(seeded(mlp), all_options), (4,)),
    "Ditto with dropout, stacked": (
        "stacked_compiled",
        lambda: Ditto(seeded(dropout_net), 0.5, optimizer=sgd(0.1), personal_epochs=2),
        (4,),
    ),
    "Ditto with dropout, one by one": (
        "one_by_one_compiled",
        lambda: Ditto(seeded(dropout_net), 0.5, optimizer=sgd(0.1), local_epochs=3),
        (4,),
    ),
    "FedAvg with BatchNorm, one by one": (
        "one_by_one_compiled",
        lambda: FedAvg(seeded(batch_norm_net), optimizer=sgd(0.1), local_epochs=2),
        (2, 4, 4),
    ),
    "FedAvg with statistics of the batch, one by one": (  # whose shape has to be known
        "one_by_one_compiled",
        lambda: FedAvg(seeded(lambda: DittoCelebaCNN(2, 3, image_size=16)), sgd(0.01)),
        (2, 16, 16),
    ),
}


@needs_a_compiler
@pytest.mark.parametrize("case", TRUE)
def test_a_compiled_run_gives_the_numbers_of_an_eager_one(case):
    engine, make, shape = TRUE[case]
    client, data = make(), shared_out(classes(SIZES, shape))
    eager = run_rounds(client, data)
    with saying():
        compiled = run_rounds(client, data, engine=engine, chunk_size=3)
    assert eager.distance(compiled) <= 1e-10


class Weighted(nn.Module):
    """A net with a constant: a buffer that is not saved, and so no running statistic."""

    def __init__(self, factor):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("factor", torch.linspace(1, factor, 3), persistent=False)

    def forward(self, x):
        """Return logits."""
        return self.layer(x) * self.factor


def found(function):
    """How many graphs were found as they had been compiled before, and how many not looked for."""
    names = ("fxgraph_cache_hit", "fxgraph_cache_bypass")
    before = [counters["inductor"][name] for name in names]
    function()
    return [counters["inductor"][name] - n for name, n in zip(names, before)]


@needs_a_compiler
def test_what_was_compiled_is_found_again_with_the_same_constants_only(monkeypatch):
    data = shared_out(classes(SIZES))

    def agrees(factor):
        client = FedAvg(seeded(lambda: Weighted(factor)), sgd(0.1))
        eager = run_rounds(client, data)
        compiled = run_rounds(client, data, engine="one_by_one_compiled")
        assert eager.distance(compiled) <= 1e-10

    agrees(2.0)
    assert found(lambda: agrees(2.0)) == [1, 0]
    agrees(3.0)  # with its own
    monkeypatch.setattr(compiled, "_MAX_CACHED_CONSTANTS", 2)
    assert found(lambda: agrees(2.0)) == [0, 1], "to look at many numbers takes long"


class Seen(FedAvg):
    """A client that reports which numbers its dropout leaves."""

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
        run_rounds(Seen(net, sgd(0.1)), data, engine=engine)
        for engine in ("one_by_one", "stacked_compiled")
    ]
    kept = [[float(report["train/kept"]) for report in each.reports] for each in outcomes]
    assert kept[0] == kept[1]
    assert kept[0][0] != kept[0][1]


@each_compiled
def test_whatever_the_cohort_is_inputs_are_as_they_were_compiled_for(
    monkeypatch, uncompiled, engine
):
    taken, takes = [], compiled.CompiledStep.takes

    def noted(step, inputs):
        taken.append(takes(step, inputs))
        return taken[-1]

    monkeypatch.setattr(compiled.CompiledStep, "takes", noted)
    data = shared_out(classes([4, 8, 8, 16, 24, 12]))
    how = {"sampler": Uniform(3), "rounds": 5, "engine": engine}
    run_rounds(FedAvg(seeded(dropout_net), optimizer=sgd(0.1)), data, **how)
    assert len(taken) > 20
    assert all(taken)


class Transposed(RandomLabels):
    """Byzantine clients whose inputs lie otherwise."""

    def poison(self, batch, context):
        """Give inputs of another order in memory, and other labels."""
        other = batch.inputs.T.contiguous().T
        assert other.stride() != batch.inputs.stride()
        return super().poison(batch._replace(inputs=other), context)


@each_compiled
def test_what_an_attack_gives_may_lie_otherwise(uncompiled, engine):
    data = shared_out(classes([8, 8, 8]))
    how = {"attack": Transposed(), "ids": [1]}
    eager = run_rounds(FedAvg(seeded(mlp), optimizer=sgd(0.1)), data, **how)
    compiled = run_rounds(FedAvg(seeded(mlp), optimizer=sgd(0.1)), data, engine=engine, **how)
    assert eager.distance(compiled) <= 1e-10


# What cannot be compiled


@each_compiled
def test_without_a_compiler_it_says_so_once(monkeypatch, engine):
    def none(*_, **__):
        raise RuntimeError("No working C++ compiler found.\nA page of advice")

    monkeypatch.setattr(compiled, "compile_graph", none)
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes(SIZES))
    with saying(f"{SAYING}: No working C++ compiler found."):
        outcome = run_rounds(client, data, rounds=3, engine=engine, chunk_size=2)
    eager = engine.removesuffix("_compiled")
    assert outcome.distance(run_rounds(client, data, rounds=3, engine=eager, chunk_size=2)) == 0


@each_compiled
def test_a_compiled_step_with_other_numbers_is_noticed(monkeypatch, engine):
    def wrong(graph, *_, **__):
        def run(weight, *tensors):
            gradients = graph(weight, *tensors)
            weight.mul_(1.1)
            return gradients

        return run

    monkeypatch.setattr(compiled, "compile_graph", wrong)
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes(SIZES))
    with saying(f"{SAYING}: a compiled step gave other numbers than an eager one"):
        outcome = run_rounds(client, data, engine=engine)
    assert outcome.distance(run_rounds(client, data)) <= 1e-10


class After(nn.Module):
    """A net with a function behind its first layer."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x).tanh()))


def client_with(step, net=mlp):
    """A client whose loss is changed by ``step(client, loss, batch_idx)``."""

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
    "a draw from torch's generator": (identity, lambda: After(lambda h: F.dropout(h, 0.5))),
    "a branch on the loss": (lambda c, loss, i: loss * 2 if loss > 1.1 else loss, mlp),
    "a number taken out": (lambda c, loss, i: loss * loss.item(), mlp),
    "a branch on the step": (lambda c, loss, i: loss * 3 if i == 1 else loss, mlp),
    "a table of steps": (lambda c, loss, i: loss * {0: 1.0, 1: 2.0}.get(int(i), 3.0), mlp),
    "a key of a dict": (lambda c, loss, i: loss * {k: k + 1 for k in range(9)}[i], mlp),
    "a number out of a buffer": (lambda c, loss, i: loss * float(c.power), mlp),
    "an array of numpy": (
        identity,
        lambda: After(lambda h: h * torch.from_numpy(h.detach().cpu().numpy())),
    ),
    "numpy's own function": (
        identity,
        lambda: After(lambda h: h * torch.as_tensor(np.tanh(np.asarray(h.detach())))),
    ),
    "a list": (
        identity,
        lambda: After(lambda h: h * torch.tensor(h.detach().tolist(), dtype=h.dtype)),
    ),
}


@each_compiled
@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_right(uncompiled, engine, case):
    step, net = REFUSED[case]
    client, data = client_with(step, net), shared_out(classes([3, *SIZES]))
    torch.manual_seed(1)
    expected = run_rounds(client, data, rounds=3)
    drawn = torch.random.get_rng_state()
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_rounds(client, data, rounds=3, engine=engine, chunk_size=1)
    assert len([each for each in caught if SAYING in str(each.message)]) == 1
    assert outcome.distance(expected) <= 1e-10
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_an_error_in_the_objective_is_not_hidden():
    def broken(client, loss, batch_idx):
        raise KeyError("mistake")

    data = shared_out(classes(SIZES))
    said = pytest.warns(UserWarning, match=f"{SAYING}: KeyError 'mistake'")
    with said, pytest.raises(KeyError, match="mistake"):
        run_rounds(client_with(broken), data, engine="one_by_one_compiled")


class Trainerlike:
    """As much of a trainer as a client reads."""

    current_epoch = 0


def rounds_of(client, engine, change, rounds=6, autocast=None, dtype=torch.float64):
    """Run rounds before each of which something of the client is changed; return the rows."""
    client = client.to(dtype)
    client.trainer = trainer = Trainerlike()
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


@each_compiled
@pytest.mark.parametrize("case", CHANGED)
def test_what_changes_every_round_is_compiled_four_times_and_then_run_eagerly(
    uncompiled, engine, case
):
    step, change = CHANGED[case]
    expected, _ = rounds_of(client_with(step), "one_by_one", change)
    with saying(f"{SAYING}: shapes, options or attributes of the client change"):
        row, current = rounds_of(client_with(step), engine, change)
    assert len(uncompiled) == 4
    assert current == engine.removesuffix("_compiled")
    assert (row - expected).abs().max() <= 1e-10


@each_compiled
def test_what_changes_once_is_compiled_anew(uncompiled, engine):
    step, _ = CHANGED["a number"]

    def change(client, round):
        client.scale = 2.0 if round > 2 else 1.0

    expected, _ = rounds_of(client_with(step), "one_by_one", change)
    with saying():
        row, current = rounds_of(client_with(step), engine, change)
    assert (len(uncompiled), current) == (2, engine)
    assert (row - expected).abs().max() <= 1e-10


def read_trainer(client, loss, batch_idx):
    return loss * (1 + client.trainer.current_epoch)


def read_epoch(client, loss, batch_idx):
    return loss * (1 + client.current_epoch)


@each_compiled
@pytest.mark.parametrize("step", [read_trainer, read_epoch])
def test_a_step_that_reads_the_trainer_is_run_eagerly(uncompiled, engine, step):
    def nothing(client, round):
        pass

    expected, _ = rounds_of(client_with(step), "one_by_one", nothing, rounds=3)
    with saying(f"{SAYING}: `training_step` reads the trainer (current_epoch)"):
        row, _ = rounds_of(client_with(step), engine, nothing, rounds=3)
    assert (row - expected).abs().max() <= 1e-10


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("engine", STACKED)
@pytest.mark.parametrize("step", [read_trainer, CHANGED["a number"][0]], ids=["epoch", "number"])
def test_a_stack_in_mixed_precision_follows_what_changes_too(uncompiled, engine, step):
    """It is traced for one client, even where it is not compiled."""
    how = {"change": CHANGED["a number"][1], "autocast": bfloat16, "dtype": torch.float32}
    expected, _ = rounds_of(client_with(step), "one_by_one", **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row, current = rounds_of(client_with(step), engine, **how)
    still, _ = rounds_of(client_with(step), "one_by_one", **{**how, "change": hold})
    assert (row - expected).abs().max() < 5e-2 * (expected - still).abs().max() + 2e-2
    assert current == ("one_by_one" if step is read_trainer else "stacked")


def hold(client, round):
    client.scale = 1.0
    client.trainer.current_epoch = 0


@pytest.mark.parametrize("engine", ["one_by_one", "stacked", *COMPILED])
def test_what_a_step_makes_has_the_precision_of_the_run(uncompiled, engine):
    """Double precision sets torch's default dtype around the steps."""

    @contextmanager
    def double():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    dtypes = set()

    def note(client, loss, batch_idx):
        dtypes.add(torch.zeros(1).dtype)
        return loss

    data = shared_out(classes(SIZES))
    run_rounds(client_with(note), data, engine=engine, autocast=double)
    assert dtypes == {torch.float64}


class Remembering(nn.Module):
    """A net that reads its input by means that no trace sees."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = x.contiguous()
        content = bytearray(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()))
        return self.last(x + torch.frombuffer(content, dtype=x.dtype).view(x.shape))


def test_a_minibatch_that_became_a_constant_is_noticed():
    """It is compared on other inputs than those that were traced."""
    data = shared_out(classes([8, 8]), batch_size=4)

    def client():
        return FedAvg(seeded(Remembering), optimizer=sgd(0.1), local_epochs=2)

    expected = run_rounds(client(), data, rounds=2)
    with pytest.warns(UserWarning, match=SAYING):
        found = run_rounds(client(), data, rounds=2, engine="one_by_one_compiled")
    assert found.distance(expected) <= 1e-10


class Scaled(nn.Module):
    """A net with a parameter without dimensions, and one without numbers, which comes first."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.last, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(x) * self.scale + self.nothing.sum()


@pytest.mark.parametrize(
    "engine", ["one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled"]
)
def test_parameters_without_dimensions_or_numbers(engine):
    data = shared_out(classes([8, 8]), batch_size=4)

    def outcome(net, engine):
        return run_rounds(Ditto(seeded(net), optimizer=sgd(0.1)), data, rounds=2, engine=engine)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stacked|.*compiled")
        found = outcome(Scaled, engine)
    assert found.distance(outcome(Scaled, "one_by_one")) <= 1e-10
    plain = outcome(lambda: Scaled().last, engine)
    assert not torch.equal(found.v[:, :-1], plain.v), "the scale is trained"
    assert (found.v[:, -1] != 1.5).all()
    assert (found.v - found.v[:1]).abs().max() > 0


class Attentive(nn.Module):
    """Attention is an operation that may draw, and does not here."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.first, self.layer, self.last = nn.Linear(2, 4), layer, nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.layer(self.first(x.view(len(x), 2, 2))).mean(1))


@needs_a_compiler
@pytest.mark.parametrize(
    ("net", "engine"),
    [(Recurrent, "one_by_one_compiled"), *((Attentive, engine) for engine in COMPILED)],
)
def test_recurrent_layers_and_attention_stay_compiled(net, engine):
    client, data = (
        FedAvg(seeded(net), optimizer=sgd(0.5), local_steps=3),
        shared_out(classes(SIZES)),
    )
    with saying():
        found = run_rounds(client, data, rounds=6, engine=engine)
    assert found.distance(run_rounds(client, data, rounds=6)) < 1e-10
