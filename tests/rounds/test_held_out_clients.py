"""Held-out clients: they change nothing, and get the personal model of a client that arrives."""

import copy
import csv
import inspect

import pytest
import torch
from equal_trials import trials_skipped
from further_cases import mark_if
from small_federations import (
    Cohorts,
    classes,
    mlp,
    sections,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

import pl_fed
import pl_fed.clients
from pl_fed import Federation
from pl_fed.attacks import RandomLabels, RandomUpdates
from pl_fed.clients import (
    Client,
    Ditto,
    FedAvg,
    FedRep,
    Finetuning,
    Mocha,
    PerFedAvg,
)
from pl_fed.compressors import TopK
from pl_fed.optimizers import LocalCosine
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.samplers import All, Poisson, Uniform

SIZES = [12, 9, 15, 11, 14]
WHOLE = {"val_fraction": 0.3, "test_fraction": 0.3, "batch_size": 100}  # full batches
ALGORITHMS = sorted(
    (
        kind
        for kind in vars(pl_fed.clients).values()
        if inspect.isclass(kind) and issubclass(kind, Client) and not inspect.isabstract(kind)
    ),
    key=lambda kind: kind.__name__,
)


def make_client(kind, **kwargs):
    kwargs = {"optimizer": sgd(0.1), **kwargs}
    return kind(seeded(mlp), **kwargs).double()


def set_up(client, data, stage="fit", rounds=1, **settings):
    federation = Federation(
        settings.pop("sampler", All()),
        **sections(**{"seed": 0, "engine": "one_by_one", **settings}),
    )
    with trials_skipped():
        federation.setup(client, data, stage)
    client.train()
    optimizer = client.configure_optimizers()
    for round in range(rounds):
        federation.run_round(round, optimizer)
    client.eval()
    return federation


class Counted(RandomLabels):
    """Counted: random labels with a state, the number of batches."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def poison(self, batch, context):
        self.batches += 1
        return super().poison(batch, context)

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def test_evaluation_changes_no_state_of_a_corruption():
    data = shared_out(classes(SIZES), held_out_clients=1, **WHOLE)
    client, corruption = make_client(Ditto, local_steps=1), Counted()
    federation = set_up(client, data, corruption=corruption)
    assert (before := corruption.batches)
    federation.setup(client, data, "test")
    federation.evaluate("test", torch.tensor([4]))
    assert corruption.batches == before


def evaluate(federation, part="test"):
    """Return the losses of training clients and of held-out clients, by model."""
    for tables in (federation.metrics(part), federation.held_out_metrics(part)):
        for metrics in tables.values():
            metrics.reset()
    number = federation.session.datamodule.num_evaluated
    with torch.inference_mode():
        federation.evaluate(part, torch.arange(number))
    return tuple(
        {model: metrics.per_client()["loss"] for model, metrics in tables.items()}
        for tables in (federation.metrics(part), federation.held_out_metrics(part))
    )


def full_gradient_steps(net, loss, samples, steps, lr=0.1, pull=0.0):
    """Take plain gradient steps on all samples, with a pull to the first point."""
    net = copy.deepcopy(net)
    start = [parameter.detach().clone() for parameter in net.parameters()]
    for _ in range(steps):
        net.zero_grad()
        value = loss(net(samples.inputs), samples.targets)
        value.backward()
        with torch.no_grad():
            for parameter, at in zip(net.parameters(), start):
                parameter -= lr * (parameter.grad + pull * (parameter - at))
    return net


def loss_by_hand(net, data, part, client):
    batch = data.batch(data.part(part).samples(client))
    return float(nn.functional.cross_entropy(net(batch.inputs), batch.targets))


@pytest.mark.parametrize("local_rounds", [1, 3])
def test_ditto_of_a_held_out_client_by_hand(local_rounds):
    """v starts at w and takes the local steps on F_k(v) + λ/2 ‖v − w‖²; w stays as released."""
    client = make_client(Ditto, lam=0.5, local_steps=4)
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    federation = set_up(client, data, rounds=2, held_out_rounds=local_rounds)
    _, losses = evaluate(federation)
    held_out, net = federation.session.held_out.states.data, federation.model_of(0, "global")
    for position in range(2):
        own = held_out.training_samples(position)
        loss = nn.functional.cross_entropy
        personal = full_gradient_steps(net, loss, own, 4 * local_rounds, pull=0.5)
        expected = loss_by_hand(personal, held_out, "test", position)
        assert float(losses["personal"][position]) == pytest.approx(expected, abs=1e-10)
        expected = loss_by_hand(net, held_out, "test", position)
        assert float(losses["global"][position]) == pytest.approx(expected, abs=1e-10)


def test_finetuning_of_a_held_out_client_by_hand():
    client = make_client(Finetuning, finetune_epochs=3, local_steps=2)
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    federation = set_up(client, data, rounds=2)
    _, losses = evaluate(federation)
    held_out, net = federation.session.held_out.states.data, federation.model_of(0, "global")
    for position in range(2):
        own = held_out.training_samples(position)
        personal = full_gradient_steps(net, nn.functional.cross_entropy, own, 3)
        expected = loss_by_hand(personal, held_out, "test", position)
        assert float(losses["personal"][position]) == pytest.approx(expected, abs=1e-10)


def test_per_fedavg_of_a_held_out_client_by_hand():
    client = make_client(PerFedAvg, adaptation_lr=0.3, hessian="none")
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    federation = set_up(client, data, rounds=2)
    _, losses = evaluate(federation)
    held_out, net = federation.session.held_out.states.data, federation.model_of(0, "global")
    own = held_out.training_samples(1)
    personal = full_gradient_steps(net, nn.functional.cross_entropy, own, 1, lr=0.3)
    expected = loss_by_hand(personal, held_out, "test", 1)
    assert float(losses["personal"][1]) == pytest.approx(expected, abs=1e-10)


def test_fedrep_of_a_held_out_client_by_hand():
    """The head trains on the client's samples, under the body that the server has released."""
    client = make_client(FedRep, head_steps=5, local_steps=1)
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    federation = set_up(client, data, rounds=2)
    _, losses = evaluate(federation)
    held_out = federation.session.held_out.states.data
    net = copy.deepcopy(client.global_model)
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    own = held_out.training_samples(0)
    for _ in range(5):
        net.zero_grad()
        nn.functional.cross_entropy(net(own.inputs), own.targets).backward()
        with torch.no_grad():
            for parameter in net[2].parameters():
                parameter -= 0.1 * parameter.grad
    expected = loss_by_hand(net, held_out, "test", 0)
    assert float(losses["personal"][0]) == pytest.approx(expected, abs=1e-10)


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


NETS = {"FedBN": batch_norm_net}
ONLY_GLOBAL = {"FedExLoRA"}  # needs adapters, and evaluates the global model alone
NEEDED = {"L2SGD": {"lam": 0.5}, "MeanRegularized": {"lam": 0.5}, "LpProj": {"dimensions": 7}}


def algorithms_with_personal_models():
    """Yield an algorithm of each class whose personal models a new client can have."""
    for kind in ALGORITHMS:
        if kind.new_client_reason or kind.__name__ in ONLY_GLOBAL:
            continue
        net, arguments = NETS.get(kind.__name__, mlp), NEEDED.get(kind.__name__, {})
        client = kind(seeded(net), optimizer=sgd(0.1), **arguments).double()
        if set(client.evaluated) != {"global"}:
            yield kind, client


@pytest.mark.slow
def test_every_algorithm_gives_personal_metrics_of_held_out_clients():
    """Two evaluations give equal bits, and leave all models and states as they were."""
    tried = []
    for kind, client in algorithms_with_personal_models():
        data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
        try:
            federation = set_up(client, data, rounds=1)
        except ValueError as error:
            raise AssertionError(f"{kind.__name__}: {error}") from error
        everyone = torch.arange(3)
        before = {name: federation.store.read(name, everyone) for name in federation.store.defaults}
        before |= {name: row.clone() for name, row in federation.server_states.items()}
        before["w"] = client.row("global").data.clone()
        first, second = evaluate(federation), evaluate(federation)
        for losses, again in zip(first, second):
            for model in losses:
                assert torch.equal(losses[model], again[model]), (kind, model)
        personal = first[1][client.evaluated[-1]]
        assert personal.shape == (2,), kind
        assert personal.isfinite().all(), kind
        after = {name: federation.store.read(name, everyone) for name in federation.store.defaults}
        after |= {**federation.server_states, "w": client.row("global").data}
        for name, row in before.items():
            assert torch.equal(row, after[name]), (kind, name)
        tried.append(kind.__name__)
    assert {"Ditto", "FLAME", "FedTilt", "FedRep", "Finetuning", "PerFedAvg"} <= set(tried)
    assert len(tried) > 15, tried


def test_training_clients_are_those_of_a_federation_without_held_out_clients():
    """The rounds of three clients have the same bits if the samples of two others lie beside."""
    arrays = classes(SIZES)
    whole = shared_out(arrays, val_fraction=0.0, test_fraction=0.0, held_out_clients=2)
    trains = whole.clients
    client = make_client(Ditto, local_steps=2)
    rows = []
    for data in (trains, None):
        if data is None:
            owners = torch.cat([trains.train.samples(k).sort()[0] for k in range(3)])
            sizes = trains.train.sizes
            ids = torch.arange(3).repeat_interleave(sizes)
            alone = type(arrays)(arrays.inputs[owners], arrays.targets[owners], ids, num_classes=3)
            module = shared_out(alone, batch_size=100)
        else:
            module = shared_out(arrays, held_out_clients=2, batch_size=100)
        module_client = copy.deepcopy(client)
        federation = set_up(module_client, module, rounds=2, sampler=Uniform(2))
        rows.append((module_client.row("global").data, federation.draw_cohort(1)))
    assert torch.equal(rows[0][1], rows[1][1])
    torch.testing.assert_close(rows[0][0], rows[1][0], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "chunk_sizes"),
    [
        (Ditto, (None, 1, 1)),
        mark_if(True, FedRep, (1, None, None)),
        mark_if(True, Finetuning, (None, 1, None)),
    ],
)
def test_engines_agree(uncompiled, kind, chunk_sizes):
    """Every engine with both sizes of chunks, and every algorithm, too."""
    data = shared_out(classes(SIZES), held_out_clients=3, val_fraction=0.3, test_fraction=0.3)
    client = make_client(kind)
    first = evaluate(set_up(copy.deepcopy(client), data, held_out_rounds=2))
    engines = ("stacked", "stacked_compiled", "one_by_one_compiled")
    for engine, chunk_size in zip(engines, chunk_sizes, strict=True):
        federation = set_up(
            copy.deepcopy(client), data, engine=engine, chunk_size=chunk_size, held_out_rounds=2
        )
        for losses, others in zip(first, evaluate(federation), strict=True):
            torch.testing.assert_close(losses, others, rtol=0, atol=1e-10)


def test_attackers_are_training_clients():
    """A fraction counts training clients, and an id is that of a training client."""
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    federation = set_up(make_client(Ditto), data, attack=RandomLabels(), fraction=0.67)
    assert federation.is_byzantine.shape == (3,)
    assert int(federation.is_byzantine.sum()) == 2
    match = r"ids .*from 0 to 2 but got \[3\]"
    with pytest.raises(ValueError, match=match):
        set_up(make_client(Ditto), data, attack=RandomUpdates(), ids=[3])


def test_sampler_draws_training_clients_only():
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    with pytest.raises(ValueError, match=r"number of clients \(3\) but got 4"):
        set_up(make_client(Ditto), data, sampler=Uniform(4))
    with pytest.raises(ValueError, match="ids of 0 to 2"):
        set_up(make_client(Ditto), data, sampler=Cohorts([0, 3]))


def test_population_is_that_of_training_clients():
    """Privacy takes the number of clients, and a client's weight, from this population."""
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    private = {"privacy": DifferentialPrivacy(noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)}
    client = make_client(FedAvg)
    federation = set_up(client, data, sampler=Poisson(0.5), rounds=0, **private)
    assert client.population.clients == 3
    assert client.population.samples == int(data.clients.train.sizes.sum())
    assert federation.session.rounds.privacy.denominator == Poisson(0.5).size_of_cohort(3)


@pytest.mark.parametrize("kind", [Ditto, FedRep])
def test_compressed_uploads_do_not_touch_held_out_clients(kind):
    """They send nothing, so that a codec changes nothing of their personal models."""
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    client = make_client(kind)
    plain = evaluate(set_up(copy.deepcopy(client), data, rounds=0))[1]
    coded = set_up(copy.deepcopy(client), data, rounds=0, compression=TopK(0.3))
    torch.testing.assert_close(evaluate(coded)[1], plain, rtol=0, atol=0)


def test_mocha_is_refused():
    data = shared_out(classes(SIZES), held_out_clients=2, **WHOLE)
    with pytest.raises(ValueError, match="left out for Mocha but got 2 held-out clients"):
        set_up(make_client(Mocha), data)


def test_number_of_local_rounds_is_checked():
    with pytest.raises(ValueError, match=r"`federation\.held_out_rounds`"):
        Federation(held_out_rounds=0)


def trainer(folder, rounds, **settings):
    return pl_fed.Trainer(
        Federation(Uniform(2), **{"seed": 0, **settings}),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, mark_if(True, LocalCosine)])
def test_resumed_run_equals_uninterrupted_run_and_files_have_all_clients(tmp_path, schedule):
    module = shared_out(
        classes(SIZES), val_fraction=0.3, test_fraction=0.3, held_out_clients=2, batch_size=4
    )

    def client():
        return Ditto(seeded(mlp), optimizer=sgd(0.1), local_steps=3, lr_scheduler=schedule)

    whole, fitted = trainer(tmp_path / "whole", 3), client()
    whole.fit(fitted, module)
    (metrics,) = whole.test(fitted, module, verbose=False)
    trainer(tmp_path / "resumed", 1).fit(client(), module)
    resumed, fitted = trainer(tmp_path / "resumed", 3), client()
    resumed.fit(fitted, module, ckpt_path="last")
    (again,) = resumed.test(fitted, module, verbose=False)
    assert metrics == again
    names = ("test/held_out/personal/accuracy_worst10", "test/held_out/global/loss")
    assert set(names) <= metrics.keys()
    last = tmp_path / "whole" / "checkpoints" / "last.ckpt"
    (loaded,) = trainer(tmp_path / "tested", 3).test(client(), module, last, verbose=False)
    assert loaded == metrics
    with (tmp_path / "whole" / "per_client.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["held_out"] for row in rows] == ["0"] * 3 + ["1"] * 2
    assert [row["client"] for row in rows] == list("01234")
    assert [row["rounds"] for row in rows[3:]] == ["0", "0"]
    for name, part in (("test/personal/accuracy", rows[:3]), (names[0][:27], rows[3:])):
        mean = sum(float(row["personal_accuracy"]) for row in part) / len(part)
        if name in metrics:
            assert metrics[name] == pytest.approx(mean, abs=1e-6)
    record = pl_fed.read_run(tmp_path / "whole")
    assert record.clients["client"].tolist() == [0, 1, 2]
    assert record.held_out["client"].tolist() == [3, 4]
    tables = [table for tables in whole.predict(fitted, module) for table in tables]
    assert [table["client"] for table in tables] == [0, 1, 2, 3, 4]
    held_out = [t["prediction"] == t["target"] for t in tables[3:]]
    mean = sum(float(correct.double().mean()) for correct in held_out) / 2
    assert metrics["test/held_out/personal/accuracy"] == pytest.approx(mean, abs=1e-6)
