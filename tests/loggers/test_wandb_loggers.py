"""Each trainer has a Weights & Biases run of its own, and modules log to the user's logger."""

import pytest
import torch
import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.loggers import RunCSV
from pl_fed.samplers import All


def make_trainer(folder, logger=None):
    return pl_fed.Trainer(
        pl_fed.Federation(All(), seed=0), run_dir=folder, logger=logger, max_epochs=1,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def fit(trainer):
    client, data = FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes([6, 8]))
    trainer.fit(client, data)
    return client, data


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield
    wandb.finish()


@pytest.mark.slow
def test_fits_in_one_process_have_runs_of_their_own_in_their_folders(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    trainers = [make_trainer(folder, WandbLogger(offline=True)) for folder in folders]
    fitted = [fit(trainer) for trainer in trainers]
    ids = {next(folder.glob("wandb/offline-run-*")).name.split("-")[-1] for folder in folders}
    assert len(ids) == 3
    assert not (tmp_path / "wandb").exists(), "nothing is in the current folder"
    client, data = fitted[0]
    trainers[0].test(client, data, verbose=False)  # it goes on with its own run
    assert trainers[0].logger.experiment.id in ids
    assert wandb.run is trainers[0].logger.experiment


@pytest.mark.slow
def test_run_that_the_user_has_begun_is_shared(tmp_path):
    with wandb.init(dir=tmp_path) as run:
        for name in "ab":
            trainer = make_trainer(tmp_path / name, WandbLogger(offline=True))
            fit(trainer)
            assert trainer.logger.experiment is run
        assert wandb.run is run


def test_logger_of_a_trainer_is_the_users(tmp_path):
    own = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path / "a", own)
    assert trainer.logger is own
    assert isinstance(trainer.loggers[0], RunCSV), "its folder is that of the checkpoints"
    trainer = make_trainer(tmp_path / "b")
    assert isinstance(trainer.logger, RunCSV)


def test_module_may_draw_without_a_logger(tmp_path):
    experiment = make_trainer(tmp_path).logger.experiment
    assert experiment.add_histogram("w", torch.zeros(3), global_step=1) is None
    experiment.log({"a": 1})
