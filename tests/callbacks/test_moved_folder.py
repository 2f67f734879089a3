"""The best checkpoints of a run whose folder was moved, or is named by another path."""

import os
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_federations import classes, mlp, quiet_trainer, seeded, sgd, shared_out

from pl_fed.clients import FedAvg


def fit(folder, rounds, **kwargs):
    """Train with the checkpoints of the two lowest rounds; return their callback."""
    best = ModelCheckpoint(
        monitor="round", mode="min", save_top_k=2, save_last=True, filename="{round:.0f}"
    )
    trainer = quiet_trainer(folder, rounds, callbacks=[best])
    client = seeded(lambda: FedAvg(mlp(), optimizer=sgd(0.2)))
    trainer.fit(client, shared_out(classes([9, 7, 5]), val_fraction=0.3), **kwargs)
    return best


def move(folder):
    return folder.rename(folder.with_name("moved"))


def copy(folder):
    return shutil.copytree(folder, folder.with_name("copied"))


def name_relatively(folder):
    return os.path.relpath(folder)


@pytest.mark.parametrize("change", [move, copy, name_relatively], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("error:The dirpath has changed")
@pytest.mark.slow
def test_run_under_another_path_knows_its_best_rounds(tmp_path, change):
    fit(tmp_path / "run", 3)
    folder = change(tmp_path / "run")
    best = fit(folder, 5, ckpt_path="last")
    checkpoints = os.path.abspath(os.path.join(folder, "checkpoints"))
    files = {name: os.path.join(checkpoints, f"round={name}.ckpt") for name in "01"}
    scores = {os.path.abspath(path): float(score) for path, score in best.best_k_models.items()}
    assert scores == {files["0"]: 0.0, files["1"]: 1.0}
    assert os.path.abspath(best.best_model_path) == files["0"]
    assert float(best.best_model_score) == 0.0
    assert sorted(os.listdir(checkpoints)) == ["last.ckpt", "round=0.ckpt", "round=1.ckpt"]
    assert torch.load(files["1"])["global_step"] == 2


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.slow
def test_run_in_a_new_folder_leaves_the_files_of_the_earlier_run(tmp_path):
    fit(tmp_path / "run", 3)
    best = fit(tmp_path / "new", 5, ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert sorted(map(float, best.best_k_models.values())) == [3.0, 4.0]
    assert all(path.startswith(str(tmp_path / "new")) for path in best.best_k_models)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["last.ckpt", "round=0.ckpt", "round=1.ckpt"]


@pytest.mark.slow
def test_checkpoints_have_paths_as_the_user_writes_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit("run", 2)
    state = list_states(tmp_path / "run")[0]
    assert state["dirpath"] == "run/checkpoints"
    assert list(state["best_k_models"]) == [
        "run/checkpoints/round=0.ckpt",
        "run/checkpoints/round=1.ckpt",
    ]
    fit(tmp_path / "other", 2)
    assert list_states(tmp_path / "other")[0]["dirpath"] == str(tmp_path / "other" / "checkpoints")


def list_states(folder):
    """Return the states of the checkpoint callbacks in the last checkpoint."""
    callbacks = torch.load(folder / "checkpoints" / "last.ckpt")["callbacks"]
    return [state for name, state in callbacks.items() if name.startswith("ModelCheckpoint")]


@pytest.mark.filterwarnings("error:The dirpath has changed")
@pytest.mark.slow
def test_best_rounds_in_a_folder_of_their_own_survive_a_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores = []
    for rounds, options in ((3, {}), (5, {"ckpt_path": "last"})):
        best = ModelCheckpoint(
            dirpath="run/best", monitor="round", mode="min", filename="{round:.0f}"
        )
        last = ModelCheckpoint(save_last=True)
        trainer = quiet_trainer("run", rounds, callbacks=[best, last])
        client = seeded(lambda: FedAvg(mlp(), optimizer=sgd(0.2)))
        trainer.fit(client, shared_out(classes([9, 7, 5]), val_fraction=0.3), **options)
        scores.append(float(best.best_model_score))
    assert scores == [0.0, 0.0]
    assert os.listdir("run/best") == ["round=0.ckpt"]
