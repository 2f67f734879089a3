"""Broken data files: a fit on npz, npy, csv or parquet trains, or ends with one sentence."""

import gzip
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import yaml

from experiments.reliability.configs import base_config, find_odd_number
from experiments.reliability.files import DAMAGES
from experiments.reliability.forks import Command

SAMPLES, FEATURES, CLIENTS, CLASSES = 90, 4, 6, 3
Arrays = dict[str, Any]
Write = Callable[[Path, Arrays], list[Path]]  # returns the paths


class Code:
    """Code: an object whose pickle writes a file when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("executed").touch, ()


def draw_arrays() -> Arrays:
    """Return the arrays of a data set."""
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(SAMPLES, FEATURES)).astype("float32"),
        "y": draw.integers(0, CLASSES, SAMPLES),
        "client": np.arange(SAMPLES) % CLIENTS,
    }


def _put(array: Any, value: Any, kind: Any = None) -> Any:
    """Return a copy of an array with another first value."""
    changed = np.array(array, dtype=kind or array.dtype)
    changed[0] = value
    return changed


CHANGES: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda array: _put(array, np.nan, float),
    "infinity": lambda array: _put(array, -np.inf, float),
    "a huge number": lambda array: _put(array, 1e308, float),
    "overflow of float32 in half of all": lambda array: np.sign(array.astype(float) - 0.5) * 1e39,
    "a denormal number": lambda array: _put(array, 1e-310, float),
    "an integer of 63 bits": lambda array: _put(array, 2**62, "int64"),
    "a negative number": lambda array: _put(array, -3),
    "a number of 64 bits without sign": lambda array: _put(array.astype("uint64"), 2**63),
    "text": lambda array: array.astype(str),
    "odd text": lambda array: np.array(["é☃\n,\"'"] * len(array)),
    "empty text": lambda array: np.array([""] * len(array)),
    "dates": lambda array: np.array(["2020-01-01"] * len(array), "datetime64[D]"),
    "complex numbers": lambda array: array.astype(complex),
    "booleans": lambda array: array > 0,
    "half precision": lambda array: array.astype("float16"),
    "wide floats": lambda array: array.astype("longdouble"),
    "another byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    "one row less": lambda array: array[1:],
    "one row": lambda array: array[:1],
    "no row": lambda array: array[:0],
    "no dimension": lambda array: array.ravel()[0],
    "one dimension more": lambda array: array[..., None],
    "no columns": lambda array: array.reshape(len(array), -1)[:, :0],
    "one value": lambda array: array * 0,
    "objects": lambda array: np.array([Code()] * len(array), dtype=object),
}


def _write_npz(folder: Path, arrays: Arrays) -> list[Path]:
    np.savez(folder / "data.npz", **arrays)
    return [folder / "data.npz"]


def _write_npy(folder: Path, arrays: Arrays) -> list[Path]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [folder / f"{name}.npy" for name in arrays]


def _make_table(arrays: Arrays) -> pyarrow.Table:
    """Return a table with a column for each feature; a column may have another length."""
    x = np.atleast_1d(arrays["x"])
    columns = {f"x{place}": x[:, place] for place in range(x.shape[1])} if x.ndim == 2 else {"x": x}
    columns |= {name: array for name, array in arrays.items() if name != "x"}
    columns = {name: np.atleast_1d(column) for name, column in columns.items()}
    length = max(map(len, columns.values()))
    return pyarrow.table(
        {
            name: [*column.tolist(), *[None] * (length - len(column))]
            for name, column in columns.items()
        }
    )


def _write_csv(folder: Path, arrays: Arrays) -> list[Path]:
    pyarrow.csv.write_csv(_make_table(arrays), folder / "data.csv")
    return [folder / "data.csv"]


def _write_packed_tsv(folder: Path, arrays: Arrays) -> list[Path]:
    options = pyarrow.csv.WriteOptions(delimiter="\t")
    pyarrow.csv.write_csv(_make_table(arrays), folder / "plain.tsv", options)
    (folder / "data.tsv.gz").write_bytes(gzip.compress((folder / "plain.tsv").read_bytes()))
    return [folder / "data.tsv.gz"]


def _write_parquet(folder: Path, arrays: Arrays) -> list[Path]:
    pyarrow.parquet.write_table(_make_table(arrays), folder / "data.parquet")
    return [folder / "data.parquet"]


FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    "npz": (_write_npz, {"class_path": "Npz", "init_args": {"path": "data.npz"}}),
    "npy": (_write_npy, {"class_path": "NpyFolder", "init_args": {"folder": "."}}),
    **{
        suffix: (
            write,
            {
                "class_path": "Table",
                "init_args": {"path": f"data.{suffix}", "target": "y", "client": "client"},
            },
        )
        for suffix, write in (
            ("csv", _write_csv),
            ("tsv.gz", _write_packed_tsv),
            ("parquet", _write_parquet),
        )
    },
}


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a format and a damage, and the fault of a fit on the file."""
    name, (write, source) = draw.choice(list(FORMATS.items()))
    damage = _damage_bytes if draw.random() < 0.5 else _change_values
    while (description := damage(draw, name, write, folder)) is None:
        pass
    (folder / "config.yaml").write_text(yaml.safe_dump(_make_config(source)), encoding="utf-8")
    command = Command(["fit", "--config", "config.yaml"], folder)
    command.wait()
    if (folder / "executed").exists():
        return description, "executed code of a data file"
    return description, command.fault() or ("" if command.status else find_odd_number(folder))


def _damage_bytes(draw: random.Random, _: str, write: Write, folder: Path) -> str:
    """Write the files with damaged bytes in one of them, and return a description."""
    damage_name, damage = draw.choice(list(DAMAGES.items()))
    path = draw.choice(write(folder, draw_arrays()))
    path.write_bytes(damage(path.read_bytes(), draw))
    return f"{path.name}, {damage_name}"


def _change_values(draw: random.Random, name: str, write: Write, folder: Path) -> str | None:
    """Write the files with other values, and return a description.

    Returns:
        The description; ``None`` if the format has no such values.
    """
    change_name, change = draw.choice(list(CHANGES.items()))
    part, arrays = draw.choice(["x", "y", "client"]), draw_arrays()
    try:
        write(folder, {**arrays, part: change(arrays[part])})
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, pickle.PicklingError):
        return None
    return f"{name}, {part}: {change_name}"


def _make_config(source: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a short run on a data file."""
    config = base_config("Ditto")
    net = {"in_features": FEATURES, "hidden": [4], "num_classes": CLASSES}
    config["model"]["init_args"]["net"]["init_args"] = net
    config["data"] = {"dataset": {**source, "class_path": f"pl_fed.data.{source['class_path']}"}}
    return config
