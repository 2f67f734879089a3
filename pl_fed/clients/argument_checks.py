"""Checks of the arguments that every algorithm takes."""

from typing import Any

from torch import nn

from pl_fed.arguments import check_integers


def check_work(steps: int | None, epochs: int | None, prefix: str = "local") -> None:
    """Refuse local work that is below 1 or counted twice.

    Raises:
        ValueError: If it is.
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
    """Refuse an optimizer or a schedule, by the argument's name, that cannot be called.

    Raises:
        TypeError: If one is neither callable nor ``None``.
    """
    for argument, builder in builders.items():
        if builder is not None and not callable(builder):
            raise TypeError(
                f"Expected argument `{argument}` to be a callable, as a class of torch.optim"
                f" with its options by functools.partial, but got {builder!r}."
            )


def check_net(net: nn.Module) -> None:
    """Refuse a net that is no module, or a LightningModule with steps or hooks of its own.

    Nothing would call those steps and hooks.

    Raises:
        TypeError: If it is one of these; it says what to give instead.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"Expected argument `net` to be a torch.nn.Module but got {net!r}: where it comes"
            " from a config, annotate it in the subclass's __init__ (net: torch.nn.Module)."
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
            f" LightningModule {kind.__name__}, whose `{'`, `'.join(ignored)}` would not be called:"
            " give the module that it trains as `net`, its loss as `criterion` and its optimizer as"
            " `optimizer`."
        )
