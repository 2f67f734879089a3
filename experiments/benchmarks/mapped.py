"""``OMP_NUM_THREADS=1 python experiments/benchmarks/mapped.py``: data larger than memory.

Prints a Markdown table; ``--save`` writes it into ``results.md``. Temporary files go to ``TMPDIR``
(or ``/var/tmp``), and take ``--gigabytes`` of disk and twice as much memory, with the file cache.

1. Memory: a fit and a test on a sparse ``x.npy`` of ``--sparse`` GB in a process of its own. The
   anonymous memory of the process (``RssAnon``) is what a machine must have; the rest is file
   cache, which the system frees on demand.
2. Warm file cache: rounds on the same images in memory and in a memory map, in turns, in one
   process. The table has the medians, by the wall clock and in processor time of all threads.
3. Cold file cache: rounds after the system has dropped the file from its cache, with and without
   reading ahead, in blocks that take turns. The first round of a block is left out.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from large import GB, record_memory_peaks, sgd
from report import machine, save, table
from torch import nn

from pl_fed import EngineOptions, Federation, Trainer
from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData, NpyFolder
from pl_fed.data.source import Arrays, DataSource
from pl_fed.models import MLP
from pl_fed.rounds import local_training
from pl_fed.samplers import Uniform

CLIENTS, COHORT, SHAPE = 10_000, 100, (3, 32, 32)
HEADER = ["images", "net", "engine", "round", "of in memory"]


class InMemory(DataSource):
    """The images of a folder, in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> Arrays:
        """Return the samples, with inputs in memory."""
        arrays = NpyFolder(str(self.folder)).load()
        inputs = torch.from_numpy(np.load(self.folder / "x.npy"))
        return Arrays(inputs, arrays.targets, arrays.client, num_classes=10)


class Images(nn.Module):
    """A net for images that are flattened, or convolved once."""

    def __init__(self, convolves: bool) -> None:
        super().__init__()
        size = int(np.prod(SHAPE))
        self.net: nn.Module = MLP(size, [64], 10)
        if convolves:
            layers = [nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
            self.net = nn.Sequential(*layers, nn.Linear(16 * 7 * 7, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores."""
        return self.net(x)


def write(folder: Path, gigabytes: float, sparse: bool) -> None:
    """Write a folder of images of ``CLIENTS`` clients; sparse images are black and take no disk."""
    folder.mkdir()
    per_client = max(1, int(gigabytes * GB / np.prod(SHAPE) / CLIENTS))
    shape = (per_client * CLIENTS, *SHAPE)
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype="uint8", shape=shape)
    draw = np.random.default_rng(0)
    for begin in range(0, 0 if sparse else len(x), 1 << 14):
        block = x[begin : begin + (1 << 14)]
        block[:] = draw.integers(256, size=block.shape, dtype="uint8")
    x.flush()
    np.save(folder / "y.npy", np.arange(len(x)) % 10)
    np.save(folder / "client.npy", np.arange(len(x)) // per_client)


class Side:
    """Side: a federation that runs rounds on one kind of data.

    Args:
        source: The images.
        convolves: Whether the net has a convolution.
        engine: The federation's engine.
    """

    def __init__(self, source: DataSource, convolves: bool, engine: str) -> None:
        torch.manual_seed(0)
        data = FederatedData(source, batch_size=10, val_fraction=0.0, test_fraction=0.0, seed=0)
        client = FedAvg(Images(convolves), optimizer=sgd)
        self.federation = Federation(Uniform(COHORT), engine=EngineOptions(engine), seed=0)
        self.federation.setup(client, data, "fit")
        self.optimizer: Any = client.configure_optimizers()
        self.inputs = data.clients.inputs
        self.times: list[tuple[float, float]] = []
        self.round = 0

    def run_round(self) -> None:
        """Run a round, and note its time by the wall clock and in processor time."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.federation.run_round(self.round, self.optimizer)
        self.times.append((time.perf_counter() - wall, time.process_time() - cpu))
        self.round += 1

    def medians(self, first: int = 0) -> tuple[float, float]:
        """Return the medians of the times from a round on, in milliseconds."""
        wall, cpu = (1e3 * statistics.median(values) for values in zip(*self.times[first:]))
        return wall, cpu


def describe(times: tuple[float, float]) -> str:
    """Return the times of a round as text."""
    return f"{times[0]:.0f} ms (processor {times[1]:.0f} ms)"


def compare_warm(folder: Path, convolves: bool, engine: str, turns: int) -> list[list[str]]:
    """Return the rows of rounds in memory and in a memory map, in turns."""
    sides = [
        Side(source, convolves, engine) for source in (InMemory(folder), NpyFolder(str(folder)))
    ]
    for turn in range(turns + 2):
        for side in sides if turn % 2 else sides[::-1]:
            side.run_round()
    in_memory, mapped = (side.medians(2) for side in sides)
    ratios = [
        f"{statistics.median(b[i] / a[i] for a, b in _pairs(sides)):.2f}"  # of the same round
        for i in range(2)
    ]
    net = "CNN" if convolves else "MLP"
    return [
        ["in memory", net, engine, describe(in_memory), ""],
        ["mapped, warm", net, engine, describe(mapped), f"{ratios[0]} (processor {ratios[1]})"],
    ]


def _pairs(sides: list[Side]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return list(zip(*(side.times[2:] for side in sides)))


def compare_cold(folder: Path, convolves: bool, engine: str, blocks: int) -> list[list[str]]:
    """Return the rows of rounds on a cold file, with and without reading ahead."""
    side = Side(NpyFolder(str(folder)), convolves, engine)
    read_ahead, times = local_training.read_ahead, {True: [], False: []}
    for block in range(2 * blocks):
        reads_ahead = block % 2 == 0
        local_training.read_ahead = read_ahead if reads_ahead else _ignore  # type: ignore[assignment]
        drop_from_cache(folder / "x.npy", side.inputs)
        side.times = []
        for _ in range(4):
            side.run_round()
        times[reads_ahead] += side.times[1:]
    local_training.read_ahead = read_ahead
    rows = []
    for reads_ahead, name in ((True, "read ahead"), (False, "not read ahead")):
        wall, cpu = (1e3 * statistics.median(values) for values in zip(*times[reads_ahead]))
        net = "CNN" if convolves else "MLP"
        rows.append([f"mapped, cold, {name}", net, engine, describe((wall, cpu)), ""])
    return rows


def _ignore(*_: object) -> threading.Thread:
    return threading.Thread()


def drop_from_cache(path: Path, inputs: torch.Tensor) -> None:
    """Drop a file from the file cache of the system, and its pages from the process."""
    from ctypes import CDLL, c_size_t, c_void_p

    begin = inputs.data_ptr() // 4096 * 4096
    CDLL(None).madvise(c_void_p(begin), c_size_t(inputs.nbytes), 4)  # MADV_DONTNEED: unmap
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_memory(folder: Path) -> None:
    """Print the peaks of memory of a fit and a test."""
    data = FederatedData(NpyFolder(str(folder)), batch_size=10, seed=0)
    federation = Federation(Uniform(COHORT), engine=EngineOptions("one_by_one"), seed=0)
    client = FedAvg(Images(convolves=True), optimizer=sgd)
    with record_memory_peaks() as peaks, tempfile.TemporaryDirectory() as folder_of_runs:
        trainer = Trainer(
            federation,
            default_root_dir=folder_of_runs,
            max_epochs=10,
            accelerator="cpu",
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(client, data)
        trainer.test(client, data, verbose=False)
    print(" ".join(f"{peaks[name] / GB:.2f}" for name in ("RssAnon", "RssFile")))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=8, help="size of the images on disk")
    parser.add_argument("--sparse", type=float, default=20, help="size of the sparse images, in GB")
    parser.add_argument("--turns", type=int, default=15, help="rounds of each side")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of cold rounds of each side")
    parser.add_argument("--save", action="store_true", help="write results.md")
    parser.add_argument("--memory-of", type=Path, help="(for itself) measure the memory here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if arguments.memory_of:
        measure_memory(arguments.memory_of)
        return
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        write(Path(name) / "sparse", arguments.sparse, sparse=True)
        own = [sys.executable, __file__, "--memory-of", f"{name}/sparse"]
        done = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True)
        anonymous, of_file = done.stdout.split()[-2:]
        memory = (
            f"{CLIENTS:,} clients, {arguments.sparse:g} GB of mapped images, 10 rounds and a test:"
            f" at most {anonymous} GB of anonymous memory, and {of_file} GB of mapped files."
        )
        print(memory, flush=True)
        folder = Path(name) / "dense"
        write(folder, arguments.gigabytes, sparse=False)
        for convolves, engine in ((False, "stacked"), (False, "one_by_one"), (True, "one_by_one")):
            lines += compare_warm(folder, convolves, engine, arguments.turns)
            lines += compare_cold(folder, convolves, engine, arguments.blocks)
            print(table(HEADER, lines[-4:]), flush=True)
    if arguments.save:
        size = f"{arguments.gigabytes:g} GB of images of {CLIENTS:,} clients, {COHORT} a round."
        text = f"## Mapped data\n\n{machine('cpu')}\n\n{memory}\n\n{size}\n\n{table(HEADER, lines)}"
        save("mapped", text)


if __name__ == "__main__":
    main()
