"""Data of one's own: an ``.npz`` file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pl_fed.data.source import Arrays, DataSource, classes_of


class Npz(DataSource):
    """Arrays from an ``.npz`` file: the way to bring one's own data.

    The file holds, under these names (``numpy.savez("mine.npz", x=..., y=..., client=...)``):

    - ``x`` [samples, ...]: inputs. Images are [samples, channels, height, width]; uint8 is scaled
      from 0..255 to [0, 1], any other type becomes float32 as it is.
    - ``y`` [samples]: class ids 0..C-1 as integers; or real-valued targets as floats.
    - ``client`` [samples], optional: whose sample it is, any integers. Then no partitioner is
      needed; sorted, the ids become clients 0, 1, 2, ...
    - ``split`` [samples], optional: 0 train, 1 val, 2 test. It is used with
      ``data.split: official``; else each client's samples are cut by the fractions.

    Args:
        path: The file.
        num_classes: Number of classes; ``None`` takes the largest class id + 1.

    Example:
        >>> import tempfile, numpy
        >>> path = tempfile.mkdtemp() + "/mine.npz"
        >>> numpy.savez(path, x=numpy.zeros((4, 2), "float32"), y=[0, 1, 1, 0], client=[7, 7, 9, 9])
        >>> Npz(path).load().client.tolist()
        [7, 7, 9, 9]
    """

    def __init__(self, path: str, num_classes: int | None = None) -> None:
        self.path = path
        self.num_classes = num_classes

    def load(self) -> Arrays:
        """Return the file's arrays.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file cannot be read, or an array is missing, of a wrong shape or
                type, or has numbers that are NaN, infinite or out of range.
        """
        tensors = self._read()
        for name in ("x", "y"):
            if name not in tensors:
                raise ValueError(
                    f"Expected {self.path} to hold an array `{name}` but got"
                    f" {sorted(tensors) or 'none of x, y, client, split'}."
                )
        classes = self.num_classes
        if classes is None:
            classes = classes_of(tensors["y"])
        try:
            return Arrays(**tensors, num_classes=classes)
        except ValueError as error:
            raise ValueError(f"{str(error).removesuffix('.')} in {self.path}.") from error

    def _read(self) -> dict[str, Tensor]:
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"Expected argument `path` to be an .npz file but found none at {path.absolute()}:"
                " write one with numpy.savez(path, x=inputs, y=labels)."
            )
        try:
            with np.load(path, allow_pickle=False) as file:
                known = [name for name in ("x", "y", "client", "split") if name in file.files]
                return {name: _tensor(name, file[name]) for name in known}
        except Exception as error:
            raise ValueError(
                f"Expected {self.path} to be an .npz file of arrays of numbers but got"
                f" {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error


def _tensor(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` is of type {array.dtype}.")
    if array.dtype.kind in "iu" and name != "x":
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(np.ascontiguousarray(array))
