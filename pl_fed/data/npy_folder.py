"""Your own data from ``.npy`` files, with inputs larger than memory."""

from pathlib import Path

import numpy as np
import torch

from pl_fed.arguments import check_integers
from pl_fed.data.reading import read_npy, report_read_errors, warn_of_similar_names
from pl_fed.data.source import Arrays, DataSource, count_classes

_FILES = ("y", "client", "split", "labels", "group")
_TEXTS = ("client", "group")  # may hold strings
_KIND = "an .npy file of numbers"


class NpyFolder(DataSource):
    """Npy folder: your own data from ``.npy`` files; the inputs are not loaded into memory.

    The files in the folder, each written by ``numpy.save``:

    - ``x.npy`` [samples, ...]: inputs. Rows are read when they are needed. uint8 is scaled from
      0..255 to [0, 1], and other types are converted, in each minibatch. Inputs that lie client
      after client are read fastest from a disk.
    - ``y.npy``: class ids 0..C-1 as integers [samples]; real-valued or multi-label targets as
      floats [samples, ...].
    - ``client.npy`` [samples], optional: the owner of each sample, as integers or strings. No
      partitioner is needed then.
    - ``split.npy`` [samples], optional: 0 train, 1 val, 2 test.
    - ``labels.npy`` [samples], optional: the class of each sample for partitioners, as integers, if
      ``y.npy`` holds no class ids.
    - ``group.npy`` [samples], optional: the group of each sample, as integers from 0 or strings:
      evaluations then measure gaps between groups.

    ``data.transforms``, ``data.normalize`` and ``data.skew`` would make a copy in memory and are
    refused. Normalize in the net, or before writing. Inputs of real numbers are read once at the
    start, to find NaN and infinity.

    Args:
        folder: The path of the folder.
        num_classes: Number of classes; 0 if integer targets are no class ids. ``None`` uses the
            largest class id + 1.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "x.npy", np.zeros((4, 3, 8, 8), "uint8"))
        >>> np.save(folder / "y.npy", np.array([0, 1, 1, 0]))
        >>> arrays = NpyFolder(str(folder)).load()
        >>> arrays.mapped, arrays.inputs.shape, arrays.inputs.dtype
        (True, torch.Size([4, 3, 8, 8]), torch.uint8)
    """

    def __init__(self, folder: str, num_classes: int | None = None) -> None:
        if num_classes is not None:
            check_integers(0, num_classes=num_classes)
        self.folder = folder
        self.num_classes = num_classes

    def load(self) -> Arrays:
        """Return the samples, with inputs in a memory map.

        Raises:
            FileNotFoundError: If ``x.npy`` or ``y.npy`` is missing.
            ValueError: If a file cannot be read, has a wrong shape or type, or a number is NaN,
                infinite or out of range.
        """
        folder = Path(self.folder).expanduser()
        for name in ("x", "y"):
            if not (folder / f"{name}.npy").is_file():
                raise FileNotFoundError(
                    f"Expected argument `folder` to hold x.npy and y.npy but got no {name}.npy in"
                    f" {folder.absolute()}: write it by numpy.save."
                )
        path = folder / "x.npy"
        with report_read_errors(path, _KIND):
            inputs = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {
            name: read_npy(folder / f"{name}.npy", name, allow_text=name in _TEXTS)
            for name in _FILES
            if (folder / f"{name}.npy").exists()
        }
        files = sorted(file.stem for file in folder.glob("*.npy"))
        warn_of_similar_names(files, ["x", *arrays], _FILES, folder)
        names: dict[str, list[str]] = {}
        for name in _TEXTS:
            if name in arrays and arrays[name].dtype.kind == "U":
                values, arrays[name] = np.unique(arrays[name], return_inverse=True)
                names[name] = values.tolist()
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        y, client, split, labels, groups = (tensors.get(name) for name in _FILES)
        classes = self.num_classes
        if classes is None:
            classes = count_classes(tensors["y"])
        with report_read_errors(folder, "a folder of samples", {"inputs": "x", "targets": "y"}):
            return Arrays(
                inputs,
                y,
                client,
                split,
                classes,
                names.get("client"),
                labels,
                groups=groups,
                group_names=names.get("group", ()),
            )
