"""Backdoor success: for each model, over the benign clients, in every log."""

import csv
import functools

import pytest
import torch
from small_federations import classes, mlp, reals, sections, seeded, sgd, shared_out
from tables import table_test
from torch import nn

import pl_fed
from pl_fed import Adversary, Federation
from pl_fed.attacks import Attack, Backdoor, Combined, GaussianNoise, Outliers, RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import Digits, FederatedData
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.models import MLP
from pl_fed.partitioners import IID
from pl_fed.samplers import All
from pl_fed.types import Batch

ATTACK = Backdoor(1, size=1, value=4.0)


class Digit(Backdoor):
    """A backdoor with a large stamp for images of 8×8 pixels."""

    def __init__(self, samples=0.5):
        super().__init__(target=3, samples=samples, size=2, value=1.0)


def fit_and_test(folder, rounds=2, client=None, data=None, **federation):
    """Fit and test, and return the trainer, the client and the data."""
    settings = {"ids": [1, 4], "attack": Digit(), "engine": "one_by_one", **federation}
    trainer = pl_fed.Trainer(
        Federation(All(), seed=0, **sections(**settings)),
        run_dir=folder,
        accelerator="cpu",
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=rounds,
        check_val_every_n_epoch=rounds,
    )
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    client = client or seeded(lambda: Ditto(MLP(64, [16], 10), optimizer=optimizer, lam=0.5))
    data = data or FederatedData(Digits(), IID(), num_clients=6, val_fraction=0.2, seed=0)
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    return trainer, client, data


class Moving(Backdoor):
    """Moving: a trigger that changes in each round, as a learned one; its version is the round."""

    def forge(self, honest, own, context):
        self.trigger_version = context.round + 1
        self.value += 1.0
        return own


@pytest.mark.slow
def test_second_fit_is_tested_with_its_own_trigger():
    data = shared_out(classes([9, 8, 7]), test_fraction=0.3)
    attack = Moving(1, size=1, value=4.0)
    federation = Federation(All(), seed=0, **sections(engine="one_by_one", attack=attack, ids=[1]))
    client = FedAvg(seeded(mlp), optimizer=sgd())
    values = []
    for _ in range(2):
        federation.setup(client, data, "fit")
        federation.run_round(0, client.train().configure_optimizers())
        federation.setup(client, data, "test")
        triggered = federation.session.states.apply_trigger("test", attack)
        values.append(float(triggered.inputs.max()))
    assert values[1] == values[0] + 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, *fit_and_test(folder, rounds=3, attack=Digit(samples=0.2))


def count_successes(model, data, part, client_id, attack):
    """Return the share of a client's samples that the model misclassifies as the target."""
    clients, hits = data.clients, []
    for sample in clients.part(part).samples(client_id).tolist():
        x, y = clients.inputs[sample].clone(), int(clients.targets[sample])
        if y != attack.target:
            x[:, -2:, -2:] = attack.value
            with torch.no_grad():
                hits.append(int(model(x[None]).argmax()) == attack.target)
    return sum(hits) / len(hits)


def read_personal_model(trainer, client, client_id):
    model = seeded(lambda: MLP(64, [16], 10))
    row = trainer.federation.store.read("personal", torch.tensor([client_id]))[0]
    nn.utils.vector_to_parameters(row, model.parameters())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("model", ["global", "personal"])
def test_backdoor_success_equals_a_loop_over_samples(run, part, model):
    _, trainer, client, data = run
    net = {"global": lambda client_id: client.global_model, "personal": None}[model]
    net = net or functools.partial(read_personal_model, trainer, client)
    shares = [
        count_successes(net(client_id), data, part, client_id, Digit()) for client_id in range(6)
    ]
    evaluate = {"val": trainer.validate, "test": trainer.test}[part]
    evaluate(client, data, verbose=False)
    metrics = trainer.federation.metrics(part)[model]
    logged = metrics.per_client()["backdoor_success"].tolist()
    assert logged == pytest.approx(shares)
    benign = [shares[client_id] for client_id in (0, 2, 3, 5)]
    assert metrics.compute()["backdoor_success"].item() == pytest.approx(sum(benign) / 4)
    assert 0 < sum(benign) / 4 < 1, "otherwise the comparison is empty"


@pytest.mark.slow
def test_backdoor_success_of_the_hybrid_model_is_that_of_its_source(run):
    _, trainer, client, data = run
    trainer.test(client, data, verbose=False)
    metrics = {
        name: metric.per_client() for name, metric in trainer.federation.metrics("test").items()
    }
    for client_id in range(6):
        pair = {
            float(metrics[name]["backdoor_success"][client_id]) for name in ("global", "personal")
        }
        assert float(metrics["hybrid"]["backdoor_success"][client_id]) in pair


@pytest.mark.slow
def test_backdoor_success_is_logged_with_the_other_metrics(run):
    folder, trainer, client, data = run
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for part in ("val", "test"):
        evaluate = {"val": trainer.validate, "test": trainer.test}[part]
        (results,) = evaluate(client, data, verbose=False)
        for model in ("global", "personal"):
            name = f"{part}/{model}/backdoor_success"
            (logged,) = {row[name] for row in table} - {""}
            assert float(logged) == pytest.approx(results[name], rel=1e-6)
    assert "test/global/backdoor_success" in trainer.callback_metrics
    with (folder / "per_client.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))
    shares = trainer.federation.metrics("test")["personal"].per_client()["backdoor_success"]
    column = [float(row["personal_backdoor_success"]) for row in clients]
    assert column == pytest.approx(shares.tolist(), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_backdoor_succeeds_and_keeps_the_accuracy(tmp_path):
    def federate(name, attack):
        optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        client = seeded(lambda: FedAvg(MLP(64, [16], 10), optimizer=optimizer))
        return fit_and_test(tmp_path / name, rounds=25, client=client, attack=attack)[0]

    attacked, honest = federate("attacked", Digit()), federate("honest", Digit(samples=0.0))
    ends = [trainer.callback_metrics for trainer in (attacked, honest)]
    with_attack, without_attack = (float(end["test/global/backdoor_success"]) for end in ends)
    assert with_attack > 0.8
    assert without_attack < 0.2
    with_attack, without_attack = (float(end["test/global/accuracy"]) for end in ends)
    assert with_attack > 0.85
    assert abs(with_attack - without_attack) < 0.05


# Triggered samples


@pytest.mark.slow
def test_client_with_only_the_target_class_does_not_count(tmp_path):
    arrays = classes([10, 10, 10, 10], num_classes=3)
    arrays.targets[:10] = 1  # client 0
    data = shared_out(arrays, test_fraction=0.5)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    federation = {"attack": ATTACK, "ids": [3]}
    trainer, *_ = fit_and_test(tmp_path, client=client, data=data, **federation)
    metrics = trainer.federation.metrics("test")["global"]
    shares = metrics.per_client()["backdoor_success"]
    assert shares.isnan().tolist() == [True, False, False, False]
    assert metrics.compute()["backdoor_success"] == shares[1:3].mean()


@pytest.mark.slow
def test_backdoor_success_is_missing_without_samples_of_other_classes(tmp_path):
    arrays = classes([10, 10], num_classes=3)
    arrays.targets[:] = 1
    data = shared_out(arrays, test_fraction=0.5)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    trainer, *_ = fit_and_test(tmp_path, client=client, data=data, attack=ATTACK, ids=[1])
    assert "test/global/accuracy" in trainer.callback_metrics
    assert "test/global/backdoor_success" not in trainer.callback_metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [RandomLabels(), Outliers(), ATTACK], ids=lambda a: type(a).__name__
)
def test_attack_without_trigger_evaluates_models_once(tmp_path, monkeypatch, attack):
    calls = []
    tables = Evaluator._compute_tables

    def count_call(self, data, part, *args):
        calls.append(part)
        return tables(self, data, part, *args)

    monkeypatch.setattr(Evaluator, "_compute_tables", count_call)
    data = shared_out(classes([10, 10, 10]), test_fraction=0.5)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    trainer, *_ = fit_and_test(tmp_path, client=client, data=data, attack=attack, ids=[1])
    assert calls.count("test") == (2 if attack.triggers else 1)
    assert bool(trainer.federation.session.states._trigger_data) is attack.triggers


@pytest.mark.slow
def test_triggered_samples_are_created_once(tmp_path):
    batch_sizes = []

    class Counted(Digit):
        def trigger(self, batch):
            batch_sizes.append(len(batch.targets))
            return super().trigger(batch)

    trainer, client, data = fit_and_test(tmp_path, attack=Counted())
    trainer.validate(client, data, verbose=False)
    trainer.test(client, data, verbose=False)
    parts = data.clients
    assert batch_sizes == [
        2,
        len(parts.val.index),
        len(parts.test.index),
    ]  # a check before training uses two samples


def test_triggered_samples_belong_to_their_clients():
    data = shared_out(classes([5, 2, 4, 6]), test_fraction=0.5).clients

    class EvenSamples(Attack):
        def trigger(self, batch):
            return batch._replace(
                inputs=batch.inputs + 1, targets=batch.targets * 0, mask=batch.samples % 2 == 0
            )

    def add_one(batch):
        return Batch(batch.inputs + 1, batch.targets * 0)

    all_samples, even_samples = (
        data.change_part("test", add_one),
        data.change_part("test", EvenSamples().trigger),
    )
    for client_id in range(4):
        samples = data.test.samples(client_id)
        for triggered, expected in (
            (all_samples, samples),
            (even_samples, samples[samples % 2 == 0]),
        ):
            index = triggered.test.samples(client_id)
            assert torch.equal(triggered.inputs[index], data.inputs[expected] + 1)
            assert (triggered.targets[index] == 0).all()
    assert len(even_samples.inputs) < len(all_samples.inputs) == len(data.test.index)


# Refusals


class FeatureNet(nn.Module):
    """A net that keeps features."""

    keep_features = True

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.body(x) if x.dim() > 2 else x)


@table_test("option", ["attack", "corruption"])
@table_test("attack", [Backdoor(1), Outliers(), GaussianNoise()])
def test_attacks_on_inputs_are_refused_with_kept_features(attack, option):
    data = shared_out(classes([4, 4], shape=(1, 4, 4)))
    federation = Federation(
        All(), **sections(**{option: attack}, **{"fraction": 0.5} if option == "attack" else {})
    )
    name = type(attack).__name__
    with pytest.raises(ValueError, match=f"`keep_features` of FeatureNet to be False for {name}"):
        federation.setup(FedAvg(FeatureNet()), data, "fit")


def test_backdoor_without_classes_is_refused():
    data = shared_out(reals(torch.zeros(8, 4), torch.zeros(8, 3), [0] * 4 + [1] * 4))
    client = FedAvg(seeded(mlp), criterion=nn.MSELoss())
    with pytest.raises(ValueError, match="Expected the task to have classes for Backdoor"):
        Federation(All(), adversary=Adversary(attack=ATTACK, ids=[0])).setup(client, data, "fit")


def test_two_backdoors_leave_out_samples_of_the_last_target():
    """Both triggers are applied. The target of the last one counts."""
    two = Combined(
        [Backdoor(1, size=1, value=4.0, corner="top_left"), Backdoor(2, size=1, value=4.0)]
    )
    x = torch.zeros(3, 1, 4, 4)
    triggered = two.trigger(Batch(x, torch.tensor([0, 1, 2])))
    assert triggered.targets.tolist() == [2, 2, 2]
    assert triggered.mask.tolist() == [True, True, False]
    assert (triggered.inputs[0, 0, 0, 0], triggered.inputs[0, 0, -1, -1]) == (4.0, 4.0)
