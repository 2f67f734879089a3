"""Data of one's own: an ``.npz`` file."""

from pathlib import Path

import numpy as np
import torch

from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays, DataSource, count_classes


class Npz(DataSource):
    """Arrays from an ``.npz`` file: the way to bring one's own data.

    The file holds, under these names (``numpy.savez("mine.npz", x=..., y=..., client=...)``):

    - ``x`` [samples, ...]: inputs. Images are [samples, channels, height, width]; uint8 is scaled
      from 0..255 to [0, 1], any other type becomes float32 as it is.
    - ``y`` [samples]: class ids 0..C-1 as integers; or as floats real-valued targets, or labels of
      which a sample may have several [samples, labels].
    - ``client`` [samples], optional: whose sample it is, any integers or strings. Then no
      partitioner is needed; sorted, the ids become clients 0, 1, 2, ...
    - ``split`` [samples], optional: 0 train, 1 val, 2 test. It is used unless
      ``data.split: own`` is set; without it each client's samples are cut by the fractions.

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
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"Expected argument `path` to be an .npz file but found none at {path.absolute()}:"
                " write one with numpy.savez(path, x=inputs, y=targets, client=owners), without"
                " client if there is a partitioner; a shipped config says in its comment where its"
                " data come from."
            )
        arrays = read_npz(path, ("x", "y"), ("client", "split"), texts=("client",))
        names = None
        if "client" in arrays and arrays["client"].dtype.kind == "U":
            owners, arrays["client"] = np.unique(arrays["client"], return_inverse=True)
            names = owners.tolist()
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        classes = count_classes(tensors["y"]) if self.num_classes is None else self.num_classes
        inputs, targets = tensors.pop("x"), tensors.pop("y")
        with report_read_errors(path, "samples", {"inputs": "x", "targets": "y"}):
            return Arrays(inputs, targets, **tensors, num_classes=classes, names=names)
