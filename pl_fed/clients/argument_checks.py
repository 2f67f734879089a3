"""Checks of the arguments that every algorithm takes."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from pl_fed.arguments import check_instances, check_integers
from pl_fed.clients.host import FederationModule
from pl_fed.nets.copies import find_own_function
from pl_fed.nets.dropout import KeyedDropout
from pl_fed.nets.rows import frozen_modules
from pl_fed.tasks import CriterionTask, HuggingFace, LightningTask, Task
from pl_fed.tasks.hugging_face import find_model
from pl_fed.tasks.module_steps import check_hooks, has_training_step, list_hooks


def check_work(steps: int | None, epochs: int | None, prefix: str = "local") -> None:
    """Refuse local work below 1, or in both steps and epochs.

    Args:
        steps: Minibatch steps.
        epochs: Passes over the client's data.
        prefix: Of the arguments' names, such as ``local`` of ``local_steps``.

    Raises:
        ValueError: If a number is below 1, or both are given.
    """
    if steps is not None and epochs is not None:
        raise ValueError(
            f"Expected only one of `model.{prefix}_steps` and `model.{prefix}_epochs` to be given"
            f" but got {steps} and {epochs}: set the other to null."
        )
    for name, value in ((f"{prefix}_steps", steps), (f"{prefix}_epochs", epochs)):
        if value is not None:
            check_integers(1, **{name: value})


def check_builders(**builders: Any) -> None:
    """Refuse optimizers and schedules that are not callable.

    Args:
        **builders: The arguments by name. An ``lr_scheduler`` may be ``None``.

    Raises:
        TypeError: If a builder is not callable.
    """
    for argument, builder in builders.items():
        if builder is None and argument != "lr_scheduler":
            raise TypeError(
                f"Expected argument `{argument}` to build an optimizer, such as"
                " functools.partial(torch.optim.SGD, lr=0.1), or torch.optim.SGD in a config, but"
                " got None: leave the argument out for the default, or name an optimizer."
            )
        if builder is not None and not callable(builder):
            raise TypeError(
                f"Expected argument `{argument}` to be a callable, such as"
                f" functools.partial(torch.optim.SGD, lr=0.1), but got {builder!r}."
            )


def check_copies(net: nn.Module) -> None:
    """Refuse a net whose copies, such as personal models, would compute with its own weights.

    Raises:
        ValueError: If an attribute is a function that keeps the net, such as ``lambda x:
            self.layer(x)``.
    """
    if path := find_own_function(net):
        raise ValueError(
            f"Expected argument `net` to have copies with their own weights but got `{path}` of"
            f" {type(net).__name__}, a function that keeps the net itself: write it as a method."
        )


def check_net(net: nn.Module) -> None:
    """Refuse a net that is no module, or a LightningModule with steps or hooks that do not fit.

    pl_fed calls the steps of a LightningModule only if it has a ``training_step``.

    Raises:
        TypeError: If the net is no module, a client, or a LightningModule with steps or hooks but
            without a ``training_step``.
        ValueError: If the module optimizes manually, has hooks of local steps, or has trainable
            parameters in TorchScript.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"Expected argument `net` to be a torch.nn.Module but got {net!r}: if it is from a"
            " config, annotate it in the subclass's __init__ (net: torch.nn.Module)."
        )
    hooks, name = list_hooks(net), type(net).__name__
    if isinstance(net, FederationModule):
        raise TypeError(
            f"Expected argument `net` to be a module without federated learning but got {name}:"
            " give the net of its clients."
        )
    if has_training_step(net):
        if uncalled := check_hooks(net):
            rank_zero_warn(
                f"pl_fed does not call `{'`, `'.join(uncalled)}` of {name}: data, callbacks and"
                " rounds are those of the federation, and values that these hooks set stay as"
                " `__init__` sets them. A step may read `self.current_epoch`, the round."
            )
    elif hooks:
        raise TypeError(
            "Expected argument `net` to be a module that turns inputs into outputs, or a"
            f" LightningModule with a `training_step`, but got {name} with"
            f" `{'`, `'.join(hooks)}` and no `training_step`: define `training_step`, or give the"
            " module that it trains as `net`, its loss as `criterion` and its optimizer as"
            " `optimizer`."
        )
    _check_scripts(net)
    _tell_of_frozen_layers(net)


def _check_scripts(net: nn.Module) -> None:
    """Refuse trainable parameters in TorchScript: a copy of them cannot be trained."""
    for path, part in net.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(
            parameter.requires_grad for parameter in part.parameters()
        ):
            raise ValueError(
                f"Expected argument `net` without trainable parameters in TorchScript but got"
                f" `{path or type(net).__name__}`: give the module that `torch.jit.script` has"
                " compiled, or set requires_grad=False to freeze it."
            )


def _tell_of_frozen_layers(net: nn.Module) -> None:
    """Tell that frozen layers would act otherwise in the training mode that they are in."""
    parts = {id(part) for frozen in frozen_modules(net) for part in frozen.modules()}
    layers = [
        name
        for name, layer in net.named_modules()
        if id(layer) in parts
        and layer.training
        and (
            getattr(layer, "running_mean", None) is not None
            or (isinstance(layer, (nn.Dropout, nn.Dropout2d, KeyedDropout)) and layer.p > 0)
        )
    ]
    if layers:
        rank_zero_info(
            f"Frozen submodules of {type(net).__name__} stay in evaluation mode, because all"
            f" clients share them. BatchNorm and Dropout act as in evaluation in `{layers[0]}`"
            f"{f' and {len(layers) - 1} others' if layers[1:] else ''}."
        )


def choose_net_task(net: nn.Module, criterion: nn.Module | None, task: Task | None) -> Task | None:
    """Return the task for a net, or ``None`` if the data determine it.

    Args:
        net: The net.
        criterion: The argument ``criterion``.
        task: The argument ``task``.

    Raises:
        TypeError: If the task is no :class:`Task`.
        ValueError: If the arguments exclude each other.
    """
    check_instances(Task, task=task)
    if task is not None and criterion is not None:
        raise ValueError(
            "Expected only one of `task` and `criterion` but got both: give the criterion to"
            f" the task, as {type(task).__name__}(criterion=...)."
        )
    name = type(net).__name__
    if not has_training_step(net):
        if isinstance(task, LightningTask):
            raise ValueError(
                "Expected argument `net` to be a LightningModule with a `training_step` for the"
                f" task LightningTask but got {name}."
            )
        if isinstance(task, HuggingFace) or (task is None and find_model(net) is not None):
            return _choose_hugging_face(net, criterion, task)
        return task or (None if criterion is None else CriterionTask(criterion))
    other = criterion if task is None else task
    if other is not None and not isinstance(other, LightningTask):
        argument = "criterion" if task is None else "task"
        raise ValueError(
            f"Expected no argument `{argument}` for {name}, a LightningModule with a"
            f" `training_step`, but got {type(other).__name__}: to use it, give the module without"
            " steps as `net`."
        )
    return task or LightningTask()


def _choose_hugging_face(
    net: nn.Module, criterion: nn.Module | None, task: HuggingFace | None
) -> HuggingFace:
    """Return the task of a Hugging Face model."""
    if criterion is not None:
        raise ValueError(
            f"Expected no argument `criterion` for {type(net).__name__}, a Hugging Face model with"
            f" a loss of its own, but got {type(criterion).__name__}: remove it, or give a module"
            " that returns the model's logits as `net`."
        )
    task = task or HuggingFace()
    task.read_net(net)
    return task
