"""Number of rounds in which each client of Ditto's tables takes part: it follows from the seed.

PL_FED_DATA=../data python -m experiments.ditto.draws   # writes the clients' sizes; trains nothing
"""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import yaml
from torch import Tensor

from experiments.ditto.run import COHORT, HERE, SEEDS, TABLES, config
from experiments.evidence import count_draws
from experiments.grid import merge_configs, read, write
from pl_fed.samplers import BySize

FILE = HERE / "train_samples.csv"
EQUAL_SIZES = {"vehicle_rounded_down": "vehicle", "fashion_small_pixels": "fashion_small"}


def measure_sizes(table: str, seed: int) -> list[int]:
    """Return the number of training samples of each client, from the data of a run."""
    from pl_fed.command.partition import PartitionCLI

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        file = Path(folder) / "config.yaml"
        change = {"trainer": {"default_root_dir": folder}}
        text = yaml.safe_dump(merge_configs(config(table, "clean", "local", seed), change))
        file.write_text(text)
        with contextlib.redirect_stdout(nowhere):
            sizes = PartitionCLI(["--config", str(file)]).datamodule.clients.train.sizes
    return [int(size) for size in sizes]


@cache
def read_sizes(table: str) -> Tensor:
    """Return the number of training samples of each client, int64 [num_clients]."""
    name = EQUAL_SIZES.get(table, table)
    return torch.tensor([int(r["train_samples"]) for r in read(FILE) if r["table"] == name])


@cache
def count_table_draws(table: str, seed: int) -> Tensor:
    """Return the number of rounds of each client, int64 [num_clients].

    It is the same for all methods and attacks: neither changes the sizes or the seed.
    """
    sizes = read_sizes(table)
    rounds = TABLES[table]["trainer"]["max_epochs"]
    return count_draws(BySize(COHORT), len(sizes), rounds, seed, sizes)


def describe_draws(table: str, seeds: Sequence[str]) -> str:
    """Return a sentence about the clients that never took part in the runs of some seeds."""
    draws = torch.stack([count_table_draws(table, int(seed)) for seed in seeds])
    absent = [str(int((counts == 0).sum())) for counts in draws]
    listed = ", ".join(absent if len({*absent}) > 1 else absent[:1])
    rounds = TABLES[table]["trainer"]["max_epochs"]
    of_seeds = f" with each of the {len(seeds)} seeds" if len(seeds) > 1 else ""
    return (
        f"**Clients that never took part: {listed} of {draws.shape[1]}{of_seeds}.** The rarest"
        f" client took part\nin {int(draws.min()):,} of {rounds:,} rounds. All methods and attacks"
        " of a seed have the same cohorts."
    )


def main() -> None:
    """Write the sizes of the clients of all tables."""
    rows = []
    for table in TABLES:
        if table in EQUAL_SIZES:
            continue
        sizes = {tuple(measure_sizes(table, seed)) for seed in SEEDS[table]}
        if len(sizes) > 1:
            raise ValueError(f"Expected equal sizes of clients for all seeds of {table}.")
        rows += [
            {"table": table, "client": str(client), "train_samples": str(size)}
            for client, size in enumerate(*sizes)
        ]
    write(FILE, rows)


if __name__ == "__main__":
    main()
