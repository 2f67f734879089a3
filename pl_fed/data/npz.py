"""Your own data from an ``.npz`` file."""

from pathlib import Path

import numpy as np
import torch

from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays, DataSource, count_classes


class Npz(DataSource):
    """Npz: your own data from an ``.npz`` file.

    Write it with ``numpy.savez("mine.npz", x=..., y=..., client=...)``. The arrays:

    - ``x`` [samples, ...]: inputs. Images are [samples, channels, height, width]. uint8 is scaled
      from 0..255 to [0, 1]; any other type becomes float32 with the same values.
    - ``y``: class ids 0..C-1 as integers [samples]; real-valued targets as floats [samples, ...];
      or multi-label targets as floats [samples, labels].
    - ``client`` [samples], optional: the owner of each sample, as integers or strings. No
      partitioner is needed then. Sorted, the ids become clients 0, 1, 2, ...
    - ``split`` [samples], optional: 0 train, 1 val, 2 test. Set ``data.split: own`` to ignore it.
      Without it, each client's samples are cut by the fractions.
    - ``labels`` [samples], optional: the class of each sample for partitioners, as integers, if
      ``y`` is not a class id.
    - ``group`` [samples], optional: the group of each sample, as integers from 0 or strings:
      evaluations then measure gaps between groups.

    Args:
        path: The path of the file.
        num_classes: Number of classes; 0 if integer targets are no class ids. ``None`` uses the
            largest class id + 1.

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
            FileNotFoundError: If there is no file at the path.
            ValueError: If the file cannot be read, an array is missing or has a wrong shape or
                type, or a number is NaN, infinite or out of range.
        """
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"Expected argument `path` to be an .npz file but found none at {path.absolute()}:"
                " write it with numpy.savez(path, x=inputs, y=targets, client=owners), without"
                " client if there is a partitioner; a comment in each shipped config names the"
                " source of its data."
            )
        optional = ("client", "split", "labels", "group")
        arrays = read_npz(path, ("x", "y"), optional, texts=("client", "group"))
        names: dict[str, list[str]] = {}
        for name in ("client", "group"):
            if name in arrays and arrays[name].dtype.kind == "U":
                values, arrays[name] = np.unique(arrays[name], return_inverse=True)
                names[name] = values.tolist()
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        classes = count_classes(tensors["y"]) if self.num_classes is None else self.num_classes
        client, split, labels = (tensors.get(name) for name in ("client", "split", "labels"))
        with report_read_errors(path, "samples", {"inputs": "x", "targets": "y"}):
            return Arrays(
                tensors["x"],
                tensors["y"],
                client,
                split,
                classes,
                names.get("client"),
                labels,
                groups=tensors.get("group"),
                group_names=names.get("group", ()),
            )
