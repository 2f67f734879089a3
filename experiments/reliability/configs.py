"""Mutated configs: a run ends with finite metrics, or with one sentence that begins with error."""

import copy
import csv
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from experiments.reliability.commands import Command

Key = tuple[str | int, ...]
SECTIONS = ("model", "data", "federation", "trainer")
ALGORITHMS = ("FedAvg", "Ditto", "FLAME", "FedTilt", "Scaffold", "PFedMe", "APFL", "FedRep")
LONG = {  # these ask for other processes, for very many rounds, or for files elsewhere
    *(
        "devices",
        "num_nodes",
        "strategy",
        "accelerator",
        "default_root_dir",
        "folder",
        "max_epochs",
    ),
    *("min_epochs", "max_steps", "min_steps", "max_time", "logger", "profiler", "callbacks"),
}
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf, 10**30, 2**63, -(2**63), 2**31),
    *("", " ", "null", None, True, False, "abc", "é☃𝔘", "\u202e", "\x00", "1e-3", "0x10", "1_000"),
    *([], [1], ["a"], [[]], [None], {}, {"a": 1}, {"class_path": "x"}, {"class_path": "os.system"}),
    *({"class_path": None}, {"init_args": {}}, "..", "last", "${oc.env:HOME}", "torch.nn.Module"),
    "!!python/object/apply:os.system ['touch executed']",
)


def base_config(algorithm: str) -> dict[str, Any]:
    """Return the config of a short run."""
    net = {
        "class_path": "pl_fed.models.MLP",
        "init_args": {"in_features": 64, "hidden": [8], "num_classes": 10},
    }
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}
    return {
        "seed_everything": 0,
        "model": {
            "class_path": f"pl_fed.clients.{algorithm}",
            "init_args": {"net": net, "optimizer": sgd},
        },
        "data": {
            "dataset": {"class_path": "pl_fed.data.Digits"},
            "partitioner": {"class_path": "pl_fed.partitioners.Shards"},
            "num_clients": 10,
        },
        "federation": {
            "sampler": {"class_path": "pl_fed.samplers.Uniform", "init_args": {"cohort_size": 3}},
            "engine": {"name": "one_by_one"},
        },
        "trainer": {
            "default_root_dir": "runs",
            "max_epochs": 1,
            "logger": False,
            "accelerator": "cpu",
            "enable_model_summary": False,
            "enable_progress_bar": False,
        },
    }


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a mutated config, and the fault of its run."""
    algorithm = draw.choice(ALGORITHMS)
    config = _full_config(algorithm, folder)
    section = draw.choice(SECTIONS)
    keys = [key for key in _list_keys(config[section], (section,)) if not LONG & {*key}]
    changes = []
    for key in draw.sample(keys, draw.choice([1, 1, 1, 2])):
        value = draw.choice(VALUES)
        changes.append(f"{'.'.join(map(str, key))} = {value!r}")
        _put(config, key, value)
    description = f"{algorithm}: {', '.join(changes)}"
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = Command(["fit", "--config", "config.yaml"], folder)
    command.wait()
    if (folder / "executed").exists():
        return description, "executed code of a config"
    return description, command.fault() or (find_odd_number(folder) if not command.status else "")


def _full_config(algorithm: str, folder: Path) -> dict[str, Any]:
    """Return a config with all its defaults, as ``--print_config`` shows it."""
    if algorithm not in _configs:
        (folder / "base.yaml").write_text(yaml.safe_dump(base_config(algorithm)), encoding="utf-8")
        command = Command(["fit", "--config", "base.yaml", "--print_config"], folder)
        command.wait()
        _configs[algorithm] = yaml.safe_load(command.output)
    return copy.deepcopy(_configs[algorithm])


_configs: dict[str, dict[str, Any]] = {}  # by algorithm


def _list_keys(value: Any, key: Key) -> Iterator[Key]:
    """Yield the keys of all entries below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        yield (*key, name)
        if isinstance(item, dict | list):
            yield from _list_keys(item, (*key, name))


def _put(config: Any, key: Key, value: Any) -> None:
    """Set the entry under a key, unless an earlier change has removed its place."""
    for name in key[:-1]:
        try:
            config = config[name]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(config, dict) or (isinstance(config, list) and key[-1] in range(len(config))):
        config[key[-1]] = value


def find_odd_number(folder: Path) -> str:
    """Return a number in the metrics that is not finite, or an empty string.

    A variance may overflow: that of losses of 1e20 is no number of float32.
    """
    for path in folder.glob("runs/*/metrics.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    has_overflowed = name.endswith("_var") and text == "inf"
                    if text and not has_overflowed and not math.isfinite(float(text)):
                        return f"{name} is {text} in round {row['round']}"
    return ""
