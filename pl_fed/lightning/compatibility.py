"""What a federated round cannot honour: refused by one sentence, before anything is done."""

import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from pl_fed.arguments import check_instances
from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData

PRECISIONS = ("32-true", "64-true", "bf16-mixed")

CALLBACKS: dict[type[Callback], str] = {
    BaseFinetuning: "what is trained stays the same: freeze by requires_grad=False in the net",
    BatchSizeFinder: "give the data's batch_size",
    GradientAccumulationScheduler: "use a larger batch_size",
    LearningRateFinder: "its steps would be rounds, with a schedule of their own: try a few rates",
    ModelPruning: "it exchanges parameters, which clients and server share by name",
    SpikeDetection: "a cohort's loss depends on who is in it, and a round cannot be left out",
    StochasticWeightAveraging: "use WeightAveraging, which averages the models of the rounds",
    ThroughputMonitor: "its steps are not rounds: time/round is logged",
}
"""Lightning's callbacks that are refused, each with what to do instead."""

_LOCAL_STEP = "many clients may be trained at once, so a local step has no hooks:"
HOOKS = {
    name: f"{_LOCAL_STEP} use on_before_optimizer_step, before the server's step, or"
    " on_train_batch_end, after a round"
    for name in ("on_before_backward", "on_after_backward", "on_before_zero_grad")
}
"""Hooks of callbacks that are never called."""

_OWN_STEP = f"{_LOCAL_STEP} say it in training_step or end_round"
_TRANSFER = "clients' data is kept where their models are: use the data's transforms or augment"
TRANSFERS = dict.fromkeys(
    ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"), _TRANSFER
)
METHODS = {
    **dict.fromkeys((*HOOKS, "backward", "optimizer_step", "optimizer_zero_grad"), _OWN_STEP),
    "configure_gradient_clipping": "give the trainer's gradient_clip_val",
    "on_validation_model_zero_grad": "no gradient is left after a round",
    **dict.fromkeys(
        [f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")],
        "the clients' data comes from the datamodule, a pl_fed.data.FederatedData",
    ),
    **TRANSFERS,
}
"""Methods of a LightningModule that are never called, or not with a batch of samples."""

NEEDED = (
    *("setup", "train", "on_save_checkpoint", "on_load_checkpoint"),
    *("validation_step", "test_step", "predict_step"),
    *[f"on_{part}_epoch_{when}" for part in ("validation", "test") for when in ("start", "end")],
)
"""Methods of a client in which a federation is set up, evaluated or saved."""


def check_trainer(trainer: Any, model: Any) -> None:
    """Refuse what a federated fit cannot honour.

    Args:
        trainer: The trainer.
        model: What it is to fit.

    Raises:
        TypeError: If the model is not a :class:`Client`.
        ValueError: With one sentence that names the setting, what was expected and what came.
    """
    check_model(model)
    check_settings(trainer)
    model.trainer = trainer
    own = model.configure_callbacks()
    for callback in [*trainer.callbacks, *(own if isinstance(own, Sequence) else [own])]:
        check_callback(callback)


def check_model(model: Any) -> None:
    """Refuse a model that is no client, or that overrides what is never called."""
    if not isinstance(model, Client):
        raise TypeError(
            "Expected argument `model` to be a pl_fed.clients.Client but got"
            f" {type(model).__name__}: give an algorithm the net that it trains, its loss and its"
            " optimizer, as in pl_fed.clients.FedAvg(net, criterion=..., optimizer=...), and fit"
            " that."
        )
    _check_overridden("model", METHODS, model, LightningModule)
    _check_calls_super(model)
    if not model.automatic_optimization:
        raise ValueError(
            "Expected argument `model` to have automatic_optimization=True but got"
            f" {type(model).__name__} with False: {_OWN_STEP}."
        )


def _check_calls_super(client: Client) -> None:
    """Refuse hooks of a client's own that leave out what Client does in them, such as logging."""
    classes = type(client).__mro__
    for cls in classes[: classes.index(Client)]:
        for hook in [hook for hook in NEEDED if hook in vars(cls)]:
            code = getattr(inspect.unwrap(vars(cls)[hook]), "__code__", None)
            if code is not None and hook not in code.co_names:
                raise ValueError(
                    f"Expected `{hook}` of {cls.__name__} to call super().{hook}(...), by which a"
                    " federation is set up, evaluated or saved, but got one that does not."
                )


def check_data(datamodule: Any) -> None:
    """Refuse data of no clients, or that overrides what is never called with samples."""
    check_instances(FederatedData, datamodule=datamodule)
    if datamodule is not None:
        _check_overridden("datamodule", TRANSFERS, datamodule, LightningDataModule)


def check_settings(trainer: Any) -> None:
    """Refuse arguments of the trainer."""
    found: dict[str, Any] = {
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "use a larger batch_size"),
        "val_check_interval": (
            getattr(trainer, "val_check_interval", "a time"),
            1.0,
            "a round is validated as a whole: use check_val_every_n_epoch",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            0,
            "the clients' data stays the same",
        ),
    }
    for name, (value, expected, hint) in found.items():
        if value != expected:
            raise ValueError(
                f"Expected trainer argument `{name}` to be {expected} but got {value}: {hint}."
            )
    every = trainer.check_val_every_n_epoch
    if every is not None and every < 1:
        raise ValueError(
            f"Expected trainer argument `check_val_every_n_epoch` to be at least 1 but got {every}:"
            " limit_val_batches=0 leaves validation out."
        )
    if trainer.precision not in PRECISIONS:
        raise ValueError(
            f"Expected trainer argument `precision` to be one of {', '.join(PRECISIONS)} but got"
            f" {trainer.precision}: local steps have no loss scaling, and small updates would be"
            " lost in a low-precision global model."
        )


def check_processes(trainer: Any, sync_batchnorm: bool = False) -> None:
    """Refuse strategies that a round cannot use, before any process is started.

    Args:
        trainer: The trainer.
        sync_batchnorm: What it was given so.
    """
    strategy = trainer.strategy
    name = type(strategy).__name__
    if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
        raise ValueError(
            f"Expected trainer argument `strategy` to be auto or ddp but got {name}: processes"
            " share the clients of a round, and each holds whole models."
        )
    launcher = strategy.launcher
    if launcher is not None and "MultiProcessing" in type(launcher).__name__:
        raise ValueError(
            "Expected trainer argument `strategy` to be ddp but got one that spawns or forks: its"
            " processes end with each fit, and the clients' states with them. Run it as a script."
        )
    if sync_batchnorm and trainer.world_size > 1:
        raise ValueError(
            "Expected trainer argument `sync_batchnorm` to be False but got True: a local step is"
            " of one client, whose batches are its own."
        )


def check_callback(callback: Callback) -> None:
    """Refuse a callback that changes single batches, or waits for a hook that never comes."""
    name = type(callback).__name__
    for refused, hint in CALLBACKS.items():
        if isinstance(callback, refused):
            raise ValueError(
                f"Expected trainer argument `callbacks` without {name} but got one: {hint}."
            )
    _check_overridden("callbacks", HOOKS, callback, Callback)
    if isinstance(callback, ModelCheckpoint) and "://" in str(callback.dirpath):
        raise ValueError(
            f"Expected {name} with a local folder as `dirpath` but got {callback.dirpath}:"
            " checkpoints are moved into place as a whole; copy them elsewhere afterwards."
        )
    if isinstance(callback, ModelCheckpoint) and callback.save_last and not callback.save_top_k:
        raise ValueError(
            f"Expected {name} with `save_last` to have a `save_top_k` other than 0 but got 0:"
            " Lightning would write last.ckpt only when training ends. For one checkpoint, the"
            " latest, leave both out and give `filename: last`, `enable_version_counter: false`."
        )
    if (
        isinstance(callback, ModelCheckpoint)
        and callback.save_last == "link"
        and callback.save_on_exception
    ):
        raise ValueError(
            f"Expected `save_last` of {name} to be true with `save_on_exception` but got link: in"
            " the middle of a round nothing is written that last.ckpt could link to."
        )


def check_optimizer(trainer: Any, model: Any) -> None:
    """Refuse local optimizers of a client's own that do not say which model each group is of."""
    optimizers = trainer.optimizers
    names = [group.get("name") for each in optimizers for group in each.param_groups]
    if len(optimizers) != 1 or names != list(model.trained):
        raise ValueError(
            f"Expected `configure_optimizers` of {type(model).__name__} to give one optimizer, of a"
            f" group for each of {', '.join(model.trained)}, by `name`, but got"
            f" {len(optimizers)} of {', '.join(map(str, names)) or 'no group'}: change what that of"
            " Client gives, or give the arguments `optimizer` and `lr_scheduler`."
        )


def check_monitors(trainer: Any, model: Any, logged: Iterable[str], *, whole: bool = False) -> None:
    """Refuse callbacks and schedules that watch what is never logged.

    Nothing is refused where a client or a callback of the user's own might log it.

    Args:
        trainer: The trainer, with the callbacks and schedules of the model.
        model: The algorithm.
        logged: What validations log, nothing if there are none; and what rounds do, if it is known.
        whole: Whether that is known.

    Raises:
        ValueError: With the names that are nearest.
    """
    if any(_is_users(each) for each in (model, *trainer.callbacks)):
        return
    watching = [
        (type(each).__name__, each.monitor)
        for each in trainer.callbacks
        if getattr(each, "monitor", None) and getattr(each, "strict", True)
    ]
    watching += [
        (type(each.scheduler).__name__, each.monitor)
        for each in trainer.lr_scheduler_configs
        if each.reduce_on_plateau and each.monitor
    ]
    known = [*logged, "train/loss", "round", "time/round", "epoch", "step"]
    for name, monitor in watching:
        if monitor not in known and (whole or not monitor.startswith("train/")):
            near = difflib.get_close_matches(monitor, known) or known[:3]
            raise ValueError(
                f"Expected {name} with a `monitor` that rounds or validations log, as"
                f" {' or '.join(near)}, but got {monitor}."
            )


def _is_users(instance: object) -> bool:
    """Whether an object may run code that is neither Lightning's nor pl_fed's."""
    if isinstance(instance, LambdaCallback):
        return True
    return not type(instance).__module__.startswith(("lightning.", "pl_fed."))


def _check_overridden(
    argument: str, hooks: dict[str, str], instance: object, parent: type[object]
) -> None:
    for hook, hint in hooks.items():
        if is_overridden(hook, instance, parent):
            raise ValueError(
                f"Expected argument `{argument}` without the hook `{hook}` but got it in"
                f" {type(instance).__name__}: {hint}."
            )
