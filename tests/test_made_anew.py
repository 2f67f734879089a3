"""Data, trainers and federations made anew: what clients keep is neither lost nor mixed."""

import pytest
import torch
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.samplers import Uniform

HOW = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
HOW |= {"limit_val_batches": 0}


def data_of(sizes=(19, 17, 15, 20), seed=0):
    return shared_out(classes(list(sizes), seed=seed), test_fraction=0.3)


def trained(folder, kind=Ditto, rounds=3, momentum=0.0):
    client = kind(seeded(mlp), optimizer=sgd(0.2), local_epochs=2)
    federation = Federation(Uniform(3), server_optimizer=sgd(1.0, momentum=momentum), seed=0)
    trainer = pl_fed.Trainer(federation, default_root_dir=folder, max_epochs=rounds, **HOW)
    trainer.fit(client, data_of())
    return trainer, client


def results(trainer, client, data, **kwargs):
    (found,) = trainer.test(client, data, verbose=False, **kwargs)
    return found


def test_data_made_anew_are_the_same_clients(tmp_path):
    trainer, client = trained(tmp_path)
    before = results(trainer, client, trainer.datamodule)
    assert before["test/personal/loss"] != before["test/global/loss"]
    assert results(trainer, client, data_of()) == before
    models = [client for client in trainer.federation.store.read("personal", torch.arange(4))]
    trainer.predict(client, datamodule=data_of())
    again = trainer.federation.store.read("personal", torch.arange(4))
    assert all(torch.equal(*pair) for pair in zip(models, again))


def test_other_samples_of_the_same_clients_are_what_is_looked_at(tmp_path):
    trainer, client = trained(tmp_path)
    before = results(trainer, client, data_of())
    other = results(trainer, client, data_of(seed=1))
    assert other["test/personal/loss"] != before["test/personal/loss"]
    assert results(trainer, client, data_of()) == before


def test_training_goes_on_with_data_made_anew(tmp_path):
    """States of clients and the server's momentum are still there."""
    rows = []
    for anew in (False, True):
        trainer, client = trained(tmp_path / str(anew), momentum=0.9)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(client, data_of() if anew else trainer.datamodule)
        rows.append(
            [client.row("global").data, trainer.federation.store.read("personal", torch.arange(4))]
        )
    assert all(torch.equal(*pair) for pair in zip(*rows))


def test_an_evaluation_on_other_clients_loses_nothing(tmp_path):
    trainer, client = trained(tmp_path)
    before = results(trainer, client, data_of())
    match = "the data on which Ditto was fitted, because its clients .* other data to evaluate: use"
    with pytest.raises(ValueError, match=match):
        results(trainer, client, data_of((19, 17, 15)))
    assert results(trainer, client, data_of()) == before


def test_a_global_model_alone_is_evaluated_on_any_clients(tmp_path):
    trainer, client = trained(tmp_path, FedAvg)
    assert "test/global/loss" in results(trainer, client, data_of((19, 17, 15)))


def test_a_checkpoint_is_loaded_for_other_clients(tmp_path):
    trainer, client = trained(tmp_path / "one")
    expected = results(trainer, client, data_of())
    checkpoint = trainer.run_dir / "checkpoints" / "last.ckpt"
    trainer.fit(client, data_of((19, 17, 15)))
    assert results(trainer, client, data_of(), ckpt_path=checkpoint) == expected


def test_another_federation_is_warned_of(tmp_path):
    trainer, client = trained(tmp_path)
    expected = results(trainer, client, data_of())
    other = pl_fed.Trainer(Federation(Uniform(3), seed=0), default_root_dir=tmp_path, **HOW)
    with pytest.warns(UserWarning, match="Another Federation has trained Ditto and has its"):
        assert results(other, client, data_of()) != expected
    same = pl_fed.Trainer(trainer.federation, default_root_dir=tmp_path, **HOW)
    again = results(same, client, data_of())
    assert again["test/global/loss"] == expected["test/global/loss"]


def test_results_can_be_read_for_each_client_until_the_next_evaluation(tmp_path):
    """Also after a prediction, and after more rounds."""
    trainer, client = trained(tmp_path)
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
    again = results(trainer, client, data)["test/personal/loss"]
    after = federation.metrics("test")["personal"].per_client()["loss"]
    assert float(after.mean()) == pytest.approx(again)
    assert again != pytest.approx(mean)
