"""Gradients of several minibatches in one optimizer step, beside plain loops and Lightning."""

import copy
import warnings
from types import SimpleNamespace

import by_hand
import lightning
import pytest
import torch
from further_cases import mark_further
from lit_federations import images, numbers
from lit_modules import LitAutoencoder, LitImages
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from pl_fed.clients import (
    FLAME,
    L2SGD,
    Ditto,
    DittoGreedy,
    FedAvg,
    FedRep,
    Finetuning,
    PerFedAvg,
    PFedMe,
    Scaffold,
)
from pl_fed.engine import Clipping
from pl_fed.engine.base import Chunk
from pl_fed.engine.choice import COMPILED, EAGER
from pl_fed.engine.optimizer_states import OptimizerStates

SIZES = [7, 3, 10, 1]  # in minibatches of 4: two, one, three and one in a pass
ENGINES = (*EAGER, *COMPILED)
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def forbid_fallbacks(uncompiled):
    """Fail a test whose clients run by another engine than the one that it names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Clients are run one by one")
        warnings.filterwarnings("error", "Local steps run eagerly")
        yield


def adam(params):
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.05)


def heavy(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05)


def train_in_groups(net, minibatches, groups, per_step, optimizer, clip=None):
    """Train a copy of a net: ``groups`` are the numbers of minibatches of each optimizer step."""
    net = copy.deepcopy(net).double().train()
    parameters = [*net.parameters()]
    optimizer = optimizer(parameters)
    for size in groups:
        optimizer.zero_grad()
        for x, y in [next(minibatches) for _ in range(size)]:
            (F.cross_entropy(net(x), y) / per_step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return by_hand.row(net)


GROUPS = {  # of two passes of each client
    2: [[2, 2], [1, 1], [2, 1, 2, 1], [1, 1]],
    3: [[2, 2], [1, 1], [3, 3], [1, 1]],
}


@SLOW
@pytest.mark.parametrize("engine", ENGINES)
@table_test("per_step, optimizer, clip", [(2, sgd(0.5), None), (2, heavy, 0.05), (3, adam, 0.05)])
def test_rounds_equal_a_plain_loop(engine, per_step, optimizer, clip):
    """An incomplete group at the end of each pass; clients of one to three minibatches a pass."""
    data, net = shared_out(classes(SIZES)), seeded(mlp)
    client = FedAvg(net, optimizer=optimizer, local_epochs=2)
    settings = {"engine": engine, "shuffle": False, "clipping": Clipping(clip)}
    outcome = run_rounds(client, data, rounds=1, batches_per_step=per_step, **settings)
    rows = [
        train_in_groups(net, by_hand.minibatches(data, k, 4), groups, per_step, optimizer, clip)
        for k, groups in enumerate(GROUPS[per_step])
    ]
    torch.testing.assert_close(outcome.w, torch.stack(rows).mean(0), rtol=0, atol=1e-12)


def fit_plainly(module, data, epochs, per_step, clip, folder):
    """Fit a copy of a module on client 0 by Lightning, in the order of its samples."""
    module = copy.deepcopy(module)
    x, y, *_ = data.clients.to(torch.device("cpu"), torch.float64).training_samples(0)
    trainer = lightning.Trainer(
        max_epochs=epochs, accumulate_grad_batches=per_step, gradient_clip_val=clip,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    return module, trainer.global_step


@SLOW
def test_client_trains_as_in_a_lightning_fit(tmp_path):
    """Three epochs of five minibatches, in optimizer steps of two."""
    net, data = seeded(LitAutoencoder).double(), shared_out(numbers([20]))
    plain, steps = fit_plainly(net, data, 3, 2, 0.3, tmp_path)
    assert steps == 3 * 3
    settings = {"shuffle": False, "clipping": Clipping(0.3), "rounds": 1}
    client, row = FedAvg(net, local_epochs=3), by_hand.row(plain)
    for engine in ENGINES:
        outcome = run_rounds(client, data, engine=engine, batches_per_step=2, **settings)
        torch.testing.assert_close(outcome.w, row, rtol=0, atol=1e-12)
    assert (run_rounds(client, data, **settings).w - row).abs().max() > 1e-4


@pytest.mark.parametrize("engine", ["one_by_one", pytest.param(COMPILED[0], marks=SLOW)])
def test_running_statistics_change_with_each_minibatch(tmp_path, engine):
    """BatchNorm's statistics and counter, SGD with momentum, as in a plain Lightning fit."""
    net, data = seeded(LitImages).double(), shared_out(images([18]))
    plain, steps = fit_plainly(net, data, 1, 4, None, tmp_path)
    assert steps == 2
    outcome = run_rounds(
        FedAvg(net), data, engine=engine, batches_per_step=4, shuffle=False, rounds=1
    )
    torch.testing.assert_close(outcome.w, by_hand.row(plain), rtol=0, atol=1e-12)
    statistics = by_hand.statistics(plain.net)
    torch.testing.assert_close(outcome.w_statistics, statistics, rtol=0, atol=1e-12)


class LitHooks(LitAutoencoder):
    """Changes its gradients after each minibatch and before each optimizer step."""

    def on_after_backward(self):
        self.encoder.bias.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class LitSkips(LitAutoencoder):
    """Skips every third minibatch, and the last one."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


@table_test("make", [LitHooks, LitSkips])
def test_hooks_of_gradients_and_skipped_minibatches_are_those_of_lightning(tmp_path, make):
    net, data = seeded(make).double(), shared_out(numbers([18]))
    plain, _ = fit_plainly(net, data, 1, 2, None, tmp_path)
    client = FedAvg(net)
    outcome = run_rounds(client, data, batches_per_step=2, shuffle=False, rounds=1)
    torch.testing.assert_close(outcome.w, by_hand.row(plain), rtol=0, atol=1e-12)


ALGORITHMS = {
    "Ditto, uneven work": lambda **kwargs: Ditto(
        seeded(mlp), lam=0.5, local_epochs=2, personal_steps=3, **kwargs
    ),
    "FedRep, in steps": lambda **kwargs: FedRep(seeded(mlp), head_steps=3, local_steps=4, **kwargs),
    "FLAME": lambda **kwargs: FLAME(seeded(mlp), lam=0.5, rho=0.1, local_epochs=3, **kwargs),
    "Finetuning": lambda **kwargs: Finetuning(seeded(mlp), finetune_epochs=3, **kwargs),
    "PerFedAvg": lambda **kwargs: PerFedAvg(seeded(mlp), local_epochs=2, **kwargs),
    "one pass": lambda **kwargs: FedAvg(seeded(mlp), **kwargs),
}


@SLOW
@pytest.mark.parametrize(
    "algorithm",
    mark_further(ALGORITHMS, ["Ditto, uneven work", "FLAME", "Finetuning", "PerFedAvg"]),
)
@table_test("optimizer, clip", [(adam, None), (heavy, 0.05)])
def test_engines_agree(algorithm, optimizer, clip):
    client, data = ALGORITHMS[algorithm](optimizer=optimizer), shared_out(classes(SIZES))
    settings = {"batches_per_step": 2, "clipping": Clipping(clip)}
    expected = run_rounds(client, data, **settings)
    assert expected.distance(run_rounds(client, data, clipping=Clipping(clip))) > 1e-4
    for engine, chunk_size in (("stacked", None), ("stacked", 3), (COMPILED[0], 3)):
        outcome = run_rounds(client, data, engine=engine, chunk_size=chunk_size, **settings)
        assert expected.distance(outcome) <= 1e-10, engine


@SLOW
def test_engines_agree_with_kept_states_and_with_numbers_of_steps_set_in_begin():
    class Unequal(Ditto):
        def begin(self, client):
            if client.steps:  # before an evaluation, there are none
                client.steps["personal"] = client.steps["personal"] + client.ids[:, None] % 2

    client = Unequal(seeded(mlp), lam=0.5, optimizer=adam, local_epochs=2)
    settings = {"batches_per_step": 2, "keep_optimizer_state": True, "rounds": 3}
    expected = run_rounds(client, shared_out(classes(SIZES)), **settings)
    for engine in ("stacked", *COMPILED):
        outcome = run_rounds(client, shared_out(classes(SIZES)), engine=engine, **settings)
        assert expected.distance(outcome) <= 1e-10, engine


def test_stack_of_clients_with_one_pass_has_one_optimizer(monkeypatch):
    """A client that has completed its pass moves with the next optimizer step of the others."""
    parts = []
    split = OptimizerStates.split_stack
    monkeypatch.setattr(
        OptimizerStates, "split_stack", lambda *args: parts.append(split(*args)) or parts[-1]
    )
    data = shared_out(classes([4 * n for n in (6, 2, 9, 1)]))
    run_rounds(FedAvg(seeded(mlp)), data, 1, engine="stacked", batches_per_step=4)
    assert parts == [[slice(0, 4)]]


def plan(per_step, steps, per_pass, length=None, counts=()):
    """Return the minibatches, from 1, after which the optimizer steps."""
    batches = SimpleNamespace(steps=[steps], pass_lengths=[per_pass])
    models = {str(index): [count] for index, count in enumerate((steps, *counts))}
    chunk = Chunk(torch.tensor([0]), None, batches, models, None)
    ends = chunk.plan_steps(per_step, 0, steps if length is None else length)
    return [number for number, is_end in enumerate(ends, 1) if is_end]


def test_optimizer_steps_after_groups_passes_and_the_work_on_a_model():
    assert plan(1, steps=3, per_pass=2) == [1, 2, 3]
    assert plan(2, steps=6, per_pass=6) == [2, 4, 6]
    assert plan(4, steps=10, per_pass=5) == [4, 5, 9, 10]
    assert plan(4, steps=7, per_pass=5) == [4, 5, 7]
    assert plan(2, steps=7, per_pass=9, counts=[3]) == [2, 3, 5, 7]
    assert plan(8, steps=3, per_pass=1) == [1, 2, 3]
    # in a stack, a client that has completed its steps waits for the others
    assert plan(4, steps=6, per_pass=6, length=10) == [4, 8, 10]
    assert plan(4, steps=10, per_pass=10, length=10) == [4, 8, 10]
    assert plan(4, steps=6, per_pass=3, length=10) == [3, 7, 10]
    assert plan(2, steps=0, per_pass=1, length=3) == [2, 3]


@SLOW
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@table_test("control", ["path", "start"])
def test_control_variates_are_mean_gradients_of_minibatches(engine, control):
    """Five minibatches in optimizer steps of two: the last one has half of a step's weight."""
    data = shared_out(points([1.0, 5.0, -2.0, 7.0, 3.0], [-1.0] * 4), batch_size=1)
    y = data.clients.targets[data.clients.train.samples(0)].flatten().tolist()
    client = Scaffold(Point(), control, criterion=HalfSquares(), optimizer=sgd(0.1))
    settings = {"engine": engine, "shuffle": False, "batches_per_step": 2}
    outcome = run_rounds(client, data, rounds=1, **settings)
    w, gradients = 0.0, []
    for group in (y[:2], y[2:4], y[4:]):
        gradients += [w - value for value in group]
        w -= 0.1 * sum(w - value for value in group) / 2
    expected = sum(gradients) / 5 if control == "path" else -sum(y) / 5
    torch.testing.assert_close(float(outcome.states["own_control"][0]), expected)


def test_step_on_the_penalty_follows_the_length_of_local_training():
    """L2SGD's β is λ times the sum of the learning rates of all minibatches."""
    data = shared_out(points([0.0] * 3, [0.0]), batch_size=1)
    client = L2SGD(Point(start=1.0), lam=0.5, criterion=HalfSquares(), optimizer=sgd(0.2))
    outcome = run_rounds(client, data, rounds=2, batches_per_step=2, shuffle=False)
    x = torch.ones(2, dtype=torch.float64)
    for _ in range(2):
        mean, steps = x.mean(), torch.tensor([3, 1]).double()
        x += 0.5 * 0.1 * steps * (mean - x)
        x[0] *= (1 - 0.2) * (1 - 0.1)  # a step of two minibatches, and one of one
        x[1] *= 1 - 0.1
    torch.testing.assert_close(outcome.v[:, 0], x, rtol=0, atol=1e-13)


@table_test(
    "client, reason",
    [
        (lambda: PFedMe(mlp()), "PFedMe but got 2: a local round moves θ_i by K steps"),
        (lambda: DittoGreedy(mlp()), "DittoGreedy but got 2: it tries the optimizer's step"),
        (lambda: FLAME(mlp(), tolerance=0.1), "FLAME but got 2: `tolerance` bounds the gradient"),
    ],
)
def test_algorithm_with_a_step_for_each_minibatch_is_refused(client, reason):
    data = shared_out(classes([8, 8]), val_fraction=0.5)
    with pytest.raises(
        ValueError, match=f"^Expected .*`accumulate_grad_batches` to be 1 for {reason}"
    ):
        run_rounds(client(), data, batches_per_step=2)
