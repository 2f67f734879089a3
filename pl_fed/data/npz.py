"""Data of one's own: an ``.npz`` file."""

from pathlib import Path

import numpy as np
import torch

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
            ValueError: If the file cannot be read, or an array is missing or of a wrong shape.
        """
        arrays = self._read()
        for name in ("x", "y"):
            if name not in arrays:
                raise ValueError(
                    f"Expected {self.path} to hold an array `{name}` but got {sorted(arrays)}."
                )
        samples = len(arrays["x"]) if arrays["x"].ndim else 0
        if samples == 0:
            raise ValueError(f"Expected `x` in {self.path} to hold samples but got none.")
        for name in arrays:
            if arrays[name].shape[:1] != (samples,):
                raise ValueError(
                    f"Expected `{name}` in {self.path} to have {samples} rows, as many as `x`, but"
                    f" got shape {arrays[name].shape}."
                )
        return self._checked(arrays)

    def _read(self) -> dict[str, np.ndarray]:
        if not Path(self.path).is_file():
            raise FileNotFoundError(
                f"Expected argument `path` to be an .npz file but found none at"
                f" {Path(self.path).absolute()}: write one with"
                " numpy.savez(path, x=inputs, y=labels)."
            )
        try:
            with np.load(self.path, allow_pickle=False) as file:
                known = [name for name in ("x", "y", "client", "split") if name in file.files]
                return {name: file[name] for name in known}
        except Exception as error:
            raise ValueError(
                f"Expected {self.path} to be a readable .npz file of plain arrays but got"
                f" {type(error).__name__}: {error}"
            ) from error

    def _checked(self, arrays: dict[str, np.ndarray]) -> Arrays:
        for name in ("client", "split"):
            if name in arrays and not np.issubdtype(arrays[name].dtype, np.integer):
                raise ValueError(
                    f"Expected `{name}` in {self.path} to be integers but got {arrays[name].dtype}."
                )
        if "split" in arrays and not np.isin(arrays["split"], (0, 1, 2)).all():
            raise ValueError(
                f"Expected `split` in {self.path} to be 0 (train), 1 (val) or 2 (test) but got"
                f" {np.unique(arrays['split']).tolist()}."
            )
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        y = tensors["y"]
        if not y.is_floating_point():
            if y.dim() != 1:
                raise ValueError(
                    f"Expected class ids `y` in {self.path} to have shape [samples] but got"
                    f" {list(y.shape)}."
                )
            y = y.to(torch.int64)
        classes = classes_of(y)
        if self.num_classes is not None and classes > self.num_classes:
            raise ValueError(
                f"Expected class ids `y` in {self.path} to be below `num_classes`"
                f" ({self.num_classes}) but got {classes - 1}."
            )
        return Arrays(
            tensors["x"],
            y,
            tensors.get("client"),
            tensors.get("split"),
            self.num_classes if self.num_classes is not None and classes else classes,
        )
