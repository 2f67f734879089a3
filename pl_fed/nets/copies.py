"""Obstacles to copies of a net with their own weights: compiled parts, and functions."""

import types
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pl_fed.nets.fingerprints import function_values
from pl_fed.nets.kept_values import join_names
from pl_fed.torch_internals import unwrap_method, unwrap_module


def remove_compilation(net: nn.Module) -> nn.Module:
    """Return a net without ``torch.compile``, and warn if it has a compiled part.

    A compiled part belongs to one module with its weights, but clients need copies with other
    weights: the copy of a compiled method would still call the first module. Compiled modules
    become the modules that they wrap, also in the names of the state dict, and compiled methods
    become methods again. The net changes in place.

    Args:
        net: The net, or a compiled one.

    Example:
        >>> remove_compilation(nn.Sequential(nn.Linear(1, 1)))
        Sequential(
          (0): Linear(in_features=1, out_features=1, bias=True)
        )
    """
    parts = []
    if (inner := unwrap_module(net)) is not None:
        parts.append(type(inner).__name__)
        net = inner
    for path, module in net.named_modules():
        for name, child in list(module._modules.items()):  # named_children skips repeats
            if child is not None and (inner := unwrap_module(child)) is not None:
                setattr(module, name, inner)
                parts.append(join_names(path, name))
        parts += [join_names(path, name) for name in _restore_methods(module)]
    if parts:
        warnings.warn(
            f"pl_fed takes `{'`, `'.join(parts)}` of {type(net).__name__} without torch.compile:"
            " each client has its own weights. `--federation.engine.name one_by_one_compiled`"
            " compiles whole local steps.",
            stacklevel=2,
        )
    return net


def _restore_methods(module: nn.Module) -> list[str]:
    """Replace the compiled methods of a module, and return their names."""
    attributes, restored = vars(module), []
    if attributes.pop("_compiled_call_impl", None) is not None:  # by module.compile()
        restored.append("forward")
    for name, value in list(attributes.items()):
        method = unwrap_method(value)
        if method is None:
            continue
        restored.append(name)
        if getattr(method, "__self__", None) is module and method.__name__ == name:
            del attributes[name]
        else:
            attributes[name] = method
    return restored


def detach_attributes(net: nn.Module) -> None:
    """Detach the tensors in attributes that layers compute from parameters, in place.

    ``torch.nn.utils.weight_norm`` and ``prune`` have such weights, and compute them again before
    each forward pass. Python copies no tensor with a graph.

    Args:
        net: The net.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.half = 0.5 * net.weight
        >>> detach_attributes(net)
        >>> net.half.is_leaf
        True
    """
    for module in net.modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if isinstance(value, Tensor) and not value.is_leaf:
                attributes[name] = value.detach()


def find_own_function(module: nn.Module) -> str | None:
    """Return the path of a function that would use this module in its copies, too, if any.

    A function in an attribute, such as ``lambda x: self.layer(x)``, keeps ``self``, and a copy of
    the module has the same function. Methods have no such values.

    Args:
        module: The module.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> def add_function(net):
        ...     net.double = lambda x: 2 * net(x)
        >>> add_function(net)
        >>> find_own_function(net)
        'double'
    """
    own = {id(part) for part in module.modules() if any(p.requires_grad for p in part.parameters())}
    own |= {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for path, part in module.named_modules():
        # The state of a copy: torchmetrics leaves out its functions. Parametrized parts have none.
        state = vars(part) if is_parametrized(part) else part.__getstate__()
        for name, value in state.items() if isinstance(state, dict) else ():
            values = value.values() if isinstance(value, Mapping) else value
            functions = values if isinstance(value, Mapping | list | tuple) else (value,)
            if any(_keeps(function, own) for function in functions):
                return join_names(path, name)
    return None


def _keeps(function: Any, own: set[int], depth: int = 3) -> bool:
    """Return whether a function, or one in it, keeps an object with one of the ids."""
    if not isinstance(function, types.FunctionType) or not depth:
        return False
    return any(_holds(value, own, depth) for value in function_values(function))


def _holds(value: Any, own: set[int], depth: int) -> bool:
    """Return whether a value is an object with one of the ids, or holds one."""
    if id(value) in own or id(getattr(value, "__self__", None)) in own:
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set) and depth:
        return any(_holds(entry, own, depth - 1) for entry in value)
    return _keeps(value, own, depth - 1)
