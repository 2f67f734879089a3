"""Checks that refuse Lightning settings that a federated round cannot honour."""

import difflib
import inspect
import os
import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from pl_fed.arguments import check_instances
from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.metrics.client_metrics import TRAINED_STATISTICS
from pl_fed.nets.dropout import KeyedDropout
from pl_fed.tasks.module_steps import has_training_step

PRECISIONS = ("32-true", "64-true", "bf16-mixed")

_MIN_PROCESSES = 4  # accepted on any CPU, to try several processes
CALLBACKS: dict[type[Callback], str] = {
    BaseFinetuning: "the trainable parameters are fixed: set requires_grad=False in the net",
    BatchSizeFinder: "set the data's batch_size",
    GradientAccumulationScheduler: "set `trainer.accumulate_grad_batches`, the same in all rounds",
    LearningRateFinder: "its steps would be rounds, with their own schedule: try a few rates",
    ModelPruning: "it replaces parameters, but clients and server share parameters by name",
    SpikeDetection: "a cohort's loss depends on its clients, and a round cannot be left out",
    StochasticWeightAveraging: "use WeightAveraging, which averages the models of the rounds",
    ThroughputMonitor: "its steps are not rounds: time/round is logged",
}
"""The refused callbacks of Lightning, each with the reason or a remedy."""

_LAST_ALGORITHMS: WeakKeyDictionary[nn.Module, tuple[weakref.ref[Client], str]] = (
    WeakKeyDictionary()
)
"""The algorithm that trained a net last, and its name."""

_LOCAL_STEP = "pl_fed may train many clients at once, so a local step has no hooks:"
HOOKS = {
    name: f"{_LOCAL_STEP} use on_before_optimizer_step, before the server's step, or"
    " on_train_batch_end, after a round"
    for name in ("on_before_backward", "on_after_backward", "on_before_zero_grad")
}
"""Hooks of callbacks that are never called."""

_OWN_STEP = f"{_LOCAL_STEP} move the code to training_step or end_round"
_TRANSFER = "clients' data is on the device of the models: use the data's transforms or augment"
TRANSFERS = dict.fromkeys(
    ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"), _TRANSFER
)
METHODS = {
    **dict.fromkeys((*HOOKS, "backward", "optimizer_step", "optimizer_zero_grad"), _OWN_STEP),
    "configure_gradient_clipping": "set the trainer's gradient_clip_val",
    "on_validation_model_zero_grad": "models have no gradients after a round",
    **dict.fromkeys(
        [f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")],
        "the clients' data comes from the datamodule, a pl_fed.data.FederatedData",
    ),
    **TRANSFERS,
}
"""Methods of a LightningModule that are never called, or not with a batch of samples."""

REQUIRED_HOOKS = (
    *("setup", "train", "on_save_checkpoint", "on_load_checkpoint"),
    *("validation_step", "test_step", "predict_step"),
    *[f"on_{part}_epoch_{when}" for part in ("validation", "test") for when in ("start", "end")],
)
"""Methods of ``Client`` that set up, evaluate or save a federation."""


def choose_accelerator(accelerator: str | Accelerator) -> str | Accelerator:
    """Return the trainer's accelerator: never Apple's MPS, which has no float64 numbers.

    Sums of losses and of squared distances are float64, so that results do not depend on the
    number of processes.

    Args:
        accelerator: The argument of the trainer.

    Raises:
        ValueError: If it is MPS, or ``"gpu"`` and MPS is the only one.

    Example:
        >>> choose_accelerator("cpu")
        'cpu'
    """
    has_mps = MPSAccelerator.is_available() and not CUDAAccelerator.is_available()
    if accelerator == "auto" and has_mps:
        rank_zero_info("Clients are trained on the CPU: Apple's MPS has no float64 numbers.")
        return "cpu"
    is_mps = accelerator == "mps" or isinstance(accelerator, MPSAccelerator)
    if is_mps or (accelerator == "gpu" and has_mps):
        raise ValueError(
            "Expected argument `trainer.accelerator` to be auto, cpu or cuda but got"
            f" {'mps' if is_mps else accelerator}: Apple's MPS has no float64 numbers, which"
            " pl_fed sums losses in. Use cpu."
        )
    return accelerator


def check_trainer(trainer: Any, model: Any) -> None:
    """Refuse a trainer or a model with settings that a federated fit cannot honour.

    Args:
        trainer: The trainer.
        model: The model to fit.

    Raises:
        TypeError: If the model is not a :class:`Client`.
        ValueError: If a setting, a callback or an overridden method cannot be honoured.
    """
    check_model(model)
    _check_dropouts(model)
    check_settings(trainer)
    model.trainer = trainer
    added = model.configure_callbacks()
    for callback in [*trainer.callbacks, *(added if isinstance(added, Sequence) else [added])]:
        check_callback(callback)


_RUN_FOLDERS: "WeakKeyDictionary[Callback, Path]" = WeakKeyDictionary()
"""The folder of the run in which a callback has kept its scores and the paths of its files."""


def check_run_of_callbacks(trainer: Any, loads: bool) -> None:
    """Refuse callbacks that hold the scores, or write into the folder, of another run.

    A callback of Lightning keeps these if it is given to another trainer: it would stop that run
    early by the scores of the first one, or replace its checkpoints.

    Args:
        trainer: The trainer, before it fits.
        loads: Whether it loads a checkpoint, which has the scores of its run.

    Raises:
        ValueError: If there is such a callback.
    """
    if getattr(trainer, "fast_dev_run", False):
        return
    keeping = [c for c in trainer.callbacks if isinstance(c, (ModelCheckpoint, EarlyStopping))]
    folder = trainer.run_dir.absolute()
    for callback in keeping:
        earlier = _RUN_FOLDERS.get(callback, folder)
        if earlier != folder and not (loads and isinstance(callback, EarlyStopping)):
            name = type(callback).__name__
            raise ValueError(
                f"Expected trainer argument `callbacks` without the {name} of another run but got"
                f" that of {earlier}, whose scores and folder it keeps: build a new {name} for"
                " each trainer."
            )
    _RUN_FOLDERS.update(dict.fromkeys(keeping, folder))


def check_model(model: Any) -> None:
    """Refuse a model that is not a client, or that overrides a method that is never called."""
    if not isinstance(model, Client):
        name = type(model).__name__
        if has_training_step(model):
            raise TypeError(
                f"Expected argument `model` to be a pl_fed.clients.Client but got {name}: give the"
                f" module to an algorithm, as in pl_fed.clients.FedAvg({name}(...)), and fit the"
                " algorithm."
            )
        raise TypeError(
            "Expected argument `model` to be a pl_fed.clients.Client but got"
            f" {name}: pass the net, its loss and its optimizer to an algorithm, as"
            " in pl_fed.clients.FedAvg(net, criterion=..., optimizer=...), and fit the algorithm."
        )
    _check_overridden("model", METHODS, model, LightningModule)
    _check_calls_super(model)
    if not model.automatic_optimization:
        raise ValueError(
            "Expected argument `model` to have automatic_optimization=True but got"
            f" {type(model).__name__} with False: {_OWN_STEP}."
        )


def _check_dropouts(client: Client) -> None:
    """Refuse a net with dropout layers that another algorithm has taken over."""
    layers = [m for m in client.global_model.modules() if isinstance(m, KeyedDropout)]
    if any(layer.draws is not client.draws for layer in layers):
        raise ValueError(
            f"Expected the net of {type(client).__name__} to be its own but it was given to another"
            " algorithm, too, which draws its dropout masks now: give each algorithm a copy, as in"
            f" {type(client).__name__}(copy.deepcopy(net))."
        )


def warn_of_trained_net(client: Client, begins_anew: bool) -> None:
    """Warn if a run begins with the weights that another algorithm trained in the same net.

    Args:
        client: The algorithm, which trains its net from now on.
        begins_anew: Whether the run begins with the weights in the net.
    """
    net, name = client.global_model, type(client).__name__
    last_algorithm, last_name = _LAST_ALGORITHMS.get(net, (weakref.ref(client), name))
    if begins_anew and last_algorithm() is not client:
        rank_zero_warn(
            f"{name} begins with the weights that an earlier {last_name} has trained, because both"
            " were given the same net. Unless this is meant, give each algorithm a net of its own,"
            f" as in {name}(copy.deepcopy(net))."
        )
    _LAST_ALGORITHMS[net] = (weakref.ref(client), name)


def _check_calls_super(client: Client) -> None:
    """Refuse overridden hooks without a call of ``super()``, as ``Client`` uses them itself."""
    classes = type(client).__mro__
    for cls in classes[: classes.index(Client)]:
        for hook in [hook for hook in REQUIRED_HOOKS if hook in vars(cls)]:
            code = getattr(inspect.unwrap(vars(cls)[hook]), "__code__", None)
            if code is not None and hook not in code.co_names:
                raise ValueError(
                    f"Expected `{hook}` of {cls.__name__} to call super().{hook}(...), because it"
                    " sets up, evaluates or saves the federation, but got no such call: add it."
                )


def check_data(datamodule: Any) -> None:
    """Refuse data of another class, or with a hook that never receives samples."""
    is_plain = isinstance(datamodule, LightningDataModule)
    if is_plain and not isinstance(datamodule, FederatedData):
        raise TypeError(
            "Expected argument `datamodule` to be a FederatedData but got"
            f" {type(datamodule).__name__}: pass"
            " FederatedData(pl_fed.data.LightningData(datamodule))."
        )
    check_instances(FederatedData, datamodule=datamodule)
    if datamodule is not None:
        _check_overridden("datamodule", TRANSFERS, datamodule, FederatedData)


def check_settings(trainer: Any) -> None:
    """Refuse trainer arguments that a round cannot honour."""
    settings: dict[str, Any] = {
        "val_check_interval": (
            getattr(trainer, "val_check_interval", "a time"),
            1.0,
            "validation runs between rounds: use check_val_every_n_epoch",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            0,
            "the clients' data stays the same",
        ),
    }
    for name, (value, expected, hint) in settings.items():
        if value != expected:
            raise ValueError(
                f"Expected trainer argument `{name}` to be {expected} but got {value}: {hint}."
            )
    batches = trainer.accumulate_grad_batches
    if type(batches) is not int or batches < 1:
        raise ValueError(
            "Expected trainer argument `accumulate_grad_batches` to be an integer, at least 1, but"
            f" got {batches!r}: it is the number of minibatches in a step of a local optimizer."
        )
    every = trainer.check_val_every_n_epoch
    if every is not None and every < 1:
        raise ValueError(
            f"Expected trainer argument `check_val_every_n_epoch` to be at least 1 but got {every}:"
            " to turn off validation, set limit_val_batches=0."
        )
    if trainer.precision not in PRECISIONS:
        raise ValueError(
            f"Expected trainer argument `precision` to be one of {', '.join(PRECISIONS)} but got"
            f" {trainer.precision}: local steps have no loss scaling, and small updates would be"
            " lost in a low-precision global model."
        )


def check_processes(trainer: Any, sync_batchnorm: bool = False) -> None:
    """Refuse strategies that a round cannot use, before any process starts.

    Args:
        trainer: The trainer.
        sync_batchnorm: The trainer argument ``sync_batchnorm``.
    """
    strategy = trainer.strategy
    name = type(strategy).__name__
    if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
        raise ValueError(
            f"Expected trainer argument `strategy` to be auto or ddp but got {name}: processes"
            " share the clients of a round, and each process needs complete models."
        )
    launcher = strategy.launcher
    if launcher is not None and "MultiProcessing" in type(launcher).__name__:
        raise ValueError(
            "Expected trainer argument `strategy` to be ddp but got one that spawns or forks: its"
            " processes end with each fit, and the clients' states are lost. Run a script with ddp."
        )
    if sync_batchnorm and trainer.world_size > 1:
        raise ValueError(
            "Expected trainer argument `sync_batchnorm` to be False but got True: a local step uses"
            " the batch of one client, in one process."
        )
    environment = getattr(strategy, "cluster_environment", None)
    starts_processes = environment is not None and not environment.creates_processes_externally
    if starts_processes and strategy.root_device.type == "cpu":
        check_process_count(trainer.num_devices, count_cores())


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def check_process_count(processes: int, cores: int) -> None:
    """Refuse more processes on a CPU than twice its cores; four are always accepted.

    Args:
        processes: Number of processes to start on this machine.
        cores: Number of its cores.

    Raises:
        ValueError: If there are too many.
    """
    most = max(_MIN_PROCESSES, 2 * cores)
    if processes > most:
        raise ValueError(
            f"Expected trainer argument `devices` to be at most {most} on this CPU with {cores}"
            f" cores but got {processes}: each is a process with its own copy of the data. Set"
            f" `trainer.devices`, for example to {cores}."
        )


def warn_of_idle_processes(processes: int, clients: int | None) -> None:
    """Warn if there are more processes than clients; ``None`` is an unknown number."""
    if clients is not None and processes > clients:
        rank_zero_warn(
            f"{processes} processes share {clients} clients, so {processes - clients} of them have"
            f" nothing to do: set `trainer.devices` and `trainer.num_nodes` for at most {clients}."
        )


def check_callback(callback: Callback) -> None:
    """Refuse a callback that changes batches or parameters, or has a hook that is never called."""
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
            " pl_fed renames a complete file into place; copy it elsewhere afterwards."
        )
    if isinstance(callback, ModelCheckpoint) and callback.save_last and not callback.save_top_k:
        raise ValueError(
            f"Expected {name} with `save_last` to have a `save_top_k` other than 0 but got 0:"
            " Lightning would write last.ckpt only when training ends. To keep only the latest"
            " checkpoint, leave both out, set `filename: last` and `enable_version_counter: false`."
        )
    if isinstance(callback, ModelCheckpoint) and callback.save_last and callback.save_weights_only:
        rank_zero_warn(
            f"{name} with `save_weights_only` writes a last.ckpt from which no run can resume:"
            " leave out `save_last`, and add the callback pl_fed.callbacks.LastCheckpoint."
        )
    if (
        isinstance(callback, ModelCheckpoint)
        and callback.save_last == "link"
        and callback.save_on_exception
    ):
        raise ValueError(
            f"Expected `save_last` of {name} to be true with `save_on_exception` but got link: no"
            " checkpoint is written in the middle of a round, so last.ckpt would have no target."
        )


def check_optimizer(trainer: Any, model: Any) -> None:
    """Refuse a custom local optimizer without the parameter groups of each trained model."""
    optimizers = trainer.optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = [group.get("name") for group in groups]
    built = model.objective.build_optimizer(model.trained_parameters)
    expected = [group["name"] for group in built.param_groups]
    if len(optimizers) != 1 or names != expected:
        raise ValueError(
            f"Expected `configure_optimizers` of {type(model).__name__} to return one optimizer"
            f" with parameter groups named {', '.join(expected)} but got {len(optimizers)}"
            f" with {', '.join(map(str, names)) or 'no group'}: change the result of"
            " super().configure_optimizers(), or set `optimizer` and `lr_scheduler`."
        )


def list_options(trainer: Any) -> list[dict[str, Any]]:
    """Return the options of each parameter group of the local optimizer.

    With a schedule, it is only the rate that the schedule begins with, if the group has it: others,
    such as the rate and momentum of the round, change in a run.
    """
    names = ("initial_lr",) if trainer.lr_scheduler_configs else None
    return [
        {
            name: value
            for name, value in group.items()
            if name not in ("params", "name") and (names is None or name in names)
        }
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]


def warn_of_kept_options(
    configured: Sequence[dict[str, Any]], restored: Sequence[dict[str, Any]]
) -> None:
    """Warn if a resumed run has other options of the local optimizer than those configured.

    Args:
        configured: The options of the parameter groups before the checkpoint was loaded.
        restored: Their options after it.
    """
    differences = {
        name: f"{name} {group[name]} instead of {options[name]}"
        for options, group in zip(configured, restored)
        for name in options
        if name in group and group[name] != options[name]
    }
    if differences:
        rank_zero_warn(
            "The local optimizer keeps the options of the checkpoint:"
            f" {', '.join(differences.values())}. To train on with others, start a new run with"
            " `federation.initial_model`, or change them in a callback."
        )


def check_monitors(
    trainer: Any, model: Any, logged: Iterable[str], *, includes_rounds: bool = False
) -> None:
    """Refuse callbacks and schedules with a monitor that is never logged.

    Nothing is refused if the user's own algorithm or callback might log it; a warning tells of it.

    Args:
        trainer: The trainer, with the callbacks and schedules of the model.
        model: The algorithm.
        logged: Names that validations log, and names that rounds log if ``includes_rounds``.
        includes_rounds: Whether ``logged`` contains the names that rounds log.

    Raises:
        ValueError: If a monitor is never logged; with the most similar names.
    """
    may_log = any(_may_run_user_code(instance) for instance in (model, *trainer.callbacks))
    names = [*logged, "train/loss", "round", "time/round", "epoch", "step"]
    for owner, monitor in _list_monitors(trainer, strict=True):
        if monitor not in names and (includes_rounds or not monitor.startswith("train/")):
            if may_log:
                if not includes_rounds:  # once, before training
                    _warn_of_own_monitor(owner, monitor, names)
                continue
            plain_monitor = monitor.replace("_trained", "")
            if plain_monitor in names and monitor.endswith(TRAINED_STATISTICS):
                raise ValueError(
                    f"Expected {owner} with a `monitor` that each validation logs but got"
                    f" {monitor}, which is logged only until all clients have taken part: take"
                    f" {plain_monitor}."
                )
            similar = difflib.get_close_matches(monitor, names) or names[:3]
            metric = re.sub("_(worst|best)10$", "", monitor)
            if metric in names and metric != monitor:
                raise ValueError(
                    f"Expected {owner} with a `monitor` of a metric whose direction is known but"
                    f" got {monitor}: add {metric.split('/', 2)[-1]} to"
                    " `federation.lower_is_better` or `federation.higher_is_better`."
                )
            raise ValueError(
                f"Expected {owner} with a `monitor` that rounds or validations log, as"
                f" {' or '.join(similar)}, but got {monitor}."
            )


def _warn_of_own_monitor(owner: str, monitor: str, names: Sequence[str]) -> None:
    """Warn that only a user's own code can log the monitor of a callback or schedule."""
    similar = difflib.get_close_matches(monitor, names, n=1)
    suggestion = f" (did you mean {similar[0]}?)" if similar else ""
    rank_zero_warn(
        f"{owner} has the monitor {monitor}{suggestion}, which neither rounds nor validations log:"
        " the run ends at its first check unless your own algorithm or callback logs it."
    )


def warn_of_opposite_modes(trainer: Any, directions: Mapping[str, bool | None]) -> None:
    """Warn of callbacks and schedules that take the worst value of their monitor for the best.

    Lightning's default is ``mode="min"``, also for an accuracy.

    Args:
        trainer: The trainer, with the callbacks and schedules of the model.
        directions: The names of the task's metrics, and whether larger values are better.
    """
    by_name = {"accuracy": True, "loss": False, **directions}
    for instance, monitor in _list_monitoring(trainer):
        name = re.sub("(_trained)?(_weighted|_worst10|_best10)?$", "", monitor.rpartition("/")[2])
        mode = getattr(instance, "mode", None)
        is_larger_better = by_name.get(name)
        expected = "max" if is_larger_better else "min"
        if mode in ("min", "max") and is_larger_better is not None and mode != expected:
            rank_zero_warn(
                f"{type(instance).__name__} with mode {mode} takes the"
                f" {'smallest' if mode == 'min' else 'largest'} {monitor} for the best, but"
                f" {'larger' if is_larger_better else 'smaller'} values are better: set its `mode`"
                f" to {expected}."
            )


def check_private_monitors(trainer: Any, public: Collection[str] = ()) -> None:
    """Refuse callbacks and schedules that select something shared by clients' metrics.

    With privacy, an early stop, the best checkpoint or a learning rate may depend on the released
    models and the spent budget only.

    Args:
        trainer: The trainer, with the callbacks and schedules of the model.
        public: Names of metrics on samples that only the server has.

    Raises:
        ValueError: If a monitor is a metric of clients, or a NaN or the clock would end the run.
    """
    if any(isinstance(callback, Timer) for callback in trainer.callbacks):
        raise ValueError(
            "Expected no `trainer.max_time` and no Timer with `federation.privacy` but got one: the"
            " round at which the clock ends a run depends on the speed of the drawn clients; set"
            " `trainer.max_epochs`."
        )
    if torch.is_anomaly_enabled():
        raise ValueError(
            "Expected `trainer.detect_anomaly` to be false for `federation.privacy` but got true:"
            " the end of a run at the NaN of one client would tell that it took part."
        )
    for owner, monitor in _list_monitors(trainer):
        is_public = monitor in ("round", "epoch", "step", *public)
        if not is_public and not monitor.startswith("privacy/"):
            raise ValueError(
                f"Expected {owner} without a `monitor` of clients' metrics for `federation.privacy`"
                f" but got {monitor}: the choice would be released without noise; monitor"
                " privacy/epsilon or round, or remove it."
            )


def warn_of_published_seed(trainer: Any) -> None:
    """Warn of loggers that publish the checkpoints of a run with privacy."""
    for logger in trainer.loggers:
        if getattr(logger, "_log_model", False):  # of W&B and MLflow
            rank_zero_warn(
                f"{type(logger).__name__} with `log_model` publishes checkpoints, which have the"
                " noise seed: whoever reads them can subtract the noise of `federation.privacy`."
                " Leave out `log_model`."
            )


def _list_monitors(trainer: Any, strict: bool = False) -> list[tuple[str, str]]:
    """Return the names of the callbacks and schedules with a monitor, and the monitor.

    Args:
        trainer: The trainer.
        strict: Whether to leave out callbacks that accept a missing metric.
    """
    return [
        (type(instance).__name__, monitor)
        for instance, monitor in _list_monitoring(trainer)
        if getattr(instance, "strict", True) or not strict
    ]


def _list_monitoring(trainer: Any) -> list[tuple[Any, str]]:
    """Return the callbacks and schedules with a monitor, and the monitor."""
    watching = [
        (callback, callback.monitor)
        for callback in trainer.callbacks
        if getattr(callback, "monitor", None)
    ]
    return watching + [
        (config.scheduler, config.monitor)
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.monitor
    ]


def _may_run_user_code(instance: object) -> bool:
    """Return whether an object may run code that is neither Lightning's nor pl_fed's."""
    if isinstance(instance, LambdaCallback):
        return True
    return not type(instance).__module__.startswith(("lightning.", "pl_fed."))


def _check_overridden(
    argument: str, hooks: dict[str, str], instance: object, parent: type[object]
) -> None:
    """Refuse an object that overrides one of its parent class's hooks, with the hook's hint."""
    for hook, hint in hooks.items():
        if is_overridden(hook, instance, parent):
            raise ValueError(
                f"Expected argument `{argument}` without the hook `{hook}` but got it in"
                f" {type(instance).__name__}: {hint}."
            )
