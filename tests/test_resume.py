"""A run that was killed and resumed ends as if it had never been killed, bit for bit."""

import csv
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

import pl_fed.lightning.checkpoints
import pl_fed.state.row_table
import pl_fed.state.store
from pl_fed.attacks import RandomLabels
from pl_fed.callbacks import LastCheckpoint
from pl_fed.clients import Ditto, FedAvg
from pl_fed.command.main import main
from pl_fed.data import Digits, FederatedData
from pl_fed.lightning.checkpoints import AtomicCheckpointIO
from pl_fed.partitioners import Shards
from pl_fed.rounds.identity import CHECKPOINT_FORMAT
from pl_fed.run_folder import last_checkpoint, last_run
from pl_fed.samplers import Uniform
from pl_fed.state import ClientStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be"),
]

ROUNDS = 6
MONITOR = "val/personal/loss"


class Killed(Exception):  # noqa: N818
    """Stands for a kill: nothing is saved on the way out."""


class Killer(Callback):
    """Dies at a hook, in round 3 or in the first one after it in which the hook is called."""

    def __init__(self, hook=None):
        self.hook = hook
        if hook not in (None, "training_step"):
            setattr(self, hook, self.die)

    def die(self, trainer, *_):
        if trainer.current_epoch >= 3:
            raise Killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.dies = self.hook == "training_step" and trainer.current_epoch >= 3


class LateKiller(Killer, Checkpoint):
    """The same, right after a checkpoint was saved at that hook: checkpoints come last."""


class Mortal(Ditto):
    """Ditto, which can die in the middle of a round: in the second client's second step."""

    dies, steps = False, 0

    def training_step(self, batch, batch_idx):
        self.steps += self.dies
        if self.steps == 4:
            raise Killed
        return super().training_step(batch, batch_idx)


def dropout_net():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10)
    )


def batch_norm_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ROUNDS)


def warmup(optimizer):
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, cosine(optimizer)], [3])


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, MONITOR, factor=0.5, patience=0, threshold=0.05)


@functools.cache
def digits(num_clients=5):
    return FederatedData(Digits(), Shards(3), num_clients, clients_per_eval_batch=2)


def make(
    run_dir,
    kill=None,
    net=dropout_net,
    schedule=cosine,
    client=Mortal,
    callbacks=(),
    on_disk=False,
    memory=0.5,
    **arguments,
):
    """Make the trainer and the client of a run: nothing is shared with those of another run."""
    torch.manual_seed(0)
    algorithm = client(
        net(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        lr_scheduler=schedule,
        local_steps=2,
    )
    federation = pl_fed.Federation(
        Uniform(3),
        server_optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        adversary=pl_fed.Adversary(attack=RandomLabels(redraw=True), ids=[1]),
        engine=pl_fed.EngineOptions(chunk_size=1),
        storage=pl_fed.StorageOptions(
            folder=str(run_dir / "store") if on_disk else None, memory=memory
        ),
    )
    trainer = pl_fed.Trainer(
        federation,
        run_dir=run_dir,
        accelerator="cpu",
        callbacks=[*callbacks, kill if isinstance(kill, Callback) else Killer(kill)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": ROUNDS} | arguments),
    )
    return trainer, algorithm


def rows(folder, leave_out=("time/round",)):
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {name: value for name, value in row.items() if name not in leave_out}
            for row in csv.DictReader(file)
        ]


def differences(one, other, where=""):
    """Yield where two nests of dicts, lists and tensors differ."""
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield where
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            yield f"{where}: {one.keys() ^ other.keys()}"
        for name in one.keys() & other.keys():
            yield from differences(one[name], other[name], f"{where}/{name}")
    elif isinstance(one, list | tuple) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other)):
            yield from differences(a, b, f"{where}/{index}")
    elif one != other:
        yield f"{where}: {one} and {other}"


def placeless(nest, folder):
    """Replace the run's folder in a checkpoint's paths, and leave out what measures time."""
    if isinstance(nest, dict):
        return {
            placeless(name, folder): placeless(each, folder)
            for name, each in nest.items()
            if name != "time/round"
        }
    return nest.replace(str(folder), "RUN") if isinstance(nest, str) else nest


def checkpoint(folder):
    """Return the last checkpoint; whether it was saved in its last round or after it is all one."""
    content = torch.load(last_checkpoint(folder), weights_only=True)
    del content["epoch"], content["loops"]["fit_loop"]["epoch_progress"]
    return placeless(content, folder)


def outcome(trainer, client, folder):
    """Return all that a run ends with."""
    return {
        "rounds": (trainer.current_epoch, trainer.global_step),
        "client": client.state_dict(),
        "federation": trainer.federation.state_dict(),
        "learning rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "schedules": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "metrics.csv": rows(folder),
        "checkpoint": checkpoint(folder),
    }


def run(folder, **how):
    folder.mkdir()
    trainer, client = make(folder, **how)
    trainer.fit(client, digits())
    return outcome(trainer, client, folder)


def run_killed(folder, kill, **how):
    """Run until killed, and resume."""
    folder.mkdir()
    trainer, client = make(folder, kill=kill, **how)
    with pytest.raises(Killed):
        trainer.fit(client, digits())
    return resume(folder, **how)


def resume(folder, **how):
    trainer, client = make(folder, **how)
    trainer.fit(client, digits(), ckpt_path="last")
    return outcome(trainer, client, folder)


def saved(**how):
    """Return callbacks that save: made anew for each run, as they remember."""
    return lambda: [ModelCheckpoint(save_last=True, **how)]


MOMENTS = [
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
]
SAVES = {
    "each epoch": (saved(), {}),
    "each epoch, max_steps": (saved(), {"max_steps": ROUNDS, "max_epochs": None}),
    "each epoch, validation every 2nd": (
        saved(save_on_train_epoch_end=True),
        {"check_val_every_n_epoch": 2},
    ),
    "each validation": (saved(save_on_train_epoch_end=False), {}),
    "each validation, every 2nd": (saved(), {"check_val_every_n_epoch": 2}),
    "each validation, every 3rd": (
        saved(save_on_train_epoch_end=False),
        {"check_val_every_n_epoch": 3, "max_steps": ROUNDS},
    ),
    "the best of each validation": (
        saved(monitor=MONITOR, save_top_k=-1, save_on_train_epoch_end=False),
        {},
    ),
    "each step": (saved(every_n_train_steps=1), {}),
    "each step, max_steps": (
        saved(every_n_train_steps=1),
        {"max_steps": ROUNDS, "check_val_every_n_epoch": 2},
    ),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the outcome of a run that is not killed, one for each way of saving."""

    @functools.cache
    def outcome_of(name):
        make_callbacks, arguments = SAVES[name]
        folder = tmp_path_factory.mktemp("whole") / "run"
        return run(folder, callbacks=make_callbacks(), **arguments)

    return outcome_of


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", SAVES)
def test_killed_and_resumed_is_as_never_killed(tmp_path, uninterrupted, name, moment):
    make_callbacks, arguments = SAVES[name]
    folder = tmp_path / "run"
    folder.mkdir()
    trainer, client = make(folder, kill=moment, callbacks=make_callbacks(), **arguments)
    with pytest.raises(Killed):
        trainer.fit(client, digits())
    result = resume(folder, callbacks=make_callbacks(), **arguments)
    expected = uninterrupted(name)
    if moment == "on_train_end":  # resumed when all is done, ModelCheckpoint saves that moment
        expected = {**expected, "checkpoint": result["checkpoint"]}
    assert list(differences(expected, result)) == []


RESUMES = {
    "after the training": (saved(every_n_train_steps=1), "on_validation_start"),
    "after the validation": (saved(save_on_train_epoch_end=False), "on_train_epoch_end"),
    "after the round": (saved(save_on_train_epoch_end=True), "on_train_epoch_start"),
    "as soon as the training is saved": (
        saved(every_n_train_steps=1),
        LateKiller("on_train_batch_end"),
    ),
    "as soon as the validation is saved": (
        saved(save_on_train_epoch_end=False),
        LateKiller("on_validation_end"),
    ),
    "as soon as the round is saved": (
        saved(save_on_train_epoch_end=True),
        LateKiller("on_train_epoch_end"),
    ),
}
"""Where a round is taken up again: how it is saved, and when the run is killed."""
resumes = pytest.mark.parametrize(("save", "moment"), RESUMES.values(), ids=RESUMES)

TRAINED = {
    "warmup": {"schedule": warmup},
    "BatchNorm": {"net": batch_norm_net},
    "64-true": {"precision": "64-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "global model only, no schedule": {"client": FedAvg, "schedule": None},
    "no sanity check, min_epochs": {"num_sanity_val_steps": 0, "min_epochs": 2},
    "states on disk": {"on_disk": True},
    "seldom logged": {"log_every_n_steps": 4, "check_val_every_n_epoch": 2},
    "logged in the end": {"log_every_n_steps": 100, "check_val_every_n_epoch": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", TRAINED.values(), ids=TRAINED)
def test_whatever_is_trained(tmp_path, how):
    save, moment = RESUMES["after the training"]
    whole = run(tmp_path / "whole", callbacks=save(), **how)
    again = run_killed(tmp_path / "killed", moment, callbacks=save(), **how)
    assert list(differences(whole, again)) == []


class LogsAtTheEnd(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("mine", float(trainer.current_epoch) ** 2)


WATCHERS = {
    "EarlyStopping after validation": lambda: [
        EarlyStopping(MONITOR, patience=9, check_on_train_epoch_end=False)
    ],
    "EarlyStopping after the round": lambda: [EarlyStopping(MONITOR, patience=9)],
    "LearningRateMonitor": lambda: [LearningRateMonitor()],
    "WeightAveraging": lambda: [WeightAveraging()],
    "a metric of one's own": lambda: [LogsAtTheEnd()],
}


@pytest.mark.slow
@resumes
@pytest.mark.parametrize("watchers", WATCHERS.values(), ids=WATCHERS)
def test_whoever_watches(tmp_path, watchers, save, moment):
    whole = run(tmp_path / "whole", callbacks=[*watchers(), *save()])
    again = run_killed(tmp_path / "killed", moment, callbacks=[*watchers(), *save()])
    assert list(differences(whole, again)) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2], ids=["each round", "every 2nd"])
@resumes
def test_a_schedule_that_watches_a_metric(tmp_path, every, save, moment):
    how = {"schedule": plateau, "check_val_every_n_epoch": every}
    whole = run(tmp_path / "whole", callbacks=save(), **how)
    again = run_killed(tmp_path / "killed", moment, callbacks=save(), **how)
    assert list(differences(whole, again)) == []
    assert whole["learning rates"][0] < 0.1, "or the schedule had nothing to do"


def test_a_metric_seen_rounds_ago_is_still_there(tmp_path):
    """EarlyStopping looks after each round, at a metric of every third."""

    def callbacks():
        stopping = EarlyStopping(MONITOR, patience=9, check_on_train_epoch_end=True, strict=False)
        return [stopping, *saved(save_on_train_epoch_end=True)()]

    how = {"check_val_every_n_epoch": 3}
    whole = run(tmp_path / "whole", callbacks=callbacks(), **how)
    again = run_killed(tmp_path / "killed", "on_train_epoch_start", callbacks=callbacks(), **how)
    assert list(differences(whole, again)) == []


@pytest.mark.slow
def test_stopped_early_is_not_taken_up_again(tmp_path):
    def callbacks():
        return [EarlyStopping("round", mode="max", stopping_threshold=3.0), *saved()()]

    whole = run(tmp_path / "whole", callbacks=callbacks())
    assert whole["rounds"] == (5, 5)
    again = run_killed(tmp_path / "killed", "on_train_end", callbacks=callbacks())
    assert list(differences(whole, again)) == []


@pytest.mark.slow
def test_more_rounds(tmp_path):
    whole = run(tmp_path / "whole", schedule=None)
    run(tmp_path / "longer", schedule=None, max_epochs=4)
    longer = resume(tmp_path / "longer", schedule=None, max_epochs=ROUNDS)
    assert list(differences(whole, longer)) == []


@pytest.mark.slow
def test_more_rounds_in_the_same_process(tmp_path):
    whole = run(tmp_path / "whole", schedule=None)
    folder = tmp_path / "longer"
    folder.mkdir()
    trainer, client = make(folder, schedule=None, max_epochs=4)
    trainer.fit(client, digits())
    trainer.fit_loop.max_epochs = ROUNDS
    trainer.fit(client, digits())
    assert list(differences(whole, outcome(trainer, client, folder))) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
@pytest.mark.parametrize("moment", ["on_validation_start", "on_train_epoch_end"])
def test_fit_again_after_an_error(tmp_path, moment):
    """The same trainer goes on where it was, without a checkpoint."""
    how = {"schedule": None, "max_steps": ROUNDS, "check_val_every_n_epoch": 2}
    folder = tmp_path / "run"
    folder.mkdir()
    killer = Killer(moment)
    trainer, client = make(folder, kill=killer, **how)
    with pytest.raises(Killed):
        trainer.fit(client, digits())
    setattr(killer, moment, lambda *_: None)
    trainer.fit(client, digits())
    whole = run(tmp_path / "whole", **how)
    assert list(differences(whole, outcome(trainer, client, folder))) == []


@pytest.mark.slow
def test_a_checkpoint_is_plain_tensors_and_numbers(tmp_path):
    run(tmp_path / "run", callbacks=[EarlyStopping(MONITOR), *saved(monitor=MONITOR)()])
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        content = torch.load(path, weights_only=True)
        if path.stem == "last":  # as the last round ended, or after it if time was short
            assert content["global_step"] == ROUNDS
            assert content["epoch"] in (ROUNDS - 1, ROUNDS)
        else:
            assert content["global_step"] == content["epoch"] + 1
        names = {"format", "identity", "adversary", "byzantine", "engine", "store", "server"}
        names |= {"participation"}
        assert set(content["federation"]) == names
        trainer, client = make(tmp_path / "again", max_epochs=ROUNDS + 1)
        trainer.fit(client, digits(), ckpt_path=path, weights_only=True)
        assert trainer.global_step == ROUNDS + 1


# What does not fit


OTHERS = {
    "net": ({"net": batch_norm_net}, 5),
    "algorithm": ({"client": FedAvg}, 5),
    "number of clients": ({}, 4),
}


@pytest.mark.parametrize(("what", "other"), OTHERS.items(), ids=OTHERS)
def test_a_checkpoint_of_another_federation_is_refused(tmp_path, what, other):
    how, num_clients = other
    run(tmp_path / "run", max_epochs=1)
    trainer, client = make(tmp_path / "run", **how)
    with pytest.raises(ValueError, match=f"^Expected a checkpoint with the {what} "):
        trainer.fit(client, digits(num_clients), ckpt_path="last")


def test_a_checkpoint_of_plain_lightning_is_refused(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, path)
    trainer, client = make(tmp_path)
    with pytest.raises(
        ValueError, match=r"^Expected argument `ckpt_path` to be a checkpoint of pl_fed"
    ):
        trainer.fit(client, digits(), ckpt_path="last")


def test_nothing_to_resume_is_refused(tmp_path):
    trainer, client = make(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `ckpt_path` = \"last\""):
        trainer.fit(client, digits(), ckpt_path="last")
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `ckpt_path` = last"):
        last_run(tmp_path)


@pytest.mark.parametrize("evaluate", ["validate", "test", "predict"])
def test_evaluations_take_the_last_checkpoint_or_say_that_there_is_none(tmp_path, evaluate):
    """A new trainer's models are not trained."""
    run(tmp_path / "run", max_epochs=1)
    trainer, client = make(tmp_path / "run")
    getattr(trainer, evaluate)(client, datamodule=digits(), ckpt_path="last")
    assert client.state_dict().keys()
    trained = checkpoint(tmp_path / "run")["state_dict"]
    assert all(torch.equal(trained[name], row) for name, row in client.state_dict().items())
    trainer, client = make(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `ckpt_path` = \"last\""):
        getattr(trainer, evaluate)(client, datamodule=digits(), ckpt_path="last")


# Where checkpoints lie, and how they are written


def test_the_last_run_is_the_one_that_was_saved_last(tmp_path):
    for name in ("a", "b", "c"):
        run(tmp_path / name, max_epochs=1)
    os.utime(tmp_path / "b" / "checkpoints" / "last.ckpt")
    assert last_run(tmp_path) == tmp_path / "b"


def test_a_run_whose_folder_was_moved_goes_on(tmp_path):
    """Lightning does not recognise its last.ckpt then, and writes last-v1.ckpt."""
    run(tmp_path / "here", callbacks=saved()(), max_epochs=2)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.warns(UserWarning, match="dirpath has changed"):
        resume(tmp_path / "there", callbacks=saved()(), max_epochs=4)
    assert (tmp_path / "there" / "checkpoints" / "last-v1.ckpt").exists()
    assert checkpoint(tmp_path / "there")["global_step"] == 4
    assert last_run(tmp_path) == tmp_path / "there"


def test_a_kill_while_writing_leaves_the_good_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)

    def half(content, file):
        file.write(b"half of it")
        raise Killed

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(Killed):
        AtomicCheckpointIO().save_checkpoint({"round": 2}, path)
    assert torch.load(path, weights_only=True) == {"round": 1}
    monkeypatch.undo()
    AtomicCheckpointIO().save_checkpoint({"round": 2}, path)
    assert torch.load(path, weights_only=True) == {"round": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"], "what was left is used"


def test_a_kill_while_writing_one_leaves_nothing_beside_the_next(tmp_path, monkeypatch):
    """Checkpoints of each round have names of their own; what a kill leaves is used by the next."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=Killed))
    with pytest.raises(Killed):
        AtomicCheckpointIO().save_checkpoint({"round": 1}, tmp_path / "round=1.ckpt")
    monkeypatch.undo()
    assert not (tmp_path / "round=1.ckpt").exists()
    AtomicCheckpointIO().save_checkpoint({"round": 2}, tmp_path / "round=2.ckpt")
    assert [each.name for each in tmp_path.iterdir()] == ["round=2.ckpt"]


@pytest.fixture
def all_is_large(monkeypatch):
    """Checkpoints are mapped, and states are half in memory and half on disk, in many blocks."""
    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0)
    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_PIECE", 0)
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("all_is_large")
def test_a_large_run_is_as_any_other(tmp_path, uninterrupted):
    """It is killed, and resumed from a mapped checkpoint; all that it ends with is the same."""
    save, moment = RESUMES["after the training"]
    size = sum(p.numel() for p in dropout_net().parameters()) * 4
    again = run_killed(
        tmp_path / "killed", moment, callbacks=save(), memory=3 * size, max_epochs=ROUNDS
    )
    whole = run(tmp_path / "whole", callbacks=save())
    for each in (whole, again):
        for content in (each["federation"], each["checkpoint"]["federation"]):
            personal = content["store"]["personal"]
            assert len(personal["rows"]) == len(personal["clients"]) == 5, "a block for each row"
    assert list(differences(whole, again)) == []


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_checkpoint_is_streamed(tmp_path, monkeypatch, on_disk):
    """Saving and loading 64 MB of states takes a few blocks of memory more, not 64 MB."""
    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0)
    monkeypatch.setattr(
        pl_fed.lightning.checkpoints, "_PARTS", {}
    )  # this one has clients' states alone
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 1 << 22)
    defaults, path = {"personal": torch.zeros(1 << 18)}, tmp_path / "last.ckpt"
    store, again = (ClientStore(64, defaults, tmp_path if on_disk else None) for _ in range(2))
    for client in range(64):
        store.write("personal", torch.tensor([client]), torch.full((1, 1 << 18), client + 1.0))
    peaks, page_out = [], pl_fed.state.store.page_out

    def watched_write(self, content):
        peaks.append(resident())
        return write(self, content)

    def watched_page_out(rows):
        peaks.append(resident())
        page_out(rows)

    write = pl_fed.lightning.checkpoints._Stream.write
    monkeypatch.setattr(pl_fed.lightning.checkpoints._Stream, "write", watched_write)
    monkeypatch.setattr(pl_fed.state.store, "page_out", watched_page_out)
    before = resident()
    content = {"federation": {"format": CHECKPOINT_FORMAT, "store": store.state_dict()}}
    AtomicCheckpointIO().save_checkpoint(content, path)
    loaded = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    saved = len(peaks)
    again.load_state_dict(loaded["federation"]["store"])
    assert len(peaks) - saved == 16
    taken = 0 if on_disk else 64 << 20
    assert max(peaks[:saved]) - before < 16 << 20
    assert max(peaks[saved:]) - before < taken + (16 << 20)
    for client in (0, 33, 63):
        assert float(again.read("personal", torch.tensor([client])).mean()) == client + 1


def resident():
    """Bytes of memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("how", ["OnExceptionCheckpoint", "save_on_exception"])
def test_within_a_round_nothing_is_saved_on_exception(tmp_path, how):
    """Clients would be ahead of the server, and the last good checkpoint overwritten."""
    folder = tmp_path / "run"
    folder.mkdir()
    callbacks = saved(every_n_epochs=2, save_on_exception=how == "save_on_exception")()
    if how == "OnExceptionCheckpoint":
        callbacks.append(OnExceptionCheckpoint(folder / "checkpoints", "exception"))
    trainer, client = make(folder, kill="training_step", callbacks=callbacks)
    with (
        pytest.warns(UserWarning, match="No checkpoint is written to .* middle of round 3"),
        pytest.raises(Killed),
    ):
        trainer.fit(client, digits())
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "epoch=1-step=2.ckpt"}
    assert checkpoint(folder)["global_step"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No checkpoint is written")
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_last_checkpoint_after_an_exception(tmp_path, uninterrupted, moment):
    """It is saved once more on the way out, unless the round cannot be."""
    folder = tmp_path / "run"
    folder.mkdir()
    saver = LastCheckpoint()
    trainer, client = make(folder, kill=moment, callbacks=[saver])
    saver.on_train_start = lambda *_: setattr(saver, "_training", True)
    saver.on_train_epoch_end = lambda *_: None
    with pytest.raises(Killed):
        trainer.fit(client, digits())
    within = moment in (
        *("training_step", "on_before_optimizer_step", "on_train_batch_end"),
        "on_validation_end",  # of callbacks that watch, some may have looked
    )
    assert (last_checkpoint(folder) is None) is within
    if not within:
        result = resume(folder)
        expected = {**uninterrupted("each epoch"), "checkpoint": result["checkpoint"]}
        assert list(differences(expected, result)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"]
)
def test_whoever_watches_looks_once_though_a_round_was_ended_twice(tmp_path, moment):
    def how():
        stopping = EarlyStopping(MONITOR, min_delta=9.0, patience=4, check_on_train_epoch_end=True)
        schedule = functools.partial(
            ReduceLROnPlateau, monitor=MONITOR, factor=0.5, patience=2, threshold=0.99
        )
        return {"schedule": schedule, "callbacks": [stopping, LastCheckpoint()]}

    whole = run(tmp_path / "whole", **how())
    folder = tmp_path / "killed"
    folder.mkdir()
    trainer, client = make(folder, kill=moment, **how())
    with pytest.raises(Killed):
        trainer.fit(client, digits())
    assert last_checkpoint(folder) is not None
    again = resume(folder, **how())
    left_out = {"checkpoint": None}  # it also holds when it was saved
    assert list(differences(whole | left_out, again | left_out)) == []
    assert 3 < whole["rounds"][0] < ROUNDS, "or nobody had anything to decide"


class Unloadable(torch.optim.lr_scheduler.ConstantLR):
    def load_state_dict(self, state_dict):
        raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("what", ["callback", "schedule"])
def test_an_error_while_loading_leaves_the_checkpoint(tmp_path, what):
    run(tmp_path / "run")
    before = last_checkpoint(tmp_path / "run").read_bytes()
    killer = Killer()
    if what == "callback":
        killer.on_fit_start = fail
    schedule = Unloadable if what == "schedule" else cosine
    trainer, client = make(tmp_path / "run", kill=killer, schedule=schedule)
    with pytest.raises(Killed):
        trainer.fit(client, digits(), ckpt_path="last")
    assert last_checkpoint(tmp_path / "run").read_bytes() == before


def fail(*_):
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5], ids=["validated", "not validated"])
def test_asked_to_end_a_run_ends_its_round_and_saves_it(tmp_path, every):
    """SIGTERM is what a cluster sends before it kills."""
    folder, how = tmp_path / "run", {"check_val_every_n_epoch": every}
    folder.mkdir()
    trainer, client = make(folder, **how)
    trainer.callbacks[0].on_before_optimizer_step = ask_to_end
    with pytest.raises(SIGTERMException):
        trainer.fit(client, digits())
    assert checkpoint(folder)["global_step"] == 4
    assert list(differences(run(tmp_path / "whole", **how), resume(folder, **how))) == []


def ask_to_end(trainer, *_):
    if trainer.current_epoch == 3:
        os.kill(os.getpid(), signal.SIGTERM)


# For good


CONFIG = """
seed_everything: 3
model:
  class_path: pl_fed.clients.Ditto
  init_args:
    lam: 0.1
    local_steps: 4
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
    lr_scheduler:
      class_path: lightning.pytorch.cli.ReduceLROnPlateau
      init_args: {monitor: val/personal/loss, patience: 0, factor: 0.9}
    net:
      class_path: pl_fed.models.MLP
      init_args: {in_features: 64, hidden: [16], num_classes: 10}
data:
  dataset: {class_path: pl_fed.data.Digits}
  partitioner: {class_path: pl_fed.partitioners.Shards, init_args: {classes_per_client: 2}}
  num_clients: 20
federation:
  sampler: {class_path: pl_fed.samplers.Uniform, init_args: {cohort_size: 8}}
  server_optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}
  adversary: {attack: {class_path: pl_fed.attacks.FlippedLabels}, fraction: 0.2}
  engine: {name: one_by_one}  # `auto` may measure another as the fastest in the other run
trainer:
  max_epochs: 100
  check_val_every_n_epoch: 3
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
"""


@pytest.mark.slow
def test_killed_for_good_at_random_moments(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main(["fit", "--config", str(config), "--trainer.default_root_dir", str(whole)])

    moments = random.Random(os.getpid())
    for rounds in (-1, 5, 30, 60):
        process = start(config, killed)
        while not any(rounds_of(path.parent) > rounds for path in killed.glob("*/checkpoints")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    process = start(config, killed)
    assert process.wait() == 0, process.stderr.read()

    (one,), (other,) = whole.iterdir(), killed.iterdir()
    assert list(differences(checkpoint(one), checkpoint(other))) == []
    assert rows(one) == rows(other)
    assert (one / "per_client.csv").read_text() == (other / "per_client.csv").read_text()


def rounds_of(folder):
    return len(rows(folder)) if (folder / "metrics.csv").exists() else 0


def start(config, root):
    arguments = ["fit", "--config", str(config), "--trainer.default_root_dir", str(root)]
    if any(root.glob("*/checkpoints")):
        arguments += ["--ckpt_path", "last"]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-m", "pl_fed", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **threads},
        cwd=Path(__file__).parent.parent,
    )
