"""Features that are kept: the same numbers, and a frozen body that sees each sample once."""

from functools import partial

import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from torch import nn
from torchvision.transforms import v2

import pl_fed
from pl_fed import Federation
from pl_fed.attacks import Attack, RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine import LocalSettings
from pl_fed.models import FrozenBody
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform

IMAGES = (2, 4, 4)
SIZES = [9, 6, 12, 8]


num_inputs = []  # of each call of `features`


class Transfer(nn.Module):
    """A net of a user's own: a frozen body with BatchNorm and dropout, and a head."""

    def __init__(self, keep_features=False):
        super().__init__()
        self.keep_features = keep_features
        body = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten()
        )
        body[1].running_mean += 0.3
        self.body = body.requires_grad_(False)
        self.head = nn.Linear(12, 3)
        num_inputs.clear()

    def features(self, x):
        num_inputs.append(len(x))
        return self.body(x)

    def forward(self, x):
        return self.head(x if x.dim() == 2 else self.features(x))


def make_data(**kwargs):
    return shared_out(classes(SIZES, IMAGES), **kwargs)


@exhaustive_but(
    "dtype0-1e-10-Ditto-one_by_one", "dtype0-1e-10-FedAvg-stacked", "dtype1-1e-05-FedAvg-one_by_one"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("kind", [FedAvg, Ditto])
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_rounds_with_stored_features_equal_rounds_without(kind, engine, dtype, largest):
    attack = {"attack": RandomLabels(), "ids": [2]}
    plain, stored = (
        run_rounds(
            kind(seeded(lambda keep=keep: Transfer(keep)), optimizer=sgd(0.2), local_epochs=2),
            make_data(),
            dtype=dtype,
            engine=engine,
            sampler=Uniform(3),
            rounds=4,
            **attack,
        )
        for keep in (False, True)
    )
    assert plain.distance(stored) < largest
    assert plain.reports[0]["train/loss"] != plain.reports[3]["train/loss"]


@pytest.mark.slow
def test_body_runs_once_per_sample_and_inputs_are_unchanged():
    data = make_data(val_fraction=0.3)
    client = Ditto(seeded(lambda: Transfer(True)), optimizer=sgd(0.1)).double()
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "fit")
    num_inputs.clear()
    optimizer = client.train().configure_optimizers()
    for round in range(3):
        federation.run_round(round, optimizer)
        with torch.inference_mode():
            federation.evaluate("val", torch.arange(4))
    assert sum(num_inputs) == len(data.clients.inputs) == sum(SIZES)
    assert federation.data.inputs.shape == (sum(SIZES), 12)
    assert federation.data.inputs.dtype == torch.float64
    assert data.clients.inputs.shape == (sum(SIZES), *IMAGES)
    assert client.training
    assert client.global_model.head.training
    assert not client.global_model.body.training


def test_features_are_recomputed_under_another_precision():
    client, data = FedAvg(seeded(lambda: Transfer(True))), make_data()
    federation = Federation(All(), seed=0)
    mixed = LocalSettings(partial(torch.autocast, "cpu", torch.bfloat16))
    features = []
    for local in (mixed, mixed, LocalSettings()):
        federation.setup(client, data, "test", settings=RunSettings(local))
        features.append(federation.data.inputs)
    assert features[0] is features[1], "of the same precision"
    assert torch.equal(features[0], features[0].bfloat16().float())
    with torch.no_grad():
        expected = client.global_model.eval().body(data.clients.inputs)
    assert torch.equal(features[2], expected)


class Dropping(Transfer):
    def __init__(self):
        super().__init__(keep_features=True)
        self.drop = nn.Dropout(0.5)

    def features(self, x):
        return self.drop(super().features(x))


def test_features_equal_the_body_in_evaluation_mode():
    client, data = FedAvg(seeded(Dropping)), make_data()
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "fit")
    client.train()
    with torch.no_grad():
        expected = client.global_model.body(data.clients.inputs)
    torch.testing.assert_close(federation.data.inputs, expected)


@exhaustive_but("64-true")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
def test_resumed_and_loaded_run_equals_run_without_stored_features(tmp_path, precision):
    """Metrics and predictions equal those without stored features."""
    largest = {"64-true": 1e-10, "32-true": 1e-5, "bf16-mixed": 2e-2}[precision]
    module = make_data(val_fraction=0.3, test_fraction=0.3)
    results = []
    for keep in (False, True):
        settings = {
            "run_dir": tmp_path / str(keep), "accelerator": "cpu", "precision": precision,
            "enable_progress_bar": False, "enable_model_summary": False,
        }  # fmt: skip

        def make(seed, keep=keep):
            return Ditto(seeded(lambda: Transfer(keep), seed), optimizer=sgd(0.2), local_epochs=2)

        trainer = pl_fed.Trainer(Federation(Uniform(3), seed=0), max_epochs=1, **settings)
        trainer.fit(make(0), module)
        client = make(1)  # another body: that of the checkpoint counts
        trainer = pl_fed.Trainer(Federation(Uniform(3), seed=0), max_epochs=2, **settings)
        trainer.fit(client, module, ckpt_path="last")
        metrics = [dict(trainer.callback_metrics), *trainer.test(client, module, verbose=False)]
        fresh, trainer = make(2), pl_fed.Trainer(Federation(All(), seed=0), **settings)
        path = str(tmp_path / str(keep) / "checkpoints" / "last.ckpt")
        metrics += trainer.test(fresh, module, ckpt_path=path, verbose=False)
        predictions = trainer.predict(fresh, module, ckpt_path=path)
        tables = [table for batch in predictions for table in batch]
        assert metrics[1] == metrics[2]
        results.append((metrics, torch.cat([table["probability"] for table in tables]).float()))
    for plain, stored in zip(results[0][0], results[1][0], strict=True):
        assert set(plain) == set(stored)
        for name in set(plain) - {"time/round"}:
            assert float(plain[name]) == pytest.approx(float(stored[name]), abs=largest), name
    assert (results[0][1] - results[1][1]).abs().max() < largest


@pytest.mark.slow
def test_features_are_recomputed_for_a_loaded_body(tmp_path):
    """A federation that has features loads a checkpoint with another body."""
    module = make_data(val_fraction=0.3, test_fraction=0.3)
    settings = {
        "max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False,
        "enable_model_summary": False, "precision": "64-true",
    }  # fmt: skip

    def make(seed):
        return FedAvg(seeded(lambda: Transfer(True), seed), optimizer=sgd(0.2))

    first = pl_fed.Trainer(Federation(All(), seed=0), run_dir=tmp_path / "first", **settings)
    first.fit(make(0), module)
    (expected,) = first.test(verbose=False, ckpt_path=None, model=first.lightning_module,
                             datamodule=module)  # fmt: skip
    other = pl_fed.Trainer(Federation(All(), seed=0), run_dir=tmp_path / "other", **settings)
    client = make(1)
    other.fit(client, module)
    path = str(tmp_path / "first" / "checkpoints" / "last.ckpt")
    assert other.test(client, module, verbose=False)[0] != expected
    assert other.test(client, module, ckpt_path=path, verbose=False)[0] == expected


@pytest.mark.slow
def test_resnet_with_stored_features_equals_resnet():
    net = FrozenBody("resnet18", num_classes=3, keep_features=True).eval()
    images = torch.randn(4, 1, 16, 16)
    features = net.features(images)
    assert features.shape == (4, 512)
    assert torch.equal(net(features), net(images))
    arrays = classes([4, 3], (3, 16, 16))
    plain, stored = (
        run_rounds(
            Ditto(seeded(lambda keep=keep: FrozenBody(num_classes=3, keep_features=keep))),
            shared_out(arrays),
            rounds=1,
        )
        for keep in (False, True)
    )
    assert plain.distance(stored) < 1e-10


class Shifted(Attack):
    """Add one to a client's training inputs."""

    def poison(self, batch, context):
        assert batch.inputs.shape[1:] == (12,)
        return batch._replace(inputs=batch.inputs + 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_attack_on_inputs_receives_features(engine):
    client = FedAvg(seeded(lambda: Transfer(True)), optimizer=sgd(0.1))
    honest = run_rounds(client, make_data(), engine=engine)
    attacked = run_rounds(client, make_data(), engine=engine, attack=Shifted(), ids=[0])
    assert honest.distance(attacked) > 1e-4


# Refusals


def assert_refused(net, data, match):
    client = FedAvg(net)
    with pytest.raises(ValueError, match=match):
        Federation(All(), seed=0).setup(client, data, "fit")


def test_augmented_inputs_are_refused():
    data = make_data(augment=[v2.RandomHorizontalFlip()])
    assert_refused(
        Transfer(True), data, r"no argument `augment` for Transfer, which keeps features, but"
    )
    Federation(All(), seed=0).setup(FedAvg(Transfer(False)), data, "fit")


def test_trained_features_are_refused():
    net = Transfer(True)
    net.body[0].weight.requires_grad_(True)
    assert_refused(
        net, make_data(), r"`features` of Transfer.* to use frozen parameters only but got"
    )


class InputsOnly(Transfer):
    def forward(self, x):
        return self.head(self.body(x))


class OtherOutputs(Transfer):
    def forward(self, x):
        return self.head(x + 1 if x.dim() == 2 else self.features(x))


class Nameless(nn.Module):
    keep_features = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize(
    ("net", "match"),
    [
        (InputsOnly, "InputsOnly with `keep_features` = True to take features in place of inp"),
        (OtherOutputs, "to take features in place of inputs but got other outputs"),
        (Nameless, "Expected `features` of Nameless.* to take inputs but that failed: .*features"),
    ],
)
def test_nets_without_consistent_features_are_refused(net, match):
    module = net() if net is Nameless else net(True)
    assert_refused(module, make_data(), match)
