"""The values of modules besides trained parameters: a record of them, and a guard that restores."""

import random
import types
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from pl_fed.nets.fingerprints import (
    Fingerprints,
    attributes_of,
    contents,
    digest,
    is_unread,
    package_of,
)
from pl_fed.nets.gradient_hooks import list_gradient_hooks
from pl_fed.nets.user_values import user_values

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MIRRORS = frozenset(("_flat_weights", "_flat_weight_refs"))
"""Attributes of a recurrent layer that are lists of its parameters."""


@dataclass(frozen=True)
class Part:
    """Part: a module or another object with attributes, whose values are recorded.

    Attributes:
        name: The dotted name of the object; empty for the root.
        owner: The object.
        ignored: Names of attributes that a change of does not count, besides those of
            ``nn.Module``; ``None`` leaves out all attributes.
        is_outside: Whether the attributes are recorded as values outside of modules.
    """

    name: str
    owner: Any
    ignored: frozenset[str] | None = frozenset()
    is_outside: bool = False

    @property
    def all_ignored(self) -> frozenset[str]:
        """The names of attributes whose change does not count."""
        return (self.ignored or frozenset()) | _MODULE_INTERNALS | MIRRORS

    def attributes(self) -> dict[str, Any]:
        """Return the values of the object's attributes by their dotted names."""
        if self.ignored is None:
            return {}
        ignored = self.all_ignored
        return {
            join_names(self.name, name): value
            for name, value in vars(self.owner).items()
            if name not in ignored
        }

    def hooks(self) -> dict[str, Any]:
        """Return the hooks of a module by dotted names; they may keep values in closures."""
        if self.ignored is None or not isinstance(self.owner, nn.Module):
            return {}
        values = {name: vars(self.owner).get(name) for name in _HOOKS}
        return {join_names(self.name, name): hooks for name, hooks in values.items() if hooks}


def join_names(*names: str) -> str:
    """Return a dotted name, without empty parts."""
    return ".".join(name for name in names if name)


@dataclass(frozen=True)
class TensorRecord:
    """Tensor record: a parameter or a buffer at one moment.

    Attributes:
        tensor: The tensor itself, whose identity counts.
        shape: Its shape, which a change in place by ``resize_`` changes.
        version: The number of its changes in place; −1 if it has none.
        digest: A digest of its numbers; ``None`` if they were not read.
        place: Its address in memory.
        requires_grad: Whether it requires a gradient.
        is_parameter: Whether it is a parameter.
    """

    tensor: Tensor
    shape: torch.Size
    version: int
    digest: Hashable
    place: int
    requires_grad: bool
    is_parameter: bool

    @classmethod
    def record(cls, tensor: Tensor, reads: bool) -> "TensorRecord":
        """Record a tensor, and its numbers if ``reads`` is true."""
        numbers = digest(tensor, reads_large=True) if reads else None
        is_parameter = isinstance(tensor, nn.Parameter)
        return cls(
            tensor,
            tensor.shape,
            version_of(tensor),
            numbers,
            tensor.data_ptr(),
            tensor.requires_grad,
            is_parameter,
        )

    def differs(self, other: "TensorRecord") -> bool:
        """Return whether the numbers of two records of a tensor differ."""
        if self.digest is not None and other.digest is not None:
            return self.digest != other.digest
        return self.version != other.version


def version_of(tensor: Tensor) -> int:
    """Return the number of a tensor's changes in place; −1 for a tensor without a count."""
    try:
        return int(tensor._version)
    except RuntimeError:  # a tensor of an inference
        return -1


@dataclass(frozen=True)
class KeptValues:
    """Kept values: the attributes and tensors of modules at one moment.

    Attributes:
        attributes: Fingerprints of attributes by their dotted names.
        tensors: Records of parameters and buffers by their dotted names.
        outside: Fingerprints of values outside of modules: attributes of classes, global variables
            that methods name, and what functions and hooks keep.
    """

    attributes: Mapping[str, Hashable]
    tensors: Mapping[str, TensorRecord]
    outside: Mapping[str, Hashable]

    @classmethod
    def record(
        cls, parts: Iterable[Part], reads_frozen: bool = True, reads_trained: bool = False
    ) -> Self:
        """Record the values of parts.

        Args:
            parts: All modules, and other objects.
            reads_frozen: Whether to read the numbers of frozen parameters.
            reads_trained: Whether to read the numbers of other parameters.
        """
        parts = list(parts)
        tensors: dict[str, TensorRecord] = {}
        for part in parts:
            for name, tensor in own_tensors(part.owner):
                reads = reads_trained if tensor.requires_grad else reads_frozen
                reads = reads or not isinstance(tensor, nn.Parameter)
                tensors[join_names(part.name, name)] = TensorRecord.record(tensor, reads)
        registered = {id(part.owner): part.name for part in parts}
        registered |= {id(record.tensor): name for name, record in tensors.items()}
        prints = Fingerprints(registered)
        attributes: dict[str, Hashable] = {}
        outside: dict[str, Hashable] = {}
        for part in parts:
            found = outside if part.is_outside else attributes
            for name, value in part.attributes().items():
                found[name] = prints.compute(value)
            outside |= {name: prints.compute(value) for name, value in part.hooks().items()}
        kinds = dict.fromkeys(type(part.owner) for part in parts if part.ignored is not None)
        outside |= {name: prints.compute(value) for name, value in user_values(*kinds)}
        return cls(attributes, tensors, outside)

    def changes(self, after: "KeptValues") -> "Changes":
        """Return the differences to a later record of the same modules."""
        pairs = {
            name: (record, after.tensors[name])
            for name, record in self.tensors.items()
            if name in after.tensors
        }
        added = {name: record for name, record in after.tensors.items() if name not in self.tensors}
        gone = {name for name in self.tensors if name not in after.tensors}
        replaced = {n for n, (old, new) in pairs.items() if old.tensor is not new.tensor} | gone
        parameters = {name for name, record in self.tensors.items() if record.is_parameter}
        changed = {n for n, (old, new) in pairs.items() if n not in replaced and old.differs(new)}
        frozen = {n for n in parameters if not self.tensors[n].requires_grad}
        toggled = {
            name
            for name in parameters - replaced
            if pairs[name][0].requires_grad != pairs[name][1].requires_grad
        }
        return Changes(
            attributes=_different_names(self.attributes, after.attributes)
            | {name for name, record in added.items() if not record.is_parameter},
            outside=_different_names(self.outside, after.outside),
            buffers=frozenset(changed - parameters),
            replaced_buffers=frozenset(replaced - parameters),
            frozen_parameters=frozenset(changed & frozen),
            trained_parameters=frozenset((changed & parameters) - frozen),
            replaced_parameters=frozenset(replaced & parameters)
            | {name for name, record in added.items() if record.is_parameter},
            moved_parameters=frozenset(
                name
                for name in parameters - replaced - frozen
                if pairs[name][0].place != pairs[name][1].place
            ),
            toggled=frozenset(toggled),
        )


def _different_names(
    before: Mapping[str, Hashable], after: Mapping[str, Hashable]
) -> frozenset[str]:
    """Return the names with another value, or with a value on one side only."""
    names = dict.fromkeys((*before, *after))
    return frozenset(name for name in names if before.get(name) != after.get(name))


@dataclass(frozen=True)
class Changes:
    """Changes: the names of the values that differ between two records.

    Attributes:
        attributes: Attributes with another value, also deep inside of it.
        outside: Values outside of modules that have changed.
        buffers: Buffers with other numbers.
        replaced_buffers: Buffers that are other tensors.
        frozen_parameters: Frozen parameters with other numbers.
        trained_parameters: Other parameters with other numbers, or more changes in place.
        replaced_parameters: Parameters that are other tensors.
        moved_parameters: Trained parameters at another place in memory.
        toggled: Parameters that require a gradient in one of both records only.
    """

    attributes: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    replaced_buffers: frozenset[str] = frozenset()
    frozen_parameters: frozenset[str] = frozenset()
    trained_parameters: frozenset[str] = frozenset()
    replaced_parameters: frozenset[str] = frozenset()
    moved_parameters: frozenset[str] = frozenset()
    toggled: frozenset[str] = frozenset()

    def __or__(self, other: "Changes") -> "Changes":
        """Return the changes of both."""
        names = self.__dataclass_fields__
        return Changes(**{name: getattr(self, name) | getattr(other, name) for name in names})


def own_tensors(owner: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module itself, without those of its submodules."""
    if not isinstance(owner, nn.Module):
        return []
    return [
        *owner.named_parameters(recurse=False, remove_duplicate=False),
        *owner.named_buffers(recurse=False, remove_duplicate=False),
    ]


class ValueGuard:
    """Value guard: restores all that a computation changes in modules besides parameters.

    These are attributes, also deep inside of lists, dicts and objects, the modules' parts by name,
    hooks of modules and of parameters, and the numbers of buffers that are changed in place.

    Args:
        parts: All modules, and other objects.
        loaded: Buffers whose numbers the caller loads and restores: those of clients' own models.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> guard = ValueGuard([Part("", layer)])
        >>> layer.calls, layer.running_mean = [1], torch.ones(1)
        >>> guard.restore()
        ['running_mean', 'calls']
        >>> hasattr(layer, "calls"), layer.running_mean
        (False, tensor([0.]))
    """

    def __init__(self, parts: Iterable[Part], loaded: Iterable[Tensor] = ()) -> None:
        self._loaded = {*map(id, loaded)}
        self._dicts: list[_DictBefore] = []
        self._containers: dict[int, tuple[str, Any, Any]] = {}
        self._buffers: dict[int, _BufferBefore] = {}
        self._gradient_hooks: dict[int, _GradientHooksBefore] = {}
        parts = list(parts)
        tensors = [tensor for part in parts for _, tensor in own_tensors(part.owner)]
        self._registered = {*map(id, tensors), *(id(part.owner) for part in parts)}
        for part in parts:
            self._note_module(part)
            if part.ignored is not None and not part.is_outside:
                attributes = vars(part.owner)
                self._dicts.append(
                    _DictBefore(part.name, attributes, dict(attributes), part.all_ignored)
                )
                for name, value in part.attributes().items():
                    if not _is_immutable(value):
                        self._note(name, value)

    def _note_module(self, part: Part) -> None:
        """Note the parts and the hooks of a module, and copy its buffers."""
        owner = part.owner
        if not isinstance(owner, nn.Module):
            return
        for values in (owner._parameters, owner._buffers, owner._modules):
            if values:
                self._dicts.append(_DictBefore(part.name, values, dict(values), frozenset()))
        for name in _HOOKS:
            if (hooks := vars(owner).get(name)) is not None:
                prefix = join_names(part.name, name)
                self._dicts.append(_DictBefore(prefix, hooks, dict(hooks), frozenset()))
        self._note_tensors(part.name, owner)

    def _note_tensors(self, prefix: str, owner: nn.Module) -> None:
        """Note the hooks of a module's parameters, and copy its buffers."""
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in self._gradient_hooks:
                before = _GradientHooksBefore(join_names(prefix, name), parameter)
                self._gradient_hooks[id(parameter)] = before
        for name, buffer in owner._buffers.items():
            if buffer is None or id(buffer) in self._loaded:
                continue
            if id(buffer) not in self._buffers:
                self._buffers[id(buffer)] = _BufferBefore(join_names(prefix, name), buffer)

    def _note(self, name: str, value: Any) -> None:
        """Copy the containers and objects in a value, without what modules have registered."""
        stack = [value]
        visited: dict[int, Any] = {}  # the values too: their ids must not be used again
        while stack and len(self._containers) < _MAX_CONTAINERS and len(visited) < _MAX_VALUES:
            value = stack.pop()
            place = id(value)
            if place in self._registered or place in self._containers or place in visited:
                continue
            before = _copy_mutable(value)
            if before is not None:
                self._containers[place] = (name, value, before)
                if isinstance(value, dict | list | set | deque) and hasattr(value, "__dict__"):
                    stack.append(vars(value))  # of a user's own kind of container
            held = None if is_unread(value) else contents(value)
            if held is not None:
                visited[place] = value
                stack += held.values

    def restore(self) -> list[str]:
        """Restore all values, and return the names of the changed ones."""
        changed: list[str] = []
        for values in self._dicts:
            changed += values.restore()
        for name, container, before in self._containers.values():
            if _restore_mutable(container, before):
                changed.append(name)
        changed += [hooks.name for hooks in self._gradient_hooks.values() if hooks.restore()]
        with torch.no_grad():
            changed += [buffer.name for buffer in self._buffers.values() if buffer.restore()]
        return list(dict.fromkeys(changed))


def _is_immutable(value: Any) -> bool:
    """Return whether a value is a number, a string, or a tuple of these."""
    plain = (int, float, str, type(None))
    return isinstance(value, plain) or (
        isinstance(value, tuple) and all(isinstance(entry, plain) for entry in value)
    )


_MAX_CONTAINERS = 1 << 14
_MAX_VALUES = 1 << 16  # values that hold others, in one attribute
_MISSING = object()


@dataclass(frozen=True)
class _DictBefore:
    """A dict of a module's values, and a copy from before a computation."""

    prefix: str
    values: dict[str, Any]
    before: dict[str, Any]
    ignored: frozenset[str]

    def restore(self) -> list[str]:
        """Restore the values that are other objects, and return their names."""
        values, before = self.values, self.before
        if len(values) == len(before) and all(map(is_, values.values(), before.values())):
            return []
        changed = []
        for name in dict.fromkeys((*before, *values)):
            if name in self.ignored or values.get(name, _MISSING) is before.get(name, _MISSING):
                continue
            changed.append(join_names(self.prefix, str(name)))
            if name in before:
                values[name] = before[name]
            else:
                del values[name]
        return changed


class _GradientHooksBefore:
    """The hooks on a parameter's gradient, from before a computation."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self._parameter = parameter
        self._before = self._read()

    def restore(self) -> bool:
        """Restore the hooks, and return whether they have changed."""
        if self._read() == self._before:
            return False
        for hooks, before in zip(list_gradient_hooks(self._parameter), self._before):
            hooks.clear()
            hooks.update(before)
        return True

    def _read(self) -> list[dict[Any, Any]]:
        return [dict(hooks) for hooks in list_gradient_hooks(self._parameter)]


class _BufferBefore:
    """A buffer, and a copy from before a computation."""

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name = name
        self._buffer = buffer
        self._own = buffer.detach()  # the buffer's place in memory
        self._copy = self._own.clone()
        self._version = version_of(buffer)

    def restore(self) -> bool:
        """Restore a buffer that has been changed, and return whether it has.

        BatchNorm changes its statistics without counting a version. The numbers of a very large
        buffer, which is as a rule a constant, are compared only if another operation counts one.
        """
        buffer, own = self._buffer, self._own
        if buffer.data_ptr() != own.data_ptr():
            buffer.data = own
        elif version_of(buffer) == self._version and (
            own.numel() > _MAX_COMPARED or own.equal(self._copy)
        ):
            return False
        own.copy_(self._copy)
        self._version = version_of(buffer)
        return True


_MAX_COMPARED = 1 << 16  # numbers of a buffer


def _copy_mutable(value: Any) -> Any:
    """Return a copy of the values in a container, an object or a generator; ``None`` for others."""
    if isinstance(value, dict | list | set | deque):
        return list(value.items()) if isinstance(value, dict) else list(value)
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _MAX_COPIED and value.flags.writeable else None
    if isinstance(value, Tensor):
        is_small = value.numel() <= _MAX_COPIED and value.is_leaf
        return (version_of(value), value.detach().clone()) if is_small else None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, type) or is_unread(value) or package_of(value) == "torch":
        return None
    attributes = attributes_of(value)
    return attributes if attributes or hasattr(value, "__dict__") else None


_MAX_COPIED = 1 << 20  # numbers of an array


def _restore_mutable(value: Any, before: Any) -> bool:
    """Restore the values of :func:`_copy_mutable`, and return whether any has changed."""
    if isinstance(value, dict):
        return _restore_entries(value, before)
    if isinstance(value, set):
        changed = bool(value != set(before))
        if changed:
            value.clear()
            value.update(before)
        return changed
    if isinstance(value, list | deque):
        changed = len(value) != len(before) or not all(map(is_, value, before))
        if changed:
            value.clear()
            value.extend(before)
        return changed
    if isinstance(value, np.ndarray):
        changed = bool(value.tobytes() != before.tobytes())
        value[...] = before
        return changed
    if isinstance(value, Tensor):
        return _restore_tensor(value, *before)
    return _restore_state(value, before)


def _restore_tensor(tensor: Tensor, version: int, before: Tensor) -> bool:
    """Restore a tensor that no module has registered."""
    if version_of(tensor) == version and torch.equal(tensor, before):
        return False
    with torch.no_grad():
        changed = not torch.equal(tensor, before)
        tensor.data.copy_(before)
    return changed


def _restore_entries(values: dict[Any, Any], before: list[tuple[Any, Any]]) -> bool:
    """Restore the entries of a dict."""
    if len(values) == len(before) and all(
        key is old_key and value is old
        for (key, value), (old_key, old) in zip(values.items(), before)
    ):
        return False
    values.clear()
    values.update(before)
    return True


def _restore_state(value: Any, before: Any) -> bool:
    """Restore a generator or an object with attributes."""
    if isinstance(value, random.Random):
        changed = bool(value.getstate() != before)
        value.setstate(before)
        return changed
    if isinstance(value, torch.Generator):
        changed = not torch.equal(value.get_state(), before)
        value.set_state(before)
        return changed
    if isinstance(value, np.random.Generator):
        changed = repr(value.bit_generator.state) != repr(before)
        value.bit_generator.state = before
        return changed
    if isinstance(value, np.random.RandomState):
        changed = repr(value.get_state(legacy=False)) != repr(before)
        value.set_state(before)
        return changed
    return _restore_attributes(value, before)


def _restore_attributes(value: Any, before: dict[str, Any]) -> bool:
    """Restore the attributes of an object, also those of slots."""
    own = vars(value) if hasattr(value, "__dict__") else {}
    slots = {name: v for name, v in attributes_of(value).items() if name not in own}
    slots_before = {name: v for name, v in before.items() if _is_slot(value, name)}
    changed = False
    for name in dict.fromkeys((*slots, *slots_before)):
        if slots.get(name, _MISSING) is slots_before.get(name, _MISSING):
            continue
        changed = True
        if name in slots_before:
            object.__setattr__(value, name, slots_before[name])
        else:
            object.__delattr__(value, name)
    if not hasattr(value, "__dict__"):
        return changed
    entries = [(name, v) for name, v in before.items() if name not in slots_before]
    return _restore_entries(own, entries) or changed


def _is_slot(value: Any, name: str) -> bool:
    """Return whether an attribute of an object has a slot of its class."""
    return isinstance(getattr(type(value), name, None), types.MemberDescriptorType)
