"""Columns whose values float32 would merge, such as times in seconds since 1970."""

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.trees import Tree, leaves

_EXACT = 1 << 24  # float32 has all integers up to it
_MERGED = 0.01  # share of different values that become equal to others


def warn_of_rounding(inputs: Tree, names: Sequence[str]) -> None:
    """Warn of columns of inputs that have far fewer different values in float32.

    Args:
        inputs: The inputs of all samples; float64 tensors [samples, columns] are checked.
        names: The names of the columns, if the inputs have as many.
    """
    for leaf in leaves(inputs):
        if leaf.dim() != 2 or leaf.dtype != torch.float64 or not len(leaf):
            continue
        is_large = torch.maximum(leaf.amax(0), -leaf.amin(0)) > _EXACT
        for column in is_large.nonzero().flatten().tolist():
            before, after = _count_different(leaf[:, column])
            if after < (1 - _MERGED) * before:
                name = repr(names[column]) if len(names) == leaf.shape[1] else f"{column}"
                rank_zero_warn(
                    f"Column {name} of the inputs has {before} different values but {after} in"
                    " float32, which pl_fed computes in: subtract a number such as their smallest"
                    " value from such large ones, or set `trainer.precision` to 64-true."
                )


def _count_different(values: Tensor) -> tuple[int, int]:
    """Return the number of different values, and of those that float32 tells apart."""
    different = values.unique()
    return len(different), len(different.to(torch.float32).unique())
