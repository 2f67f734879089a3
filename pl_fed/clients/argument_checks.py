"""Checks of the arguments that every algorithm takes."""

from typing import Any

from torch import nn

from pl_fed.arguments import check_integers


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
            f"Expected only one of `{prefix}_steps` and `{prefix}_epochs` but got both:"
            f" {steps} and {epochs}."
        )
    for name, value in ((f"{prefix}_steps", steps), (f"{prefix}_epochs", epochs)):
        if value is not None:
            check_integers(1, **{name: value})


def check_builders(**builders: Any) -> None:
    """Refuse optimizers and schedules that are not callable.

    Args:
        **builders: The arguments by name.

    Raises:
        TypeError: If a builder is neither callable nor ``None``.
    """
    for argument, builder in builders.items():
        if builder is not None and not callable(builder):
            raise TypeError(
                f"Expected argument `{argument}` to be a callable, such as"
                f" functools.partial(torch.optim.SGD, lr=0.1), but got {builder!r}."
            )


def check_net(net: nn.Module) -> None:
    """Refuse a net that is no module, or a LightningModule with its own steps or hooks.

    pl_fed would not call these steps and hooks.

    Raises:
        TypeError: If the net is one of these; the message names the remedy.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"Expected argument `net` to be a torch.nn.Module but got {net!r}: if it is from a"
            " config, annotate it in the subclass's __init__ (net: torch.nn.Module)."
        )
    kind = type(net)
    bases = kind.__mro__
    names = [base.__name__ for base in bases]  # pytorch_lightning has a class of its own
    if "LightningModule" not in names:
        return
    place = names.index("LightningModule")
    defined = dict.fromkeys(name for base in bases[:place] for name in vars(base))
    ignored = [
        name
        for name in defined
        if not name.startswith("_") and hasattr(bases[place], name) and not hasattr(nn.Module, name)
    ]
    if ignored:
        raise TypeError(
            "Expected argument `net` to be a module that turns inputs into outputs but got the"
            f" LightningModule {kind.__name__} with `{'`, `'.join(ignored)}`, which pl_fed does not"
            " call: give the module that it trains as `net`, its loss as `criterion` and its"
            " optimizer as `optimizer`."
        )
