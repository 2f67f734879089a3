"""Recreated data, trainers and federations: states of clients are neither lost nor mixed."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed import Adversary, Federation
from pl_fed.attacks import RandomLabels
from pl_fed.callbacks import LastCheckpoint
from pl_fed.clients import Ditto, FedAvg
from pl_fed.samplers import Uniform

TRAINER_OPTIONS = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
TRAINER_OPTIONS |= {"limit_val_batches": 0}


def make_data(sizes=(19, 17, 15, 20), seed=0, names=None):
    arrays = replace(classes(list(sizes), seed=seed), names=names)
    return shared_out(arrays, test_fraction=0.3)


def fit_client(folder, kind=Ditto, rounds=3, momentum=0.0):
    client = kind(seeded(mlp), optimizer=sgd(0.2), local_epochs=2)
    federation = Federation(Uniform(3), server_optimizer=sgd(1.0, momentum=momentum), seed=0)
    trainer = pl_fed.Trainer(
        federation, default_root_dir=folder, max_epochs=rounds, **TRAINER_OPTIONS
    )
    trainer.fit(client, make_data())
    return trainer, client


def results(trainer, client, data, **kwargs):
    (metrics,) = trainer.test(client, data, verbose=False, **kwargs)
    return metrics


@pytest.mark.slow
def test_recreated_data_have_the_same_clients(tmp_path):
    trainer, client = fit_client(tmp_path)
    before = results(trainer, client, trainer.datamodule)
    assert before["test/personal/loss"] != before["test/global/loss"]
    assert results(trainer, client, make_data()) == before
    personal = [client for client in trainer.federation.store.read("personal", torch.arange(4))]
    trainer.predict(client, datamodule=make_data())
    recreated = trainer.federation.store.read("personal", torch.arange(4))
    assert all(torch.equal(*pair) for pair in zip(personal, recreated))


@pytest.mark.slow
def test_evaluation_uses_the_samples_of_the_passed_data(tmp_path):
    trainer, client = fit_client(tmp_path)
    before = results(trainer, client, make_data())
    other = results(trainer, client, make_data(seed=1))
    assert other["test/personal/loss"] != before["test/personal/loss"]
    assert results(trainer, client, make_data()) == before


@pytest.mark.slow
def test_training_continues_with_recreated_data(tmp_path):
    """The states of clients and the server's momentum are kept."""
    rows = []
    for recreated in (False, True):
        trainer, client = fit_client(tmp_path / str(recreated), momentum=0.9)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(client, make_data() if recreated else trainer.datamodule)
        rows.append(
            [client.row("global").data, trainer.federation.store.read("personal", torch.arange(4))]
        )
    assert all(torch.equal(*pair) for pair in zip(*rows))


class Refusing(FedAvg):
    """Refusing: refuses all data, after the trials of the server."""

    def check(self, data, population):
        raise ValueError("Expected other data.")


@pytest.mark.slow
def test_refused_fit_keeps_the_parts_of_the_earlier_one(tmp_path):
    """The server's momentum, and the attackers among the earlier clients."""
    rows = []
    for is_refused in (False, True):
        client = Ditto(seeded(mlp), optimizer=sgd(0.2))
        federation = Federation(
            Uniform(3),
            server_optimizer=sgd(1.0, momentum=0.9),
            adversary=Adversary(attack=RandomLabels(), ids=[1]),
            seed=0,
        )
        trainer = pl_fed.Trainer(
            federation, default_root_dir=tmp_path, max_epochs=2, **TRAINER_OPTIONS
        )
        trainer.fit(client, make_data())
        if is_refused:
            with pytest.raises(ValueError, match="Expected other data"):
                trainer.fit(Refusing(seeded(mlp), optimizer=sgd(0.2)), make_data([9] * 6))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(client, make_data())
        rows.append([client.row("global").data, federation.is_byzantine])
    assert all(torch.equal(*pair) for pair in zip(*rows))


@pytest.mark.slow
def test_refused_evaluation_on_other_clients_keeps_the_results(tmp_path):
    trainer, client = fit_client(tmp_path)
    before = results(trainer, client, make_data())
    match = "the data on which Ditto was fitted, because its clients .* other data to evaluate: use"
    with pytest.raises(ValueError, match=match):
        results(trainer, client, make_data((19, 17, 15)))
    assert results(trainer, client, make_data()) == before


@pytest.mark.parametrize("names", [["0", "1", "3", "2"], ["a", "b", "c", "d"]], ids="".join)
def test_evaluation_on_clients_of_other_owners_is_refused(tmp_path, names):
    """As many samples of each: every client was evaluated with another one's personal model."""
    trainer, client = fit_client(tmp_path, rounds=1)
    with pytest.raises(ValueError, match="the data on which Ditto was fitted, because its clients"):
        results(trainer, client, make_data(names=names))


@pytest.mark.slow
def test_global_model_is_evaluated_on_other_clients(tmp_path):
    trainer, client = fit_client(tmp_path, FedAvg)
    assert "test/global/loss" in results(trainer, client, make_data((19, 17, 15)))


@pytest.mark.slow
def test_checkpoint_restores_its_own_clients(tmp_path):
    trainer, client = fit_client(tmp_path / "one")
    expected = results(trainer, client, make_data())
    checkpoint = trainer.run_dir / "checkpoints" / "last.ckpt"
    trainer.fit(client, make_data((19, 17, 15)))
    assert results(trainer, client, make_data(), ckpt_path=checkpoint) == expected


@pytest.mark.slow
def test_evaluation_by_another_federation_warns(tmp_path):
    trainer, client = fit_client(tmp_path)
    expected = results(trainer, client, make_data())
    other = pl_fed.Trainer(
        Federation(Uniform(3), seed=0), default_root_dir=tmp_path, **TRAINER_OPTIONS
    )
    with pytest.warns(UserWarning, match="Another Federation has trained Ditto and has its"):
        assert results(other, client, make_data()) != expected
    same = pl_fed.Trainer(trainer.federation, default_root_dir=tmp_path, **TRAINER_OPTIONS)
    again = results(same, client, make_data())
    assert again["test/global/loss"] == expected["test/global/loss"]


@pytest.mark.slow
def test_evaluation_after_another_algorithm_of_the_federation_warns(tmp_path, recwarn):
    trainer, first = fit_client(tmp_path, rounds=1)
    second = Ditto(seeded(mlp), optimizer=sgd(0.2))
    other = pl_fed.Trainer(
        trainer.federation, default_root_dir=tmp_path, max_epochs=1, **TRAINER_OPTIONS
    )
    other.fit(second, make_data())
    results(other, second, make_data())
    assert not [warning for warning in recwarn if "This Federation" in str(warning.message)]
    with pytest.warns(UserWarning, match="has run another Ditto since the fit of this Ditto, and"):
        results(trainer, first, make_data())


@pytest.mark.slow
@pytest.mark.parametrize("callback", [EarlyStopping("train/loss"), LastCheckpoint()])
def test_callback_of_another_run_is_refused_and_replaces_no_checkpoint(tmp_path, callback):
    def fit(folder, **options):
        trainer = pl_fed.Trainer(
            Federation(Uniform(3)),
            run_dir=tmp_path / folder,
            callbacks=[callback],
            **{"max_epochs": 1, **TRAINER_OPTIONS, **options},
        )
        path = "last" if (tmp_path / folder / "checkpoints").exists() else None
        trainer.fit(Ditto(seeded(mlp), optimizer=sgd(0.2)), make_data(), ckpt_path=path)

    fit("first")
    checkpoint = tmp_path / "first" / "checkpoints" / "last.ckpt"
    before = checkpoint.read_bytes()
    name = type(callback).__name__
    with pytest.raises(ValueError, match=rf"without the {name} of another run .* build a new"):
        fit("second")
    assert checkpoint.read_bytes() == before
    fit("first", max_epochs=2)  # the same run goes on


@pytest.mark.slow
def test_net_that_another_algorithm_has_trained_gets_a_warning(tmp_path, recwarn):
    trainer, first = fit_client(tmp_path, FedAvg, rounds=1)
    trainer.fit(first, make_data())  # goes on with its own weights
    assert not [warning for warning in recwarn if "begins with" in str(warning.message)]
    second = Ditto(first.global_model, optimizer=sgd(0.2))
    other = pl_fed.Trainer(
        Federation(Uniform(3)), default_root_dir=tmp_path, max_epochs=1, **TRAINER_OPTIONS
    )
    with pytest.warns(UserWarning, match="^Ditto begins with the weights that an earlier FedAvg"):
        other.fit(second, make_data())


def test_net_whose_dropouts_belong_to_another_algorithm_is_refused(tmp_path):
    net = torch.nn.Sequential(seeded(mlp), torch.nn.Dropout(0.5))
    first, _ = FedAvg(net), Ditto(net)
    trainer = pl_fed.Trainer(
        Federation(Uniform(3)), default_root_dir=tmp_path, max_epochs=1, **TRAINER_OPTIONS
    )
    with pytest.raises(ValueError, match=r"^Expected the net of FedAvg .* FedAvg\(copy.deepcopy"):
        trainer.fit(first, make_data())


@pytest.mark.slow
def test_results_per_client_stay_until_the_next_evaluation(tmp_path):
    """A prediction and further rounds keep the results."""
    trainer, client = fit_client(tmp_path)
    data = trainer.datamodule
    federation, losses = trainer.federation, []
    mean = results(trainer, client, data)["test/personal/loss"]
    trainer.predict(client, datamodule=data)
    losses.append(federation.metrics("test")["personal"].per_client()["loss"])
    trainer.fit_loop.max_epochs = 5
    trainer.fit(client, data)
    losses.append(federation.metrics("test")["personal"].per_client()["loss"])
    assert float(losses[0].mean()) == pytest.approx(mean)
    assert torch.equal(*losses)
    later_mean = results(trainer, client, data)["test/personal/loss"]
    after = federation.metrics("test")["personal"].per_client()["loss"]
    assert float(after.mean()) == pytest.approx(later_mean)
    assert later_mean != pytest.approx(mean)
