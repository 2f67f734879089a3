"""Calls of a module with other tensors than its own."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pl_fed.trees import Tree, leaves


@contextmanager
def swap_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a module other parameters and buffers in place of its own, within the context.

    Tied tensors stay tied. The module has its own tensors again afterwards, even if a layer has
    several names, where ``torch.func.functional_call`` loses them (pytorch/pytorch#164759).

    Args:
        module: The module.
        tensors: Tensors by name. The module's own tensors remain for all other names. One of the
            names of a tied tensor is enough; of several, the last one holds.

    Raises:
        RuntimeError: If the module has replaced one of the given tensors by another: its value
            would be lost.
        ValueError: If the module has no tensor of a name.

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> with swap_tensors(net, {"weight": Tensor([[2.0]])}):
        ...     net(Tensor([[3.0]]))
        tensor([[6.]])
    """
    places = _find_places(module, tensors)
    own_tensors = [place.holder[place.key] for place in places]
    for place in places:
        place.holder[place.key] = place.tensor
    try:
        yield
        lost = [place for place in places if place.holder.get(place.key) is not place.tensor]
    finally:
        for place, tensor in zip(places, own_tensors, strict=True):
            place.holder[place.key] = tensor
    if lost:
        raise RuntimeError(f"the module replaces the tensor {lost[0].name} in place of changing it")


class _Place(NamedTuple):
    """Place: where a module holds a tensor that another one replaces.

    Attributes:
        holder: The parameters or the buffers of one part of the module, by key.
        key: The key of the tensor in it.
        name: The name of the tensor in the module.
        tensor: The other tensor.
    """

    holder: dict[str, Tensor | None]
    key: str
    name: str
    tensor: Tensor


def _find_places(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[_Place]:
    """Return all places of the tensors that have the given names; ties have several."""
    own_tensors: dict[str, Tensor] = {}
    places: dict[Tensor, list[tuple[dict[str, Tensor | None], str]]] = defaultdict(list)
    seen = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    own_tensors[f"{prefix}.{key}" if prefix else key] = tensor
                    if part not in seen:
                        places[tensor].append((holder, key))
        seen.add(part)
    if unknown := [name for name in tensors if name not in own_tensors]:
        raise ValueError(
            f"Expected argument `tensors` to name some of {', '.join(own_tensors)}, but got"
            f" {', '.join(unknown)}."
        )
    found = {
        (id(holder), key): _Place(holder, key, name, tensor)
        for name, tensor in tensors.items()
        for holder, key in places[own_tensors[name]]
    }
    return [*found.values()]


class Net:
    """A module that is called with other parameters and buffers in place of its own.

    Args:
        module: The module.
        tensors: Tensors by name. The module's own tensors remain for all other names.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self.tensors = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the tensors: see :func:`swap_tensors`."""
        with swap_tensors(self.module, self.tensors):
            return self.module(*args, **kwargs)


READS_OWN_WEIGHTS = "the module also reads its parameters from a list, an object or a function"
"""The reason why a module cannot be called with other tensors: see :func:`reads_own_weights`."""


def reads_own_weights(rows: Sequence[Tensor], call: Callable[[], Tree]) -> bool:
    """Return whether a call of modules with other tensors reads the modules' own weights, too.

    A module may keep its parameters in a list, too, for example for a penalty. Other tensors do not
    get there. In a second call the modules' own weights are NaN, and so are results that read them.

    Args:
        rows: The own weights.
        call: Calls the modules with other tensors, and returns the results.

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> other = {"weight": Tensor([[2.0]])}
        >>> penalized = lambda: Net(net, other)(Tensor([[3.0]])) + weights[0]
        >>> weights = [net.weight]
        >>> reads_own_weights([net.weight.data], penalized)
        True
        >>> reads_own_weights([net.weight.data], lambda: Net(net, other)(Tensor([[3.0]])))
        False
    """
    expected, own = leaves(call()), [row.clone() for row in rows]
    try:
        for row in rows:
            row.data.fill_(torch.nan)  # counts no version: all is put back
        actual = leaves(call())
    finally:
        for row, weights in zip(rows, own):
            row.data.copy_(weights)
    return any(not a.isnan().equal(b.isnan()) for a, b in zip(actual, expected, strict=True))
