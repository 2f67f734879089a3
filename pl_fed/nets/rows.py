"""A model as a flat row, and its parameters as views on it."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class RowLayout:
    """Where each tensor of a model lies in its row.

    Attributes:
        names: Names of the tensors, in the order in which they lie.
        shapes: Their shapes.
        offsets: Where each begins; one more entry than names, the last being the row's length.

    Example:
        >>> layout = RowLayout.of_parameters(nn.Linear(2, 3))
        >>> layout.numel, layout.views(torch.zeros(5, 9))["weight"].shape
        (9, torch.Size([5, 3, 2]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> "RowLayout":
        """Lay out named tensors one behind the other."""
        names, shapes, offsets = [], [], [0]
        for name, tensor in tensors:
            names.append(name)
            shapes.append(tensor.shape)
            offsets.append(offsets[-1] + tensor.numel())
        return cls(tuple(names), tuple(shapes), tuple(offsets))

    @classmethod
    def of_parameters(cls, module: nn.Module) -> "RowLayout":
        """Lay out the trainable parameters: a frozen part is in no row."""
        return cls.of(trainable_parameters(module).items())

    @classmethod
    def of_buffers(cls, module: nn.Module) -> "RowLayout":
        """Lay out the running statistics: see :func:`running_statistics`."""
        return cls.of(running_statistics(module).items())

    @property
    def numel(self) -> int:
        """Length of the row."""
        return self.offsets[-1]

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the tensors that lie in a row, or in many.

        Args:
            row: Shape [..., numel].

        Returns:
            Views of shape [..., *shape] by name.
        """
        return {
            name: row[..., begin:end].unflatten(-1, shape) if shape else row[..., begin]
            for name, shape, begin, end in zip(
                self.names, self.shapes, self.offsets[:-1], self.offsets[1:]
            )
        }

    def positions(self, *parts: str) -> Tensor:
        """Return where in a row some of the tensors lie, int64 [their numbers].

        Args:
            *parts: Names of tensors, or of submodules that hold them.

        Raises:
            ValueError: If a part holds none.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
            >>> RowLayout.of_parameters(net).positions("1")
            tensor([3, 4])
        """
        chosen = torch.zeros(self.numel, dtype=torch.bool)
        for part in parts:
            found = [i for i, n in enumerate(self.names) if n == part or n.startswith(f"{part}.")]
            if not found:
                raise ValueError(
                    f"Expected argument `parts` to name some of {', '.join(self.names)}, or what"
                    f" holds them, but got {part!r}."
                )
            for i in found:
                chosen[self.offsets[i] : self.offsets[i + 1]] = True
        return chosen.nonzero().flatten()

    def pieces(self, row: Tensor) -> list[Tensor]:
        """Return the same of ONE row that has a storage of its own, quickly.

        Args:
            row: Shape [numel], beginning where its storage does.
        """
        return [row.as_strided(shape, stride, offset) for shape, stride, offset in self._places]

    @cached_property
    def _places(self) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        return [
            (shape, torch.empty(shape, device="meta").stride(), offset)
            for shape, offset in zip(self.shapes, self.offsets)
        ]


class Row:
    """The row of one module, on which its parameters (or running statistics) are views.

    Writing to ``Row.data`` changes the module, and training the module changes the row: loading a
    client is one copy. Moving the module elsewhere breaks the tie. :attr:`data` mends it for
    parameters; buffers are other tensors then, and need a row of their own.

    Args:
        tensors: The module's own tensors by name.
        layout: Where they lie.
    """

    def __init__(self, tensors: Mapping[str, Tensor], layout: RowLayout) -> None:
        self.tensors = dict(tensors)
        self.layout = layout
        self._row: Tensor | None = None

    @property
    def data(self) -> Tensor:
        """The row, shape [numel]: made anew if the module's tensors no longer lie in it."""
        if self._row is None or not self._tied(self._row):
            with torch.inference_mode(False), torch.no_grad():
                pieces = [tensor.detach().reshape(-1) for tensor in self.tensors.values()]
                row = torch.cat(pieces) if pieces else torch.empty(0)
                for name, view in self.layout.views(row).items():
                    self.tensors[name].data = view
            self._row = row
        return self._row

    @property
    def example(self) -> Tensor:
        """A tensor of the row's dtype and device, without a look at all of them."""
        return next(iter(self.tensors.values()))

    def is_of(self, module: nn.Module) -> bool:
        """Return whether its tensors are still the module's own, by their names."""
        try:
            return all(get(module) is tensor for get, tensor in self._places)
        except AttributeError:
            return False

    @cached_property
    def _places(self) -> list[tuple[Callable[[nn.Module], object], Tensor]]:
        return [(attrgetter(name), tensor) for name, tensor in self.tensors.items()]

    def _tied(self, row: Tensor) -> bool:
        begin, size, dtype = row.data_ptr(), row.element_size(), row.dtype
        for tensor, offset in self._offsets:  # a loop, as a round asks many times
            if tensor.data_ptr() != begin + size * offset or tensor.dtype != dtype:
                return False
        return True

    @cached_property
    def _offsets(self) -> list[tuple[Tensor, int]]:
        """The tensors that hold any number, and where they begin in the row."""
        pairs = zip(self.tensors.values(), self.layout.offsets)
        return [(tensor, offset) for tensor, offset in pairs if tensor.numel()]


_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def usable_rows(rows: object, shape: tuple[int, int], like: Tensor) -> Tensor | None:
    """Return rows in the dtype of another tensor, or ``None`` if they cannot be used.

    Usable are dense tensors of a shape, on the other tensor's device. Where that is of a floating
    dtype, rows may be of another floating precision; else they must be of its very dtype: a cast
    would make other numbers of booleans, integers and complex numbers.

    Args:
        rows: Anything.
        shape: The shape that they must have.
        like: A tensor of the dtype that is wanted, on the device where it is wanted.

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
    if rows.dtype not in (_REAL if like.is_floating_point() else (like.dtype,)):
        return None
    return rows.detach().to(like.dtype)


def finite_rows(rows: Tensor) -> Tensor:
    """Return which rows hold finite numbers only, bool [n].

    Example:
        >>> finite_rows(torch.tensor([[0.0, 1.0], [torch.inf, -torch.inf], [3e38, 3e38]]))
        tensor([ True, False,  True])
    """
    if rows.is_cuda:  # the branch below would wait for it
        return rows.isfinite().all(dim=1)
    # a finite sum has finite terms, and takes 3 % of the time
    finite = rows.sum(dim=1).abs() < math.inf
    if not finite.all():
        finite = rows.isfinite().all(dim=1)
    return finite


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name; shared ones once.

    Raises:
        ValueError: If there is none, or if they have several dtypes.
    """
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if lazy := [name for name, p in found.items() if is_lazy(p)]:
        raise ValueError(
            "Expected argument `net` to have parameters of known shapes but got lazy ones"
            f" ({', '.join(lazy)}): run it once on an input before."
        )
    if not found:
        raise ValueError(
            "Expected argument `net` to have at least one parameter with requires_grad=True but"
            f" got {type(module).__name__} with none."
        )
    dtypes = {parameter.dtype for parameter in found.values()}
    if len(dtypes) > 1:
        raise ValueError(
            "Expected argument `net` to have trainable parameters of one dtype but got"
            f" {sorted(map(str, dtypes))}."
        )
    return found


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers that training may change, by name.

    These are the buffers that are saved with the module and are not in a frozen part: BatchNorm's
    running mean and variance, as a rule.
    """
    return {
        name: buffer
        for owner, name, buffer in _unfrozen_buffers(module)
        if buffer.is_floating_point()
        and name.rpartition(".")[2] not in owner._non_persistent_buffers_set
    }


def counters(module: nn.Module) -> dict[str, Tensor]:
    """Return the integer buffers that training may change, by name: BatchNorm's, as a rule."""
    return {n: b for _, n, b in _unfrozen_buffers(module) if not b.is_floating_point()}


def unkept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that training may change and no row holds, by name.

    Those of integers, and those that are not saved with the module, most of them constants.
    """
    kept = running_statistics(module)
    return {name: each for _, name, each in _unfrozen_buffers(module) if name not in kept}


def _unfrozen_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    frozen = {part for whole in frozen_modules(module) for part in whole.modules()}
    for prefix, owner in module.named_modules():
        if owner not in frozen:
            for name, buffer in owner.named_buffers(recurse=False):
                yield owner, f"{prefix}.{name}" if prefix else name, buffer


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the largest submodules that have parameters, none of which can be trained."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [frozen for child in module.children() for frozen in frozen_modules(child)]


def copy_trainable(module: nn.Module) -> nn.Module:
    """Return a copy that shares every frozen submodule and parameter with the original."""
    shared: dict[int, object] = {id(frozen): frozen for frozen in frozen_modules(module)}
    shared |= {id(p): p for p in module.parameters() if not p.requires_grad}
    return copy.deepcopy(module, shared)
