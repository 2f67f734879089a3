"""Trees of tensors: a tensor, or a tuple, list or dict of trees."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any
"""A tensor, or a tuple, list or dict of trees. Other leaves stay unchanged."""


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return a tree of the results of a function on each tensor of a tree.

    Args:
        function: Takes a tensor of the tree, and the corresponding tensor of each other tree.
        tree: The tree.
        *others: Other trees of the same structure.

    Example:
        >>> tree_map(len, {"ids": torch.zeros(2), "pair": (torch.zeros(3), None)})
        {'ids': 2, 'pair': (3, None)}
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, dict):
        return {k: tree_map(function, v, *(other[k] for other in others)) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        branches = [tree_map(function, *branch) for branch in zip(tree, *others)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return tree


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in their order.

    Example:
        >>> leaves({"a": torch.tensor(1), "b": [torch.tensor(2)]})
        [tensor(1), tensor(2)]
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    if isinstance(tree, tuple | list):
        return [leaf for branch in tree for leaf in leaves(branch)]
    return []


def clone(tree: Tree) -> Tree:
    """Return a tree with copies of the tensors."""
    return tree_map(Tensor.clone, tree)


def read_versions(tree: Tree) -> list[tuple[int, int]]:
    """Return what tells whether the tensors of a tree are replaced or changed in place meanwhile.

    Example:
        >>> batch = {"x": torch.zeros(1)}
        >>> before = read_versions(batch)
        >>> batch["x"] += 1
        >>> read_versions(batch) == before
        False
    """
    return [(id(leaf), leaf._version) for leaf in leaves(tree)]


def are_equal(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether two lists hold equal tensors, NaN at equal places; other values are ignored.

    Example:
        >>> are_equal([torch.tensor(torch.nan)], [torch.tensor(torch.nan)])
        True
    """
    values, others = list(values), list(others)
    return len(values) == len(others) and all(
        not isinstance(value, Tensor)
        or not isinstance(other, Tensor)
        or (value.shape == other.shape and torch.allclose(value, other, 0, 0, equal_nan=True))
        for value, other in zip(values, others)
    )


def foreign_leaf(tree: Tree) -> str | None:
    """Return the type of the first leaf other than a tensor, or empty branch; ``None`` without any.

    Example:
        >>> foreign_leaf({"a": torch.zeros(1), "b": 3})
        'int'
    """
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, dict | tuple | list) and tree:
        branches = tree.values() if isinstance(tree, dict) else tree
        return next(filter(None, map(foreign_leaf, branches)), None)
    return type(tree).__name__


def replace_leaves(tree: Tree, tensors: Iterator[Any]) -> Tree:
    """Return a tree of the same structure with other tensors, in the order of the tree."""
    return tree_map(lambda _: next(tensors), tree)


def count_samples(tree: Tree) -> int:
    """Return the number of samples of a tree: the length of its tensors."""
    first = tree if isinstance(tree, Tensor) else leaves(tree)[0]
    return first.shape[0]


def select(tree: Tree, index: Any) -> Tree:
    """Return a tree with ``leaf[index]`` of each tensor."""
    if isinstance(tree, Tensor):
        return tree[index]
    return tree_map(lambda leaf: leaf[index], tree)


def gather(tree: Tree, index: Tensor) -> Tree:
    """Return the rows of each tensor at positions ``index``, int64 [n], faster than ``select``."""
    if isinstance(tree, Tensor):
        return tree.index_select(0, index)
    return tree_map(lambda leaf: leaf.index_select(0, index), tree)


def count_sample_bytes(tree: Tree) -> int:
    """Return the number of bytes of one sample."""
    return sum(leaf[:1].nbytes for leaf in leaves(tree))


def split(tree: Tree, sizes: list[int]) -> Iterator[Tree]:
    """Return consecutive pieces of a tree, with ``sizes`` samples."""
    if isinstance(tree, Tensor):
        return iter(tree.split(sizes))
    pieces = [leaf.split(sizes) for leaf in leaves(tree)]
    return (replace_leaves(tree, iter(piece)) for piece in zip(*pieces))


def join(trees: Sequence[Tree]) -> Tree:
    """Return one tree with the concatenated tensors of several trees."""
    first, *others = trees
    return tree_map(lambda *pieces: torch.cat(pieces), first, *others)


def describe(tree: Tree) -> Any:
    """Return the shapes and dtypes of one sample as text.

    Example:
        >>> describe(torch.zeros(5, 2)), describe({"a": torch.zeros(5, 1)})
        ('[2] (torch.float32)', '{a: [1] (torch.float32)}')
    """
    if isinstance(tree, Tensor):
        return f"{list(tree.shape[1:])} ({tree.dtype})"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{name}: {describe(branch)}' for name, branch in tree.items())}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(describe(branch) for branch in tree)})"
    return type(tree).__name__
