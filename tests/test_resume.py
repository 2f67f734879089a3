"""A run that was killed and resumed ends bit for bit as an uninterrupted run."""

import csv
import functools
import os
import random
import re
import resource
import signal
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but, exhaustive_for
from forked_processes import fork_context
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    EMAWeightAveraging,
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
from pl_fed.command.run_choice import read_run
from pl_fed.data import Digits, FederatedData
from pl_fed.lightning.checkpoints import AtomicCheckpointIO
from pl_fed.partitioners import Shards
from pl_fed.rounds.identity import CHECKPOINT_FORMAT
from pl_fed.run_folder import last_checkpoint, last_run
from pl_fed.safe_load import safe_load
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
    """Stands for a kill: nothing is saved afterwards."""


class Killer(Callback):
    """Raises an error at the first call of a hook from round ``start`` on."""

    def __init__(self, hook=None, start=3):
        self.hook, self.start = hook, start
        if hook not in (None, "training_step"):
            setattr(self, hook, self.kill)

    def kill(self, trainer, *_):
        if trainer.current_epoch >= self.start:
            raise Killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.dies = self.hook == "training_step" and trainer.current_epoch >= self.start


class LateKiller(Killer, Checkpoint):
    """A killer that is called after the callback that saves: checkpoints come last."""


class Mortal(Ditto):
    """Ditto that can be killed in the middle of a round: in the second client's second step."""

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
    keep_optimizer_state=False,
    **arguments,
):
    """Return a trainer and a client that share nothing with those of another run."""
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
        engine=pl_fed.EngineOptions(chunk_size=1, keep_optimizer_state=keep_optimizer_state),
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


def rows(folder, excluded=("time/round",)):
    """Return the rows of metrics.csv without the columns that measure time."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {name: value for name, value in row.items() if name not in excluded}
            for row in csv.DictReader(file)
        ]


def differences(first, second, where=""):
    """Yield the different places of two nests of dicts, lists and tensors."""
    if isinstance(first, torch.Tensor):
        if first.dtype != second.dtype or not equal_or_undefined(first, second):
            yield where
    elif isinstance(first, dict):
        if first.keys() != second.keys():
            yield f"{where}: {first.keys() ^ second.keys()}"
        for name in first.keys() & second.keys():
            yield from differences(first[name], second[name], f"{where}/{name}")
    elif isinstance(first, list | tuple) and len(first) == len(second):
        for index, (a, b) in enumerate(zip(first, second)):
            yield from differences(a, b, f"{where}/{index}")
    elif first != second:
        yield f"{where}: {first} and {second}"


def equal_or_undefined(first, second):
    """Return whether two tensors are equal; NaN, as of an undefined metric, equals NaN."""
    if first.shape != second.shape:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def normalize(nest, folder):
    """Return a checkpoint without its folder in paths and without measured times."""
    if isinstance(nest, dict):
        return {
            normalize(name, folder): normalize(entry, folder)
            for name, entry in nest.items()
            if name != "time/round"
        }
    return nest.replace(str(folder), "RUN") if isinstance(nest, str) else nest


def checkpoint(folder):
    """Return the last checkpoint without its counters of the moment of saving."""
    content = safe_load(last_checkpoint(folder))
    del content["epoch"], content["loops"]["fit_loop"]["epoch_progress"]
    return normalize(content, folder)


def outcome(trainer, client, folder):
    """Return the final state of a run."""
    return {
        "rounds": (trainer.current_epoch, trainer.global_step),
        "client": client.state_dict(),
        "federation": trainer.federation.state_dict(),
        "learning rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "schedules": [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs],
        "metrics.csv": rows(folder),
        "checkpoint": checkpoint(folder),
    }


def run(folder, **settings):
    """Run to the end; return the final state."""
    folder.mkdir()
    trainer, client = make(folder, **settings)
    trainer.fit(client, digits())
    return outcome(trainer, client, folder)


def kill(folder, killer, resumes=False, **settings):
    """Run until killed; return the round of the kill."""
    folder.mkdir(exist_ok=resumes)
    trainer, client = make(folder, kill=killer, **settings)
    with pytest.raises(Killed):
        trainer.fit(client, digits(), ckpt_path="last" if resumes else None)
    return trainer.current_epoch


def resume(folder, **settings):
    """Resume to the end; return the final state."""
    trainer, client = make(folder, **settings)
    trainer.fit(client, digits(), ckpt_path="last")
    return outcome(trainer, client, folder)


def kill_and_resume(folder, killer, **settings):
    """Run until killed, and resume to the end; return the final state."""
    kill(folder, killer, **settings)
    return resume(folder, **settings)


def saver(**settings):
    """Return a function that returns new callbacks that save: they have a state."""
    return lambda: [ModelCheckpoint(save_last=True, **settings)]


MOMENTS = [  # sorted so that a validation follows some rounds after the previous one
    "on_validation_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_validation_batch_end",
    "training_step",
    "on_before_optimizer_step",
    "on_validation_epoch_end",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_end",
]
SAVES = {
    "each epoch": (saver(), {}),
    "each epoch, max_steps": (saver(), {"stop": "max_steps"}),
    "each epoch, validation every 2nd": (
        saver(save_on_train_epoch_end=True),
        {"check_val_every_n_epoch": 2},
    ),
    "each validation": (saver(save_on_train_epoch_end=False), {}),
    "each validation, every 2nd": (saver(), {"check_val_every_n_epoch": 2}),
    "each validation, every 3rd": (
        saver(save_on_train_epoch_end=False),
        {"check_val_every_n_epoch": 3, "stop": "max_epochs and max_steps"},
    ),
    "the best of each validation": (
        saver(monitor=MONITOR, save_top_k=-1, save_on_train_epoch_end=False),
        {},
    ),
    "each step": (saver(every_n_train_steps=1), {}),
    "each step, max_steps": (
        saver(every_n_train_steps=1),
        {"check_val_every_n_epoch": 2, "stop": "max_epochs and max_steps"},
    ),
}


def settings_of(name, rounds=ROUNDS, **settings):
    """Return the settings of a run that saves in one of the ways above, with new callbacks."""
    make_callbacks, own_settings = SAVES[name]
    settings = {**own_settings, **settings}
    stop = settings.pop("stop", "max_epochs")
    for limit in ("max_epochs", "max_steps"):
        if limit in stop:
            settings[limit] = rounds
        elif limit == "max_epochs":
            settings[limit] = None
    return {"callbacks": make_callbacks(), **settings}


@pytest.fixture(scope="module")
def uninterrupted_states(tmp_path_factory):
    """Returns the final state of an uninterrupted run with one of the settings above."""

    @functools.cache
    def final_state(name, rounds=ROUNDS):
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        return run(folder, **settings_of(name, rounds))

    return final_state


@pytest.mark.slow
@exhaustive_but("each epoch", "each step, max_steps")
@pytest.mark.parametrize("name", SAVES)
def test_run_resumed_after_each_kill_equals_uninterrupted_run(tmp_path, uninterrupted_states, name):
    """The run is killed at each of the moments in turn, each time in a later round."""
    start, rounds = 3, 10 + 4 * SAVES[name][1].get("check_val_every_n_epoch", 1)
    settings = functools.partial(settings_of, name, rounds, num_sanity_val_steps=0)
    first = [*SAVES].index(name)  # so that each way of saving has another kill before any resume
    for index, moment in enumerate(MOMENTS[first:] + MOMENTS[:first]):
        killed = kill(tmp_path / "run", Killer(moment, start), resumes=index > 0, **settings())
        assert killed >= start
        start = killed + 1
    resumed = resume(tmp_path / "run", **settings())
    assert list(differences(uninterrupted_states(name, rounds), resumed)) == []


@pytest.mark.slow
@exhaustive_but("the best of *", "each step, max_steps")
@pytest.mark.parametrize("name", SAVES)
def test_run_killed_at_its_end_and_resumed_equals_uninterrupted_run(
    tmp_path, uninterrupted_states, name
):
    rounds = 3
    kill(tmp_path / "run", Killer("on_train_end", start=0), **settings_of(name, rounds))
    resumed = resume(tmp_path / "run", **settings_of(name, rounds))
    assert list(differences(uninterrupted_states(name, rounds), resumed)) == []


class ChangesTheEnd(Callback):
    """Changes the model, and writes a file, as a training ends; counts the starts and ends."""

    def __init__(self):
        self.calls = []

    def on_train_start(self, trainer, pl_module):
        self.calls.append("start")

    def on_train_end(self, trainer, pl_module):
        self.calls.append("end")
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(0.5)

    def on_fit_end(self, trainer, pl_module):
        norm = float(pl_module.row("global").data.double().norm())
        (Path(trainer.default_root_dir) / "norm.txt").write_text(f"{norm!r} {self.calls}")


ENDS = {
    "EMA, the default checkpoint": (lambda: [EMAWeightAveraging(decay=0.8)], "on_train_end"),
    "EMA, save_last": (
        lambda: [EMAWeightAveraging(decay=0.8), *saver()()],
        "on_train_epoch_end",
    ),
    "WeightAveraging, each validation": (
        lambda: [WeightAveraging(), *saver(save_on_train_epoch_end=False)()],
        "on_validation_end",
    ),
    "a user's callback": (lambda: [ChangesTheEnd()], "on_train_end"),
    "a user's callback, the best two": (
        lambda: [ChangesTheEnd(), *saver(monitor="val/global/loss", save_top_k=2)()],
        "on_train_end",
    ),
}
"""Callbacks that act as a training ends, and the hook of the last round that is killed."""


def fit_and_test(folder, ckpt_path=None, **settings):
    """Run, or resume, to the end of a test; return the final state and the texts of the files."""
    trainer, client = make(folder, **settings)
    trainer.fit(client, digits(), ckpt_path=ckpt_path)
    trainer.test(client, digits(), verbose=False)
    texts = {path.name: path.read_text() for path in folder.glob("[np]*.*")}
    checkpoints = [path.name for path in (folder / "checkpoints").iterdir()]
    return outcome(trainer, client, folder) | texts | {"checkpoints": sorted(checkpoints)}


@pytest.mark.slow
@exhaustive_for("EMA, save_last", "a user's callback")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_run_resumed_without_a_round_left_equals_uninterrupted_run(tmp_path, end):
    """Its training starts and ends with all hooks, and checkpoints are not written again."""
    make_callbacks, hook = end
    settings = {"max_epochs": 3, "client": FedAvg}
    expected = fit_and_test(tmp_path / "whole", callbacks=make_callbacks(), **settings)
    folder = tmp_path / "killed"
    kill(folder, LateKiller(hook, start=2), callbacks=make_callbacks(), **settings)
    saved = last_checkpoint(folder).read_bytes()
    resumed = fit_and_test(folder, "last", callbacks=make_callbacks(), **settings)
    assert list(differences(expected, resumed)) == []
    assert last_checkpoint(folder).read_bytes() == saved


after_training = saver(every_n_train_steps=1)
after_validation = saver(save_on_train_epoch_end=False)
after_round = saver(save_on_train_epoch_end=True)
RESUMES = {
    "after the training": (after_training, "on_validation_start"),
    "after the validation": (after_validation, "on_train_epoch_end"),
    "after the round": (after_round, "on_train_epoch_start"),
    "as soon as the training is saved": (after_training, LateKiller("on_train_batch_end")),
    "as soon as the validation is saved": (after_validation, LateKiller("on_validation_end")),
    "as soon as the round is saved": (after_round, LateKiller("on_train_epoch_end")),
}
"""The place of a resume within a round: the way of saving and the moment of the kill."""

TRAINED = {
    "warmup": {"schedule": warmup},
    "BatchNorm": {"net": batch_norm_net},
    "64-true": {"precision": "64-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "global model only, no schedule": {"client": FedAvg, "schedule": None},
    "no sanity check, min_epochs": {"num_sanity_val_steps": 0, "min_epochs": 2},
    "states on disk": {"on_disk": True},
    "states of local optimizers": {"keep_optimizer_state": True},
    "BatchNorm, warmup, states of local optimizers": {
        "net": batch_norm_net,
        "schedule": warmup,
        "keep_optimizer_state": True,
    },
    "seldom logged": {"log_every_n_steps": 4, "check_val_every_n_epoch": 2},
    "logged in the end": {"log_every_n_steps": 100, "check_val_every_n_epoch": 5},
}


@pytest.mark.slow
@exhaustive_but("BatchNorm, warmup, *", "global model only, no schedule", "seldom logged")
@pytest.mark.parametrize("settings", TRAINED.values(), ids=TRAINED)
def test_resumed_run_with_other_settings_equals_uninterrupted_run(tmp_path, settings):
    save, moment = RESUMES["after the training"]
    expected = run(tmp_path / "uninterrupted", callbacks=save(), **settings)
    resumed = kill_and_resume(tmp_path / "killed", moment, callbacks=save(), **settings)
    assert list(differences(expected, resumed)) == []


class LogsAtTheEnd(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("mine", float(trainer.current_epoch) ** 2)


WATCHERS = {  # two groups, because two callbacks EarlyStopping have the same key in a checkpoint
    "EarlyStopping after validation, LearningRateMonitor, a user's metric": lambda: [
        EarlyStopping(MONITOR, patience=9, check_on_train_epoch_end=False),
        LearningRateMonitor(),
        LogsAtTheEnd(),
    ],
    "EarlyStopping after the round, WeightAveraging": lambda: [
        EarlyStopping(MONITOR, patience=9),
        WeightAveraging(),
    ],
}


@pytest.fixture(scope="module")
def uninterrupted_state(tmp_path_factory):
    """Returns the final state of a run with the settings of a function, computed once."""

    @functools.cache
    def final_state(make_settings):
        return run(tmp_path_factory.mktemp("uninterrupted") / "run", **make_settings())

    return final_state


@functools.cache
def make_watching_settings(watchers, save):
    """Return a function that returns the settings of a run with callbacks that watch and save."""
    return lambda: {"callbacks": [*watchers(), *save()]}


def each_resume_with(values, ids):
    """Return all places of a resume by name, each with one of two values in turn.

    Each value has each of the three ways of saving: half of all pairs.
    """
    places = {"after the training", "after the round", "as soon as the validation is saved"}
    return {
        f"{name}, {ids[name in places]}": (values[name in places], *resume)
        for name, resume in RESUMES.items()
    }


WATCHED = each_resume_with([*WATCHERS.values()], [*WATCHERS])


@pytest.mark.slow
@exhaustive_but("after the validation, *", "as soon as the validation is saved, *")
@pytest.mark.parametrize(("watchers", "save", "moment"), WATCHED.values(), ids=WATCHED)
def test_resumed_callbacks_equal_those_of_an_uninterrupted_run(
    tmp_path, uninterrupted_state, watchers, save, moment
):
    settings = make_watching_settings(watchers, save)
    resumed = kill_and_resume(tmp_path / "killed", moment, **settings())
    assert list(differences(uninterrupted_state(settings), resumed)) == []


@functools.cache
def make_scheduled_settings(save, every):
    """Return a function that returns the settings of a run with a plateau schedule."""
    return lambda: {
        "schedule": plateau,
        "check_val_every_n_epoch": every,
        "callbacks": save(),
    }


SCHEDULED = each_resume_with([2, 1], ["every 2nd", "each round"])


@pytest.mark.slow
@exhaustive_but("after the validation, *", "after the round, *")
@pytest.mark.parametrize(("every", "save", "moment"), SCHEDULED.values(), ids=SCHEDULED)
def test_resumed_schedule_that_watches_a_metric_equals_that_of_an_uninterrupted_run(
    tmp_path, uninterrupted_state, every, save, moment
):
    settings = make_scheduled_settings(save, every)
    expected = uninterrupted_state(settings)
    resumed = kill_and_resume(tmp_path / "killed", moment, **settings())
    assert list(differences(expected, resumed)) == []
    assert expected["learning rates"][0] < 0.1, "the schedule must have lowered the learning rate"


@pytest.mark.slow
def test_resumed_callback_remembers_a_metric_of_an_earlier_round(tmp_path):
    """EarlyStopping looks after each round at a metric that is logged in every third."""

    def settings():
        stopping = EarlyStopping(MONITOR, patience=9, check_on_train_epoch_end=True, strict=False)
        return {"callbacks": [stopping, *after_round()], "check_val_every_n_epoch": 3}

    expected = run(tmp_path / "uninterrupted", **settings())
    resumed = kill_and_resume(tmp_path / "killed", "on_train_epoch_start", **settings())
    assert list(differences(expected, resumed)) == []


@pytest.mark.slow
def test_resumed_run_that_was_stopped_early_trains_no_further(tmp_path):
    def callbacks():
        return [EarlyStopping("round", mode="max", stopping_threshold=3.0), *saver()()]

    expected = run(tmp_path / "uninterrupted", callbacks=callbacks())
    assert expected["rounds"] == (5, 5)
    resumed = kill_and_resume(tmp_path / "killed", "on_train_end", callbacks=callbacks())
    assert list(differences(expected, resumed)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_run_with_more_rounds_equals_a_run_of_all_rounds(tmp_path):
    """It gets more rounds when it is resumed, or in the same process."""
    expected = run(tmp_path / "uninterrupted", schedule=None)
    run(tmp_path / "resumed", schedule=None, max_epochs=4)
    resumed = resume(tmp_path / "resumed", schedule=None, max_epochs=ROUNDS)
    assert list(differences(expected, resumed)) == []

    folder = tmp_path / "same process"
    folder.mkdir()
    trainer, client = make(folder, schedule=None, max_epochs=4)
    trainer.fit(client, digits())
    trainer.fit_loop.max_epochs = ROUNDS
    trainer.fit(client, digits())
    assert list(differences(expected, outcome(trainer, client, folder))) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_second_fit_after_an_error_continues_the_run(tmp_path):
    """The same trainer continues without a checkpoint."""
    settings = {"schedule": None, "max_steps": ROUNDS, "check_val_every_n_epoch": 2}
    expected = run(tmp_path / "uninterrupted", **settings)
    for moment in ("on_validation_start", "on_train_epoch_end"):
        folder = tmp_path / moment
        folder.mkdir()
        killer = Killer(moment)
        trainer, client = make(folder, kill=killer, **settings)
        with pytest.raises(Killed):
            trainer.fit(client, digits())
        setattr(killer, moment, lambda *_: None)
        trainer.fit(client, digits())
        assert list(differences(expected, outcome(trainer, client, folder))) == [], moment


@pytest.mark.slow
def test_checkpoint_holds_only_tensors_and_plain_values(tmp_path):
    run(tmp_path / "run", callbacks=[EarlyStopping(MONITOR), *saver(monitor=MONITOR)()])
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        content = torch.load(path, weights_only=True)
        if path.stem == "last":  # as the last round ended, or after it if time was short
            assert content["global_step"] == ROUNDS
            assert content["epoch"] in (ROUNDS - 1, ROUNDS)
        else:
            assert content["global_step"] == content["epoch"] + 1
        names = {"format", "identity", "adversary", "byzantine", "engine", "store", "server"}
        names |= {"participation", "clients", "traffic"}
        assert set(content["federation"]) == names
        trainer, client = make(tmp_path / f"again from {path.stem}", max_epochs=ROUNDS + 1)
        trainer.fit(client, digits(), ckpt_path=path, weights_only=True)
        assert trainer.global_step == ROUNDS + 1


# Refused checkpoints


@pytest.mark.slow
def test_checkpoint_of_weights_alone_is_refused_in_one_sentence(tmp_path):
    trainer, client = make(tmp_path / "run", client=FedAvg, max_epochs=1)
    trainer.fit(client, digits())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer, client = make(tmp_path / "again", client=FedAvg, max_epochs=2)
    with pytest.raises(ValueError, match=r"^Expected a complete checkpoint .*`save_weights_on"):
        trainer.fit(client, digits(), ckpt_path=tmp_path / "weights.ckpt")


OTHERS = {
    "net": ({"net": batch_norm_net}, 5),
    "algorithm": ({"client": FedAvg}, 5),
    "number of clients": ({}, 4),
}


@pytest.mark.slow
def test_checkpoint_of_another_federation_is_refused(tmp_path):
    run(tmp_path / "run", max_epochs=1)
    for part, (settings, num_clients) in OTHERS.items():
        trainer, client = make(tmp_path / "run", **settings)
        with pytest.raises(ValueError, match=f"^Expected a checkpoint with the {part} "):
            trainer.fit(client, digits(num_clients), ckpt_path="last")


def test_checkpoint_of_plain_lightning_is_refused(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, path)
    trainer, client = make(tmp_path)
    with pytest.raises(
        ValueError, match=r"^Expected argument `ckpt_path` to be a checkpoint of pl_fed"
    ):
        trainer.fit(client, digits(), ckpt_path="last")


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    trainer, client = make(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `ckpt_path` = \"last\""):
        trainer.fit(client, digits(), ckpt_path="last")
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `ckpt_path` = last"):
        last_run(tmp_path)


@pytest.mark.slow
def test_evaluations_load_the_last_checkpoint_and_refuse_to_run_without_one(tmp_path):
    """The models of a new trainer are untrained."""
    run(tmp_path / "run", max_epochs=1)
    trained = checkpoint(tmp_path / "run")["state_dict"]
    for evaluate in ("validate", "test", "predict"):
        trainer, client = make(tmp_path / "run")
        getattr(trainer, evaluate)(client, datamodule=digits(), ckpt_path="last")
        assert client.state_dict().keys()
        assert all(torch.equal(trained[name], row) for name, row in client.state_dict().items())
        trainer, client = make(tmp_path / "other")
        with pytest.raises(FileNotFoundError, match=r"^Expected argument `ckpt_path` = \"last\""):
            getattr(trainer, evaluate)(client, datamodule=digits(), ckpt_path="last")


# Folders of checkpoints, and writing them


@pytest.mark.slow
def test_last_run_is_the_one_saved_last(tmp_path):
    for name in ("a", "b", "c"):
        run(tmp_path / name, max_epochs=1, num_sanity_val_steps=0)
    os.utime(tmp_path / "b" / "checkpoints" / "last.ckpt")
    assert last_run(tmp_path) == tmp_path / "b"


def test_run_killed_before_its_first_last_checkpoint_is_told_with_its_other_one(tmp_path):
    """A ModelCheckpoint writes the file of a round before last.ckpt."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for number in (2, 1):
        other = run / "checkpoints" / f"epoch={number}.ckpt"
        other.touch()
        os.utime(other, (0, 3 - number))
    (run / "checkpoints" / ".ckpt.tmp").touch()
    remedy = re.escape(f"The newest other checkpoint is {other}: set `ckpt_path` to it.")
    with pytest.raises(FileNotFoundError, match=rf"`save_last: true`\. {remedy}$"):
        last_run(tmp_path)
    with pytest.raises(ValueError, match=rf"a folder without checkpoints/last\.ckpt\. {remedy}$"):
        read_run(run)


@pytest.mark.slow
def test_run_in_a_moved_folder_resumes(tmp_path):
    """It overwrites its last.ckpt, as if it had not been moved."""
    run(tmp_path / "here", callbacks=saver()(), max_epochs=2)
    (tmp_path / "here").rename(tmp_path / "there")
    resume(tmp_path / "there", callbacks=saver()(), max_epochs=4)
    assert not (tmp_path / "there" / "checkpoints" / "last-v1.ckpt").exists()
    assert checkpoint(tmp_path / "there")["global_step"] == 4
    assert last_run(tmp_path) == tmp_path / "there"


def test_kill_while_writing_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)

    def write_half(content, file):
        file.write(b"half of it")
        raise Killed

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(Killed):
        AtomicCheckpointIO().save_checkpoint({"round": 2}, path)
    assert torch.load(path, weights_only=True) == {"round": 1}
    monkeypatch.undo()
    AtomicCheckpointIO().save_checkpoint({"round": 2}, path)
    assert torch.load(path, weights_only=True) == {"round": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"], "no partial file remains"


def test_next_checkpoint_overwrites_the_partial_file_of_a_kill(tmp_path, monkeypatch):
    """Also if the checkpoint of each round has a name of its own."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=Killed))
    with pytest.raises(Killed):
        AtomicCheckpointIO().save_checkpoint({"round": 1}, tmp_path / "round=1.ckpt")
    monkeypatch.undo()
    assert not (tmp_path / "round=1.ckpt").exists()
    AtomicCheckpointIO().save_checkpoint({"round": 2}, tmp_path / "round=2.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["round=2.ckpt"]


@pytest.fixture
def large_sizes(monkeypatch):
    """Lets checkpoints count as large, so that they are mapped, and states take many blocks."""
    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0)
    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_PIECE", 0)
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("large_sizes")
def test_run_resumed_from_a_large_checkpoint_equals_uninterrupted_run(tmp_path):
    """The checkpoint is mapped, and half of the states are in memory, half on disk."""
    save, moment = RESUMES["after the training"]
    size = sum(p.numel() for p in dropout_net().parameters()) * 4
    resumed = kill_and_resume(
        tmp_path / "killed", moment, callbacks=save(), memory=3 * size, max_epochs=ROUNDS
    )
    expected = run(tmp_path / "uninterrupted", callbacks=save())
    for final_state in (expected, resumed):
        for content in (final_state["federation"], final_state["checkpoint"]["federation"]):
            personal = content["store"]["personal"]
            assert len(personal["rows"]) == len(personal["clients"]) == 5, "a block for each row"
    assert list(differences(expected, resumed)) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("on_disk", [True, False])
def test_checkpoint_is_written_and_read_in_pieces(tmp_path, monkeypatch, on_disk):
    """Saving and loading 64 MB of states takes a few blocks of extra memory, not 64 MB."""
    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0)
    monkeypatch.setattr(
        pl_fed.lightning.checkpoints, "_PARTS", {}
    )  # this checkpoint holds only the states of clients
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 1 << 22)
    defaults, path = {"personal": torch.zeros(1 << 18)}, tmp_path / "last.ckpt"
    store, again = (ClientStore(64, defaults, tmp_path if on_disk else None) for _ in range(2))
    for client in range(64):
        store.write("personal", torch.tensor([client]), torch.full((1, 1 << 18), client + 1.0))
    peaks, page_out = [], pl_fed.state.store.page_out

    def recording_write(self, content):
        peaks.append(resident())
        return write(self, content)

    def recording_page_out(rows):
        peaks.append(resident())
        page_out(rows)

    write = pl_fed.lightning.checkpoints._Stream.write
    monkeypatch.setattr(pl_fed.lightning.checkpoints._Stream, "write", recording_write)
    monkeypatch.setattr(pl_fed.state.store, "page_out", recording_page_out)
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
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OnExceptionCheckpoint", "save_on_exception"])
def test_exception_within_a_round_saves_no_checkpoint(tmp_path, kind):
    """The clients would be ahead of the server, and the last good checkpoint overwritten."""
    folder = tmp_path / "run"
    folder.mkdir()
    callbacks = saver(every_n_epochs=2, save_on_exception=kind == "save_on_exception")()
    if kind == "OnExceptionCheckpoint":
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
@exhaustive_for(
    *("on_*_batch_end", "on_validation_epoch_end", "on_before_optimizer_step"),
    "on_train_epoch_start",
)
@pytest.mark.parametrize("moment", [*MOMENTS, "on_train_end"])
def test_exception_between_rounds_saves_the_last_checkpoint(tmp_path, uninterrupted_states, moment):
    folder = tmp_path / "run"
    folder.mkdir()
    last = LastCheckpoint()
    trainer, client = make(folder, kill=moment, callbacks=[last])
    last.on_train_start = lambda *_: setattr(last, "_training", True)
    last.on_train_epoch_end = lambda *_: None
    with pytest.raises(Killed):
        trainer.fit(client, digits())
    is_within_round = moment in (
        *("training_step", "on_before_optimizer_step", "on_train_batch_end"),
        "on_validation_end",  # some of the callbacks that watch may have been called already
    )
    assert (last_checkpoint(folder) is None) is is_within_round
    if not is_within_round:
        resumed = resume(folder)
        expected = {**uninterrupted_states("each epoch"), "checkpoint": resumed["checkpoint"]}
        assert list(differences(expected, resumed)) == []


@pytest.mark.slow
@exhaustive_for("on_validation_batch_start")
@pytest.mark.parametrize("moment", ["on_validation_batch_start", "on_validation_batch_end"])
def test_batches_of_an_interrupted_validation_count_once(tmp_path, uninterrupted_states, moment):
    """In the last round: each round starts to count from zero."""
    name = "each epoch, validation every 2nd"
    saving = {**settings_of(name), "callbacks": [LastCheckpoint()]}
    kill(tmp_path / "run", Killer(moment, ROUNDS - 1), **saving)
    resumed = resume(tmp_path / "run", **settings_of(name))
    expected = uninterrupted_states(name)
    assert list(differences(expected["checkpoint"]["loops"], resumed["checkpoint"]["loops"])) == []


def watching_settings():
    """Return the settings of a run with callbacks and a schedule that monitor a metric."""
    stopping = EarlyStopping(MONITOR, min_delta=9.0, patience=4, check_on_train_epoch_end=True)
    schedule = functools.partial(
        ReduceLROnPlateau, monitor=MONITOR, factor=0.5, patience=2, threshold=0.99
    )
    return {"schedule": schedule, "callbacks": [stopping, LastCheckpoint()]}


@pytest.mark.slow
@exhaustive_for("on_validation_epoch_end")
@pytest.mark.parametrize(
    "moment", ["on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"]
)
def test_callbacks_count_a_round_once_though_it_ends_again_after_a_resume(
    tmp_path, uninterrupted_state, moment
):
    kill(tmp_path / "killed", moment, **watching_settings())
    assert last_checkpoint(tmp_path / "killed") is not None
    resumed = resume(tmp_path / "killed", **watching_settings())
    expected = uninterrupted_state(watching_settings)
    excluded = {"checkpoint": None}  # it also holds the moment of saving
    assert list(differences(expected | excluded, resumed | excluded)) == []
    assert 3 < expected["rounds"][0] < ROUNDS, "EarlyStopping must have stopped the run"


class Unloadable(torch.optim.lr_scheduler.ConstantLR):
    def load_state_dict(self, state_dict):
        raise Killed


@pytest.mark.slow
def test_error_while_loading_leaves_the_checkpoint_unchanged(tmp_path):
    run(tmp_path / "run")
    before = last_checkpoint(tmp_path / "run").read_bytes()
    failing = Killer()
    failing.on_fit_start = raise_killed
    for settings in ({"kill": failing, "schedule": cosine}, {"schedule": Unloadable}):
        trainer, client = make(tmp_path / "run", **settings)
        with pytest.raises(Killed):
            trainer.fit(client, digits(), ckpt_path="last")
        assert last_checkpoint(tmp_path / "run").read_bytes() == before


def raise_killed(*_):
    raise Killed


@pytest.mark.slow
@exhaustive_for("not validated")
@pytest.mark.parametrize("every", [1, 5], ids=["validated", "not validated"])
def test_run_saves_its_round_after_sigterm(tmp_path, every):
    """A cluster sends SIGTERM before it kills."""
    folder, settings = tmp_path / "run", {"check_val_every_n_epoch": every}
    folder.mkdir()
    trainer, client = make(folder, **settings)
    trainer.callbacks[0].on_before_optimizer_step = send_sigterm
    with pytest.raises(SIGTERMException):
        trainer.fit(client, digits())
    assert checkpoint(folder)["global_step"] == 4
    expected = run(tmp_path / "uninterrupted", **settings)
    assert list(differences(expected, resume(folder, **settings))) == []


def send_sigterm(trainer, *_):
    if trainer.current_epoch == 3:
        os.kill(os.getpid(), signal.SIGTERM)


# Killed processes


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
  max_epochs: 15
  check_val_every_n_epoch: 3
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
"""


@pytest.mark.slow
def test_run_killed_by_sigkill_at_random_moments_equals_uninterrupted_run(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    uninterrupted_states, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    main(["fit", "--config", str(config), "--trainer.default_root_dir", str(uninterrupted_states)])

    moments = random.Random(os.getpid())
    for rounds in (-1, 2, 8):
        process = start(config, killed)
        while not any(rounds_of(path.parent) > rounds for path in killed.glob("*/checkpoints")):
            assert process.is_alive(), process.exitcode
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = start(config, killed)
    process.join()
    assert process.exitcode == 0

    (expected,), (resumed,) = uninterrupted_states.iterdir(), killed.iterdir()
    assert list(differences(checkpoint(expected), checkpoint(resumed))) == []
    assert rows(expected) == rows(resumed)
    assert (expected / "per_client.csv").read_text() == (resumed / "per_client.csv").read_text()


def rounds_of(folder):
    """Return the number of rounds that a run has logged."""
    return len(rows(folder)) if (folder / "metrics.csv").exists() else 0


def start(config, root):
    """Start or resume a run in its own process, with the imports of a fork server."""
    arguments = ["fit", "--config", str(config), "--trainer.default_root_dir", str(root)]
    if any(root.glob("*/checkpoints")):
        arguments += ["--ckpt_path", "last"]
    process = fork_context().Process(target=run_command, args=(arguments, torch.get_num_threads()))
    process.start()
    return process


def run_command(arguments, threads):
    """Run the command line with as many threads as the test has, for the same rounding."""
    torch.set_num_threads(threads)
    main(arguments)


class BestScore(Callback):
    """Remembers the best round as a number of NumPy, or as an object of a class of its own."""

    def __init__(self, wrap):
        self.best, self.wrap = np.float64(0), wrap

    def on_train_epoch_end(self, trainer, pl_module):
        self.best = max(self.best, np.float64(trainer.current_epoch))

    def state_dict(self):
        return {"best": self.wrap(self.best)}

    def load_state_dict(self, state_dict):
        self.best = state_dict["best"]


class Remembers(FedAvg):
    """Saves its arguments, of which the net and the optimizer are objects."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.save_hyperparameters()


def numpy_cosine(optimizer):
    def factor(epoch):
        return (1 + np.cos(np.pi * epoch / ROUNDS)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@pytest.mark.slow
def test_numbers_of_numpy_and_saved_hyperparameters_are_resumed(tmp_path):
    def settings():
        callbacks = [BestScore(lambda best: best), *after_round()]
        return {"callbacks": callbacks, "client": Remembers, "schedule": numpy_cosine}

    expected = run(tmp_path / "uninterrupted", **settings())
    resumed = kill_and_resume(tmp_path / "killed", "on_train_epoch_start", **settings())
    assert list(differences(expected, resumed)) == []


def test_checkpoint_leaves_out_objects_of_the_users_classes(tmp_path):
    checkpoint = {"callbacks": {"Best": {"best": Killer()}, "Timer": {"seconds": 1.0}}, "mine": 3}
    saving = AtomicCheckpointIO()
    with pytest.warns(UserWarning, match="leave out the state of Best, so that a resumed run"):
        saving.save_checkpoint(checkpoint, tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved == {"callbacks": {"Timer": {"seconds": 1.0}}, "mine": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning comes once
        saving.save_checkpoint(checkpoint, tmp_path / "last.ckpt")


class Decay:
    """Decay: the factor of a rate, an object with a net beside its number."""

    def __init__(self, base):
        self.base, self.net = base, nn.Identity()

    def __call__(self, round):
        return self.base**round


def test_checkpoint_leaves_out_objects_of_a_schedule(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, [Decay(0.5)])
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, decay], [2])
    with pytest.warns(UserWarning, match="leave out the objects in the state of a schedule, so"):
        AtomicCheckpointIO().save_checkpoint(
            {"lr_schedulers": [schedule.state_dict()]}, tmp_path / "last.ckpt"
        )
    (saved,) = safe_load(tmp_path / "last.ckpt")["lr_schedulers"]
    assert saved["_schedulers"][0] == linear.state_dict()
    assert saved["_schedulers"][1]["lr_lambdas"] == [{"base": 0.5}]
    decay.lr_lambdas[0].base = 0.1
    schedule.load_state_dict(saved)
    assert decay.lr_lambdas[0].base == 0.5
    assert isinstance(decay.lr_lambdas[0].net, nn.Identity)


@pytest.mark.slow
def test_options_that_stay_those_of_the_checkpoint_are_named(tmp_path):
    """They stay, as in Lightning; the same options, also under a schedule, need no warning."""
    run(tmp_path / "run", client=FedAvg, max_epochs=1, schedule=None, callbacks=after_round())
    file = last_checkpoint(tmp_path / "run")
    for rate, momentum, schedule in ((0.2, 0.0, None), (0.1, 0.9, cosine)):
        trainer, client = make(tmp_path / str(rate), schedule=schedule, client=FedAvg, max_epochs=2)
        client.objective.optimizer.keywords.update(lr=rate, momentum=momentum)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(client, digits(), ckpt_path=file)
        messages = [str(warning.message) for warning in caught]
        kept = [message for message in messages if "keeps the options of the chec" in message]
        assert len(kept) == (rate == 0.2)
        assert all("lr 0.1 instead of 0.2, momentum 0.9 instead of 0.0." in text for text in kept)


class WithHook(nn.Module):
    """A net with a frozen body, whose hook leaves a part out of the state dict."""

    def __init__(self, part):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
        self.part = part
        self.register_state_dict_post_hook(self.leave_out)

    @staticmethod
    def leave_out(module, state, prefix, _):
        for name in [name for name in state if name.startswith(prefix + module.part)]:
            del state[name]
        state[prefix + "version"] = torch.tensor(1)


def test_state_dict_may_lack_what_a_hook_leaves_out_unless_it_is_trained():
    client, other = FedAvg(WithHook("body")), FedAvg(WithHook("body"))
    other.load_state_dict(client.state_dict())
    assert torch.equal(other.global_model.head.weight, client.global_model.head.weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*head"):
        other.load_state_dict({})
    client = FedAvg(WithHook("head"))
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        client.load_state_dict(client.state_dict())
