"""The last checkpoint beside weight averaging, a best checkpoint and another run."""

import csv
import os

import pytest
import torch
from exhaustive import exhaustive_for
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    WeightAveraging,
)
from small_federations import classes, mlp, quiet_trainer, seeded, sgd, shared_out

import pl_fed
from pl_fed.callbacks import LastCheckpoint
from pl_fed.clients import Ditto
from pl_fed.lightning.compatibility import check_callback
from pl_fed.samplers import All


class Failure(Callback):
    """Raises an error in the third round's validation."""

    def on_validation_batch_end(self, trainer, *args):
        if trainer.current_epoch == 2 and not trainer.sanity_checking:
            raise RuntimeError("stopped")


def make_client_and_data():
    client = seeded(lambda: Ditto(mlp(), optimizer=sgd(0.2)))
    return client, shared_out(classes([9, 7, 5]), val_fraction=0.3)


def run(folder, average, rounds, *more_callbacks, **kwargs):
    callbacks = [average(), LastCheckpoint(share=1e-9), *more_callbacks]
    client, data = make_client_and_data()
    quiet_trainer(folder, rounds, callbacks=callbacks).fit(client, data, **kwargs)
    return client.row("global").data.clone()


AVERAGES = {"EMA": lambda: EMAWeightAveraging(decay=0.5), "mean": WeightAveraging}


@pytest.mark.slow
@exhaustive_for("after a round-EMA", "in a validation-mean")
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("stopped", ["after a round", "in a validation"])
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint")
def test_resumed_run_with_weight_averaging_equals_uninterrupted_run(tmp_path, average, stopped):
    uninterrupted = run(tmp_path / "whole", average, 5)
    if stopped == "after a round":
        run(tmp_path / "parts", average, 3)
    else:
        with pytest.raises(RuntimeError, match="stopped"):
            run(tmp_path / "parts", average, 5, Failure())
    assert torch.equal(run(tmp_path / "parts", average, 5, ckpt_path="last"), uninterrupted)


@pytest.mark.slow
def test_last_checkpoint_is_of_the_last_round_beside_a_best_checkpoint(tmp_path):
    """Lightning's own last checkpoint would be of the last best round: here the first."""
    best = ModelCheckpoint(monitor="round", mode="min", save_last=True, filename="best")
    trainer = quiet_trainer(tmp_path, 4, callbacks=best)
    trainer.fit(*make_client_and_data())
    files = {path.stem: torch.load(path) for path in (tmp_path / "checkpoints").iterdir()}
    assert {name: checkpoint["global_step"] for name, checkpoint in files.items()} == {
        "best": 1,
        "last": 4,
    }
    client, data = make_client_and_data()
    quiet_trainer(tmp_path, 6, callbacks=best).fit(client, data, ckpt_path="last")
    uninterrupted, data = make_client_and_data()
    quiet_trainer(tmp_path / "whole", 6).fit(uninterrupted, data)
    assert torch.equal(client.row("global").data, uninterrupted.row("global").data)


def test_last_checkpoint_is_saved_after_other_checkpoints_of_the_round(tmp_path):
    """It has their best scores: a resumed run would not know the score of its own round."""
    best = ModelCheckpoint(monitor="round")
    trainer = quiet_trainer(tmp_path, 1, callbacks=[LastCheckpoint(), best])
    assert [type(c) for c in trainer.checkpoint_callbacks] == [ModelCheckpoint, LastCheckpoint]


def test_no_second_last_checkpoint_is_added(tmp_path):
    """Lightning refuses two callbacks of the class, as both have the same state in a checkpoint."""
    best = ModelCheckpoint(monitor="round", save_last=True)
    trainer = quiet_trainer(tmp_path, 1, callbacks=[LastCheckpoint(share=1), best])
    assert [c.share for c in trainer.callbacks if isinstance(c, LastCheckpoint)] == [1]


def test_last_checkpoint_with_weights_only_is_named():
    weights = ModelCheckpoint(save_last=True, save_weights_only=True)
    with pytest.warns(UserWarning, match="writes a last.ckpt from which no run can resume"):
        check_callback(weights)


@pytest.mark.slow
def test_another_run_in_the_same_folder_is_refused(tmp_path):
    trainer = quiet_trainer(tmp_path, 2)
    client, data = make_client_and_data()
    trainer.fit(client, data)
    before = (tmp_path / "metrics.csv").read_text()
    with pytest.raises(ValueError, match=r"`run_dir` to be a folder without a run but got .*go on"):
        quiet_trainer(tmp_path, 1).fit(*make_client_and_data())
    assert (tmp_path / "metrics.csv").read_text() == before
    trainer.fit_loop.max_epochs = 3
    trainer.fit(client, data)  # its own
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4


@pytest.mark.slow
def test_another_run_beside_a_finished_one_without_a_checkpoint_is_refused(tmp_path):
    """Its rounds would replace those of the finished run."""
    quiet_trainer(tmp_path, 1, enable_checkpointing=False).fit(*make_client_and_data())
    before = (tmp_path / "metrics.csv").read_text()
    with pytest.raises(ValueError, match=r"`run_dir` to be a .* holds one: take another folder"):
        quiet_trainer(tmp_path, 1, enable_checkpointing=False).fit(*make_client_and_data())
    assert (tmp_path / "metrics.csv").read_text() == before


@pytest.mark.slow
def test_a_run_from_the_checkpoint_of_another_one_replaces_no_third_run(tmp_path):
    """As when a script is started again that goes on with the first run in the second's folder."""
    first, second = tmp_path / "first", tmp_path / "second"
    quiet_trainer(first, 1).fit(*make_client_and_data())
    path = first / "checkpoints" / "last.ckpt"
    quiet_trainer(second, 2).fit(*make_client_and_data(), ckpt_path=path)
    with pytest.raises(ValueError, match=r"`run_dir` to be a folder without a run but got .*go on"):
        quiet_trainer(second, 2).fit(*make_client_and_data(), ckpt_path=path)
    own = second / "checkpoints" / "last.ckpt"
    quiet_trainer(second, 3).fit(*make_client_and_data(), ckpt_path=own)
    rows = list(csv.DictReader((second / "metrics.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2"]


def test_a_change_of_the_current_folder_leaves_the_files_together(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = quiet_trainer("run", 2)
    trainer.callbacks.append(LambdaCallback(on_train_epoch_end=lambda *_: os.chdir("other")))
    monkeypatch.chdir(tmp_path / "other")
    (tmp_path / "other" / "other" / "other").mkdir(parents=True)
    trainer.fit(*make_client_and_data())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


def test_a_test_before_the_fit_is_no_other_run(tmp_path):
    trainer, (client, data) = quiet_trainer(tmp_path, 1), make_client_and_data()
    trainer.test(client, data, verbose=False)
    trainer.fit(client, data)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["round"] for row in rows] == ["0"]
    assert not any(value for name, value in rows[0].items() if name.startswith("test/"))


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["max_epochs", "max_steps", "early stopping"])
def test_last_checkpoint_does_not_depend_on_the_time_that_saving_takes(tmp_path, ends):
    """A busy machine saves other rounds on the way, and the same last one."""
    saved = []
    for name, share in (("quiet", 1.0), ("busy", 1e-9)):
        callbacks, limits = [LastCheckpoint(share)], {"max_steps": 4} if ends == "max_steps" else {}
        if ends == "early stopping":
            callbacks.append(EarlyStopping("round", patience=3, mode="min", strict=False))
        client, data = make_client_and_data()
        rounds = 4 if ends == "max_epochs" else 20
        trainer = quiet_trainer(tmp_path / name, rounds, callbacks=callbacks, **limits)
        trainer.fit(client, data)
        path = tmp_path / name / "checkpoints" / "last.ckpt"
        saved.append(torch.load(path, weights_only=True))
        del saved[-1]["loops"]["fit_loop"]["state_dict"]["metrics"]["time/round"]
    first, second = saved
    assert first["global_step"] == second["global_step"]
    assert (first["epoch"], str(first["loops"])) == (second["epoch"], str(second["loops"]))


def test_a_metric_with_slashes_begins_no_folder(tmp_path):
    best = ModelCheckpoint(monitor="train/loss", filename="{epoch}-{train/loss:.2f}")
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All()), max_epochs=2, run_dir=tmp_path, callbacks=[best], logger=False
    )
    trainer.fit(Ditto(mlp(), optimizer=sgd()), shared_out(classes([16, 24])))
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert len(names) == 1
    assert names[0].startswith("epoch=")
    assert "-train_loss=" in names[0]
