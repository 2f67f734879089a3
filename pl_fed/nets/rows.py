"""Models as flat rows, whose parameters are views on them."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pl_fed.nets.gradient_hooks import copy_gradient_hooks


@dataclass(frozen=True)
class RowLayout:
    """Layout of a row: the position of each tensor of a model in it.

    Attributes:
        names: Names of the tensors, in the order of the row.
        shapes: Shapes of the tensors.
        offsets: The first position of each tensor, and at the end the length of the row.

    Example:
        >>> layout = RowLayout.from_parameters(nn.Linear(2, 3))
        >>> layout.numel, layout.views(torch.zeros(5, 9))["weight"].shape
        (9, torch.Size([5, 3, 2]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]

    @classmethod
    def from_tensors(cls, tensors: Iterable[tuple[str, Tensor]]) -> "RowLayout":
        """Place named tensors one behind the other."""
        names, shapes, offsets = [], [], [0]
        for name, tensor in tensors:
            names.append(name)
            shapes.append(tensor.shape)
            offsets.append(offsets[-1] + tensor.numel())
        return cls(tuple(names), tuple(shapes), tuple(offsets))

    @classmethod
    def from_parameters(cls, module: nn.Module) -> "RowLayout":
        """Place the trainable parameters; frozen parameters are in no row."""
        return cls.from_tensors(trainable_parameters(module).items())

    @classmethod
    def from_buffers(cls, module: nn.Module) -> "RowLayout":
        """Place the running statistics; see :func:`running_statistics`."""
        return cls.from_tensors(running_statistics(module).items())

    @property
    def numel(self) -> int:
        """Length of the row."""
        return self.offsets[-1]

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors of one row or many rows.

        Args:
            row: Shape [..., numel].

        Returns:
            Views of shape [..., *shape] by name.
        """
        batch = row.shape[:-1]
        return {
            name: row[..., begin:end].view((*batch, *shape))
            for name, shape, begin, end in zip(
                self.names, self.shapes, self.offsets[:-1], self.offsets[1:]
            )
        }

    def positions(self, *parts: str) -> Tensor:
        """Return the positions of some tensors in a row, int64 [their numbers].

        Args:
            *parts: Names of tensors, or of submodules with tensors.

        Raises:
            ValueError: If a part has no tensor.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
            >>> RowLayout.from_parameters(net).positions("1")
            tensor([3, 4])
        """
        mask = torch.zeros(self.numel, dtype=torch.bool)
        for part in parts:
            members = [
                index
                for index, name in enumerate(self.names)
                if name == part or name.startswith(f"{part}.")
            ]
            if not members:
                raise ValueError(
                    f"Expected argument `parts` to name some of {', '.join(self.names)}, or their"
                    f" submodules, but got {part!r}."
                )
            for index in members:
                mask[self.offsets[index] : self.offsets[index + 1]] = True
        return mask.nonzero().flatten()

    def pieces(self, row: Tensor) -> list[Tensor]:
        """Return views of the tensors of ONE row with its own storage, faster than :meth:`views`.

        Args:
            row: Shape [numel]. It begins where its storage begins.

        Returns:
            Views in the order of the row.
        """
        return [row.as_strided(shape, stride, offset) for shape, stride, offset in self._strides]

    @cached_property
    def _strides(self) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        return [
            (shape, torch.empty(shape, device="meta").stride(), offset)
            for shape, offset in zip(self.shapes, self.offsets)
        ]


class Row:
    """The row of one module: its parameters or running statistics are views on it.

    Writing to ``Row.data`` changes the module, and training the module changes the row. Therefore
    one copy loads a client. If the module moves to another device or dtype, its tensors no longer
    lie in the row. For parameters, :attr:`data` builds a new row. Buffers become other tensors, and
    need a new ``Row``.

    Args:
        tensors: The module's own tensors by name.
        layout: The positions of the tensors in the row.
        neighbor: A tensor of the module; a row without tensors has its dtype and device.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layout: RowLayout,
        neighbor: Tensor | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.layout = layout
        self._neighbor = neighbor
        self._row: Tensor | None = None

    @property
    def data(self) -> Tensor:
        """The row, shape [numel]; it is rebuilt if the module's tensors no longer lie in it."""
        if not self.tensors:
            return torch.empty(0) if self._neighbor is None else self._neighbor.new_empty(0)
        if self._row is None or not self._contains_tensors(self._row):
            with torch.inference_mode(False), torch.no_grad():
                pieces = [tensor.detach().reshape(-1) for tensor in self.tensors.values()]
                row = torch.cat(pieces)
                for name, view in self.layout.views(row).items():
                    self.tensors[name].data = view
            self._row = row
        return self._row

    @property
    def example(self) -> Tensor:
        """A tensor with the row's dtype and device, returned without a check of all tensors."""
        return next(iter(self.tensors.values()))

    def belongs_to(self, module: nn.Module) -> bool:
        """Return whether the module still has these tensors under these names."""
        try:
            return all(get(module) is tensor for get, tensor in self._getters)
        except AttributeError:
            return False

    @cached_property
    def _getters(self) -> list[tuple[Callable[[nn.Module], object], Tensor]]:
        return [(attrgetter(name), tensor) for name, tensor in self.tensors.items()]

    def _contains_tensors(self, row: Tensor) -> bool:
        begin, size, dtype = row.data_ptr(), row.element_size(), row.dtype
        for tensor, offset in self._offsets:  # a plain loop, because a round calls this often
            if tensor.data_ptr() != begin + size * offset or tensor.dtype != dtype:
                return False
        return True

    @cached_property
    def _offsets(self) -> list[tuple[Tensor, int]]:
        """The tensors that are not empty, with their first positions in the row."""
        pairs = zip(self.tensors.values(), self.layout.offsets)
        return [(tensor, offset) for tensor, offset in pairs if tensor.numel()]


_FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def usable_rows(rows: object, shape: tuple[int, int], like: Tensor) -> Tensor | None:
    """Return rows in the dtype of another tensor, or ``None`` if they are unusable.

    Rows are usable if they are a dense tensor of the given shape on the other tensor's device. If
    ``like`` has a floating dtype, the rows may have another floating precision. Otherwise their
    dtype must be equal: a cast would change booleans, integers and complex numbers.

    Args:
        rows: Anything.
        shape: The shape of usable rows.
        like: A tensor with the dtype and the device of usable rows.

    Example:
        >>> usable_rows(torch.ones(1, 2).double(), (1, 2), torch.zeros(1))
        tensor([[1., 1.]])
        >>> usable_rows(torch.ones(1, 2).bool(), (1, 2), torch.zeros(1)) is None
        True
    """
    if not isinstance(rows, Tensor) or rows.layout is not torch.strided or rows.is_nested:
        return None
    if rows.device != like.device or rows.shape != shape:
        return None
    if rows.dtype not in (_FLOATING_TYPES if like.is_floating_point() else (like.dtype,)):
        return None
    return rows.detach().to(like.dtype)


def finite_rows(rows: Tensor) -> Tensor:
    """Return a mask of the rows with finite numbers only, bool [n].

    Example:
        >>> finite_rows(torch.tensor([[0.0, 1.0], [torch.inf, -torch.inf], [3e38, 3e38]]))
        tensor([ True, False,  True])
    """
    if rows.is_cuda:  # the branch below would wait for the GPU
        return rows.isfinite().all(dim=1)
    # a finite sum has finite terms, and takes 3 % of the time
    finite = rows.sum(dim=1).abs() < math.inf
    if not finite.all():
        finite = rows.isfinite().all(dim=1)
    return finite


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name; shared parameters appear once.

    Raises:
        ValueError: If there is none, one has no shape yet or is complex, or they have several
            dtypes.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if lazy := [name for name, p in parameters.items() if is_lazy(p)]:
        raise ValueError(
            "Expected argument `net` to have parameters of known shapes but got lazy ones"
            f" ({', '.join(lazy)}): call the net once on an input before."
        )
    if not parameters:
        raise ValueError(
            "Expected argument `net` to have at least one parameter with requires_grad=True but"
            f" got {type(module).__name__} with none."
        )
    if pairs := [name for name, p in parameters.items() if p.is_complex()]:
        raise ValueError(
            "Expected argument `net` to have real parameters but got complex ones"
            f" ({', '.join(pairs)}): keep real and imaginary parts in a last dimension of 2, and"
            " join them in the forward pass by `torch.view_as_complex`."
        )
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1:
        raise ValueError(
            "Expected argument `net` to have trainable parameters of one dtype but got"
            f" {sorted(map(str, dtypes))}."
        )
    return parameters


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics: the floating-point buffers that training may change, by name.

    These buffers are saved with the module, and are neither in a frozen submodule nor weights of a
    loss nor marked by :func:`mark_infinite_buffers`. Usually they are
    BatchNorm's running means and variances.
    """
    return {
        name: buffer
        for owner, name, buffer in _unfrozen_buffers(module)
        if buffer.is_floating_point()
        and name.rpartition(".")[2] not in owner._non_persistent_buffers_set
        and name.rpartition(".")[2] not in vars(owner).get(_INFINITE, ())
    }


_INFINITE = "_infinite_buffers"


def mark_infinite_buffers(module: nn.Module) -> None:
    """Mark buffers that begin with infinity or NaN, in place: they are constants, in no row.

    A row, which clients upload and the server averages, has finite numbers only.

    Example:
        >>> net = nn.BatchNorm1d(2)
        >>> net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        >>> mark_infinite_buffers(net)
        >>> list(running_statistics(net))
        ['running_mean', 'running_var']
    """
    for owner in module.modules():
        names = [
            name
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.is_floating_point() and not bool(buffer.isfinite().all())
        ]
        if names:
            vars(owner)[_INFINITE] = names


def count_as_numbers(module: nn.Module) -> None:
    """Let norms without momentum count minibatches as a floating-point number, in place.

    Their running statistics are means over all minibatches and need the count. As a number it is
    one of the running statistics, so that clients keep it. Others need no count.

    Example:
        >>> norm = nn.BatchNorm1d(2, momentum=None)
        >>> count_as_numbers(norm)
        >>> list(running_statistics(norm)), norm.num_batches_tracked
        (['running_mean', 'running_var', 'num_batches_tracked'], tensor(0.))
    """
    for layer, count, mean in _mean_counts(module):
        layer.num_batches_tracked = count.to(mean.dtype)


def count_as_integers(module: nn.Module) -> None:
    """Undo :func:`count_as_numbers`, in place."""
    for layer, count, _ in _mean_counts(module):
        layer.num_batches_tracked = count.round().to(torch.int64)


def _mean_counts(module: nn.Module) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Yield each norm without momentum, with its count of minibatches and its running mean."""
    for layer in module.modules():
        count, mean = (getattr(layer, n, None) for n in ("num_batches_tracked", "running_mean"))
        counts = isinstance(count, Tensor) and getattr(layer, "momentum", 0.0) is None
        if counts and isinstance(mean, Tensor):
            yield layer, cast(Tensor, count), mean


def counters(module: nn.Module) -> dict[str, Tensor]:
    """Return the integer buffers that training may change, by name: BatchNorm's, as a rule."""
    return {n: b for _, n, b in _unfrozen_buffers(module) if not b.is_floating_point()}


def buffers_outside_rows(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that training may change and that are in no row, by name.

    These are integer buffers, and buffers that are not saved with the module; most of the latter
    are constants.
    """
    statistics = running_statistics(module)
    return {name: b for _, name, b in _unfrozen_buffers(module) if name not in statistics}


_LOSSES = (
    *(nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss),
)
"""Losses with weights in buffers. No training changes them."""


def _unfrozen_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    frozen = {part for submodule in frozen_modules(module) for part in submodule.modules()}
    for prefix, owner in module.named_modules():
        if owner not in frozen and not isinstance(owner, _LOSSES):
            for name, buffer in owner.named_buffers(recurse=False):
                yield owner, f"{prefix}.{name}" if prefix else name, buffer


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the largest submodules that have parameters but no trainable ones."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [frozen for child in module.children() for frozen in frozen_modules(child)]


def evaluation_parts(module: nn.Module) -> tuple[str, ...]:
    """Return the names of submodules in evaluation mode, if the module itself is in training mode.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
        >>> evaluation_parts(net), evaluation_parts(net.eval())
        (('1',), ())
    """
    if not module.training:
        return ()
    return tuple(name for name, part in module.named_modules() if not part.training)


def copy_trainable(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its frozen submodules and parameters.

    It has the hooks on the gradients of parameters, too.
    """
    shared: dict[int, object] = {id(frozen): frozen for frozen in frozen_modules(module)}
    shared |= {id(p): p for p in module.parameters() if not p.requires_grad}
    copied = copy.deepcopy(module, shared)
    copy_gradient_hooks(module, copied)
    return copied
