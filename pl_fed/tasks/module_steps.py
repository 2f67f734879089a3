"""The steps of a LightningModule: which ones it defines, and calls of them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from pl_fed.nets.calls import Net, swap_tensors
from pl_fed.tasks.one_process import one_process
from pl_fed.text import first_line

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_CALLED = (
    *STEPS,
    *GRADIENT_HOOKS,
    *BATCH_HOOKS,
    *("configure_model", "configure_optimizers"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_test_start", "on_test_epoch_start", "on_test_epoch_end"),
)
_SKIPPED = (  # they observe, or belong to data and to processes
    *("setup", "teardown", "configure_callbacks", "prepare_data"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_end", "on_test_end"),
    *("on_validation_model_eval", "on_validation_model_train"),
    *("on_test_model_eval", "on_test_model_train"),
    *("on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)

_REMOVED = tuple(f"{stage}_epoch_end" for stage in ("training", "validation", "test"))


def list_hooks(net: nn.Module) -> list[str]:
    """Return the steps and hooks of Lightning that a module's class defines, in their order.

    Returns:
        Names of methods; empty for a module that is no LightningModule.
    """
    return [*_list_class_hooks(cast(Any, type(net)))]


@cache
def _list_class_hooks(kind: type, base: str = "LightningModule") -> tuple[str, ...]:
    """Return the steps and hooks of Lightning that a class defines, below a base class of it."""
    bases = kind.__mro__
    names = [ancestor.__name__ for ancestor in bases]  # pytorch_lightning has a class of its own
    if base not in names:
        return ()
    place = names.index(base)
    defined = dict.fromkeys(name for ancestor in bases[:place] for name in vars(ancestor))
    return tuple(
        name
        for name in defined
        if not name.startswith("_")
        and hasattr(bases[place], name)
        and not hasattr(nn.Module, name)
        and callable(getattr(bases[place], name))
    )


def has_training_step(net: object) -> bool:
    """Return whether a net is a LightningModule with a ``training_step``."""
    return isinstance(net, nn.Module) and "training_step" in list_hooks(net)


def check_hooks(net: nn.Module) -> list[str]:
    """Refuse a module with a ``training_step`` whose hooks would change its training.

    Args:
        net: A LightningModule with a ``training_step``.

    Returns:
        The names of hooks that pl_fed does not call and that need not change the training.

    Raises:
        ValueError: If the module optimizes manually, has hooks of local steps or of Lightning 1, or
            a step that takes an iterator, or if ``training_step`` needs a third argument.
    """
    name, hooks = type(net).__name__, list_hooks(net)
    if not getattr(net, "automatic_optimization", True):
        raise ValueError(
            f"Expected argument `net` to have `automatic_optimization` = True but got {name} with"
            " False: return the loss from `training_step` without manual_backward, since the local"
            " optimizer takes the step."
        )
    refused = [hook for hook in hooks if hook not in (*_CALLED, *_SKIPPED)]
    if refused:
        raise ValueError(
            f"Expected argument `net` to have no hooks of single steps but got {name} with"
            f" `{'`, `'.join(refused)}`: move their code into `training_step`, where values that"
            " stay between steps, such as a moving average, are buffers updated in place, or use"
            " the trainer's options."
        )
    removed = [hook for hook in _REMOVED if callable(getattr(net, hook, None))]
    if removed:
        raise ValueError(
            f"Expected argument `net` to have no hooks of Lightning 1 but got {name} with"
            f" `{'`, `'.join(removed)}`, which Lightning 2 removed: log in the steps, or in"
            " `on_validation_epoch_end` and `on_test_epoch_end`, without `outputs`."
        )
    for step in STEPS:
        if step in hooks and "dataloader_iter" in inspect.signature(getattr(net, step)).parameters:
            raise ValueError(
                f"Expected `{step}` of {name} to take (batch, batch_idx) but got dataloader_iter."
            )
    further = _list_further_arguments(cast(Any, type(net)), "training_step")
    if "training_step" in hooks and further:
        raise ValueError(
            f"Expected `training_step` of {name} to take (batch, batch_idx) but got"
            f" {', '.join(further)}, too, which Lightning 2 does not give: give it a default, and"
            " optimize by one optimizer on complete batches."
        )
    return list_skipped_hooks(net)


def list_skipped_hooks(net: nn.Module) -> list[str]:
    """Return the hooks of a module that pl_fed does not call and that need not change training."""
    hooks = [hook for hook in list_hooks(net) if hook in _SKIPPED]
    return [hook for hook in hooks if hook != "setup" or not _needs_setup(net)]


def build_layers(net: nn.Module) -> None:
    """Build the layers of a LightningModule that has them only from a hook on.

    ``configure_model`` is called as Lightning does. ``setup("fit")`` is called if the module has no
    parameter without it.

    Raises:
        ValueError: If a hook fails: there is no trainer yet.
    """
    hooks = [hook for hook in ("configure_model", "setup") if hook in list_hooks(net)]
    for hook in hooks:
        if hook == "setup" and not _needs_setup(net):
            continue
        arguments = ("fit",) if hook == "setup" else ()
        try:
            getattr(net, hook)(*arguments)
        except Exception as error:
            raise ValueError(
                f"Expected `{hook}` of {type(net).__name__} to build its layers without a trainer"
                f" but that failed ({first_line(error)}): build them in `__init__`."
            ) from error


def _needs_setup(net: nn.Module) -> bool:
    """Return whether a module has no parameter yet."""
    return next(net.parameters(), None) is None


def call_step(
    net: Callable[..., Any],
    step: str,
    batch: Any,
    batch_idx: Any,
    device: torch.device | None = None,
    datamodule: Any = None,
) -> Any:
    """Return the result of a step, on the batch that the batch hooks return.

    A step belongs to one client: it sees a run of one process.

    Args:
        net: A LightningModule, or one with other tensors (:class:`~pl_fed.nets.calls.Net`).
        step: The name of the step.
        batch: The batch, in the module's own structure.
        batch_idx: The index of the batch.
        device: The device to which a batch of the user's own is moved; ``None`` if it is there.
        datamodule: A LightningDataModule; the batch hooks that it defines replace the module's.
    """
    module = cast(nn.Module, net.module if isinstance(net, Net) else net)
    function, kind = getattr(module, step), cast(Any, type(module))
    with one_process():
        with _lend_trainer(datamodule, module):
            batch = _transfer(module, batch, device, datamodule)
        arguments = (batch, batch_idx, 0)[: _count_arguments(kind, step)]
        if not isinstance(net, Net):
            return function(*arguments)
        with swap_tensors(net.module, net.tensors):
            return function(*arguments)


@contextmanager
def _lend_trainer(datamodule: Any, module: nn.Module) -> Iterator[None]:
    """Let the hooks of a data module, if there is one, read the trainer of a module.

    Such a hook may change batches only if ``self.trainer.training``. The data module may have the
    trainer of an earlier plain fit.
    """
    trainer = getattr(module, "_trainer", None)
    if datamodule is None or trainer is None:
        yield
        return
    before, datamodule.trainer = datamodule.trainer, trainer
    try:
        yield
    finally:
        datamodule.trainer = before


def _transfer(module: nn.Module, batch: Any, device: torch.device | None, datamodule: Any) -> Any:
    """Return the batch that the batch hooks return; they run as in Lightning."""
    owners: dict[str, Any] = dict.fromkeys(_list_class_hooks(cast(Any, type(module))), module)
    if datamodule is not None:
        own = _list_class_hooks(cast(Any, type(datamodule)), "LightningDataModule")
        owners |= dict.fromkeys([hook for hook in BATCH_HOOKS if hook in own], datamodule)
    if device is not None:
        dtype = next(module.parameters()).dtype
        if dtype != torch.float32:  # as Lightning's precision plugins
            batch = apply_to_collection(batch, Tensor, _convert_reals, dtype)
    if "on_before_batch_transfer" in owners:
        place = next(module.parameters()).device
        if device is None and place.type != "cpu":  # the hook gets a batch on the CPU
            batch, device = apply_to_collection(batch, Tensor, Tensor.cpu), place
        batch = owners["on_before_batch_transfer"].on_before_batch_transfer(batch, 0)
    if device is not None or "transfer_batch_to_device" in owners:
        owner = owners.get("transfer_batch_to_device", module)
        target = device or next(module.parameters()).device
        batch = owner.transfer_batch_to_device(batch, target, 0)
    if "on_after_batch_transfer" in owners:
        batch = owners["on_after_batch_transfer"].on_after_batch_transfer(batch, 0)
    return batch


def _convert_reals(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _list_further_arguments(kind: type, step: str) -> list[str]:
    """Return the parameters of a step after batch and batch_idx that have no default."""
    _, *parameters = inspect.signature(getattr(kind, step)).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters[2:]
        if parameter.kind not in variable and parameter.default is parameter.empty
    ]


@cache
def _count_arguments(kind: type, step: str) -> int:
    """Return the number of arguments of a step: batch, batch_idx and dataloader_idx, in order.

    As in Lightning, a third parameter with a default has its default: it may be anything, such as
    ``stage="val"``.
    """
    own, *parameters = inspect.signature(getattr(kind, step)).parameters.values()
    # of a decorated step, the module itself may be one of *args
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in (own, *parameters)):
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        parameter.kind in positional and (place < 2 or parameter.default is parameter.empty)
        for place, parameter in enumerate(parameters)
    )
