"""``OMP_NUM_THREADS=1 python experiments/benchmarks/large.py``: the cost of large federations.

Prints a Markdown table. Each part runs in a process of its own, so that its memory can be measured;
name parts to run only these. Temporary files go to ``TMPDIR`` (or ``/var/tmp``) and take up to 20
GB.

- ``rounds``: rounds with a million clients and with a thousand, in turns.
- ``few``, ``many``: whole fits with a thousand and a million clients, with time and memory.
- ``sharing``: the split of ten million samples over their owners.
- ``copies``, ``resume``: 500 personal copies of a CNN of 3,274,634 parameters; their checkpoint.
- ``prefetch``: the same copies from a cold disk, with and without prefetching.
- ``endurance``: memory over 2,000 rounds.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from pl_fed import EngineOptions, Federation, StorageOptions, Trainer
from pl_fed.clients import Ditto
from pl_fed.data import FederatedData
from pl_fed.data.client_data import ClientData, Part
from pl_fed.data.source import Arrays, DataSource
from pl_fed.models import MLP, DittoFashionCNN
from pl_fed.partitioners import IID
from pl_fed.random import integers, key
from pl_fed.samplers import Uniform

MANY, FEW, COHORT, POOL, COPIES, ROUNDS = 1_000_000, 1_000, 100, 5_000, 500, 2_000
GB = 1e9


class Noise(DataSource):
    """Random inputs and classes."""

    def __init__(self, samples: int, shape: tuple[int, ...]) -> None:
        self.samples, self.shape = samples, shape

    def load(self) -> Arrays:
        """Return the samples."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, *self.shape, generator=draw)
        return Arrays(x, torch.arange(self.samples) % 10, num_classes=10)


class Pooled(FederatedData):
    """Clients with 1 to 20 samples each, drawn by key from a pool: only the index grows."""

    def _share_out(self, arrays: Arrays) -> ClientData:
        sizes = 1 + integers(key(0, "sizes"), torch.arange(self.num_clients or 0), 20)
        index = integers(key(0, "samples"), torch.arange(int(sizes.sum())), len(arrays))
        nothing = Part.from_sizes(index[:0], torch.zeros_like(sizes))
        return ClientData(
            arrays.inputs, arrays.targets, Part.from_sizes(index, sizes), nothing, nothing, 10
        )


class Owned(Noise):
    """Random samples with recorded owners."""

    def load(self) -> Arrays:
        """Return ten samples or so of each client, in any order."""
        owner = integers(key(0, "owners"), torch.arange(self.samples), MANY)
        owner[:MANY] = torch.arange(MANY)
        x = torch.zeros(self.samples, *self.shape)
        return Arrays(x, torch.arange(self.samples) % 10, owner, num_classes=10)


class Turns(Federation):
    """Sampler that takes the clients in turn, so that every client is trained early."""

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of the clients that take part in a round."""
        size = self.sampler.size_of_cohort(self.data.num_clients)
        return ((torch.arange(size) + round * size) % self.data.num_clients).sort().values


def memory() -> dict[str, int]:
    """Return the resident bytes of this process: total, anonymous, and of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "Rss")))
    return {name: int(text.split()[0]) * 1024 for name, text in found.items()}


@contextmanager
def record_memory_peaks() -> Iterator[dict[str, int]]:
    """Record the peaks of memory, sampled every 2 ms."""
    peaks, done = memory(), threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            for name, size in memory().items():
                peaks[name] = max(peaks[name], size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


class Watch(Callback):
    """Callback that records the end of each round, and the memory at that time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note."""
        self.times.append(time.perf_counter())
        self.sizes.append(memory()["VmRSS"])

    @property
    def median_ms(self) -> float:
        """Median time of a round, without the first."""
        return 1e3 * statistics.median(b - a for a, b in zip(self.times, self.times[1:]))


def fit(
    federation: Federation,
    client: Ditto,
    data: FederatedData,
    rounds: int,
    checkpoint: Path | None = None,
) -> tuple[Trainer, Watch]:
    """Run rounds by a trainer without output and checkpoints."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            federation,
            default_root_dir=folder,
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=[watch],
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(client, data, ckpt_path=checkpoint)
    return trainer, watch


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Build the local optimizer."""
    return torch.optim.SGD(parameters, lr=0.01)


def build_pooled_ditto(num_clients: int) -> tuple[Federation, Ditto, Pooled]:
    """Return Ditto with logistic regressions, for a number of clients."""
    data = Pooled(Noise(POOL, (784,)), IID(), num_clients, seed=0)
    federation = Federation(Uniform(COHORT), engine=EngineOptions("stacked_compiled"), seed=0)
    return federation, Ditto(MLP(784, [], 10), optimizer=sgd), data


def rounds() -> None:
    """A round of both sizes in turns, in one process."""
    runs = []
    for num_clients in (FEW, MANY):
        federation, client, data = build_pooled_ditto(num_clients)
        federation.setup(client, data, "fit")
        times: list[float] = []
        runs.append((federation, client.configure_optimizers(), times))
    for round in range(210):
        for federation, optimizer, times in runs:
            started = time.perf_counter()
            federation.draw_cohort(round)  # once more, as the loop does
            federation.run_round(round, optimizer)  # type: ignore[arg-type]
            times.append(time.perf_counter() - started)
    few, many = (1e3 * statistics.median(times[10:]) for *_, times in runs)
    row("a round, 1,000 clients", f"{few:.1f} ms")
    row("a round, 1,000,000 clients", f"{many:.1f} ms: {many / few:.2f} times")


def size(num_clients: int) -> None:
    """Fit a federation with a number of clients."""
    federation, client, data = build_pooled_ditto(num_clients)
    fit(*build_pooled_ditto(100), 2)  # warm-up: imports and one-time costs
    before, started = memory()["VmRSS"], time.perf_counter()
    index = data.clients.train
    seconds = time.perf_counter() - started
    fit(federation, client, data, 2)
    held = memory()["VmRSS"]
    _, watch = fit(federation, client, data, 200)
    used = len(federation.store.state_dict()["personal"]["clients"]) * 7850 * 4
    name = f"{num_clients:,} clients"
    row(f"{name}: a round of a whole fit", f"{watch.median_ms:.1f} ms")
    index_mb = (index.index.nbytes + 2 * index.offsets.nbytes) / 1e6
    row(
        f"{name}: memory of set-up and 2 rounds (index and sizes: {index_mb:.0f} MB)",
        f"{(held - before) / 1e6:.0f} MB, {seconds:.1f} s",
    )
    row(
        f"{name}: memory of 200 rounds more (rows used: {used / 1e6:.0f} MB)",
        f"{(memory()['VmRSS'] - held) / 1e6:.0f} MB",
    )


def split_samples() -> None:
    """Split ten million samples over their owners."""
    source = Owned(10 * MANY, (1,))
    for share in (0.0, 0.1):
        data = FederatedData(source, val_fraction=share, test_fraction=0.0, seed=0)
        before = memory()["VmRSS"]
        with record_memory_peaks() as peaks:
            started = time.perf_counter()
            clients = data.clients
            seconds = time.perf_counter() - started
        row(
            f"sharing out {source.samples:,} samples over {clients.num_clients:,} clients,"
            f" val_fraction {share}",
            f"{seconds:.1f} s, {(peaks['VmRSS'] - before) / GB:.2f} GB at most,"
            f" {(memory()['VmRSS'] - before) / GB:.2f} GB kept",
        )
        del data, clients


def cnn(memory: int) -> tuple[Federation, Ditto, FederatedData]:
    """Return Ditto with the CNN, ten of 500 clients a round."""
    noise = Noise(COPIES * 10, (1, 28, 28))
    data = FederatedData(noise, IID(), COPIES, 10, val_fraction=0.0, test_fraction=0.0, seed=0)
    client = Ditto(DittoFashionCNN(), optimizer=sgd, local_steps=1)
    return Turns(Uniform(10), storage=StorageOptions(memory=memory), seed=0), client, data


def copies(path: Path) -> None:
    """Train 500 copies, and save them."""
    federation, client, data = cnn(memory=1_000_000_000)
    with record_memory_peaks() as peaks:
        trainer, watch = fit(federation, client, data, COPIES // 10)
    row(
        "500 copies of a CNN (6.5 GB), federation.storage.memory 1 GB: 50 rounds",
        format_peaks(peaks),
    )
    row("the same: a round", f"{watch.median_ms:.0f} ms")
    with record_memory_peaks() as peaks:
        started = time.perf_counter()
        trainer.save_checkpoint(path)
        seconds = time.perf_counter() - started
    row(
        f"its checkpoint ({path.stat().st_size / GB:.2f} GB): saved in {seconds:.0f} s",
        format_peaks(peaks),
    )


def resume(path: Path) -> None:
    """Resume from the checkpoint."""
    federation, client, data = cnn(memory=1_000_000_000)
    started = time.perf_counter()
    with record_memory_peaks() as peaks:
        _, watch = fit(federation, client, data, COPIES // 10 + 2, path)
    seconds = watch.times[0] - started
    row(f"resumed: first round after {seconds:.0f} s", format_peaks(peaks))
    torch.load(path, weights_only=True, mmap=True)


def prefetch() -> None:
    """Train all clients once from a cold cache, with and without prefetch, in turns."""
    federation, client, data = cnn(memory=0)
    federation.setup(client, data, "fit")
    optimizer: Any = client.configure_optimizers()
    store, waited = federation.store, [0.0]
    for ids in torch.arange(COPIES).split(10):
        store.write("personal", ids, store.read("personal", ids))
    file: Any = store._tables["personal"].disk._file  # type: ignore[union-attr]
    for name in ("read", "write", "prefetch"):
        setattr(store, name, sum_times(getattr(store, name), waited))
    ahead, round = store.prefetch, 0
    found: dict[bool, list[tuple[float, float]]] = {}
    for order in ((False, True), (True, False)):
        for on in order:
            setattr(store, "prefetch", ahead if on else lambda _: None)  # noqa: B010 (for mypy)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(COPIES // 10):
                waited[0], started = 0.0, time.perf_counter()
                federation.run_round(round, optimizer)
                seconds = time.perf_counter() - started
                found.setdefault(on, []).append((seconds, waited[0]))
                round += 1
    for on, times in found.items():
        total, waiting = (1e3 * statistics.median(values) for values in zip(*times))
        row(
            f"copies from a cold disk, {'with' if on else 'without'} prefetch",
            f"{total:.0f} ms a round, of which {waiting:.0f} for rows (10 × 13 MB read, written)",
        )


def sum_times(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Sum the time of calls."""

    def call_and_time(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        seconds[0] += time.perf_counter() - started
        return result

    return call_and_time


def endurance() -> None:
    """Run 2,000 rounds of a small Ditto."""
    data = FederatedData(Noise(2_000, (784,)), IID(), 100, seed=0)
    federation = Federation(Uniform(10), seed=0)
    _, watch = fit(
        federation, Ditto(MLP(784, [32], 10), optimizer=sgd, local_steps=2), data, ROUNDS
    )
    marks = {at: f"{watch.sizes[at - 1] / 1e6:.1f}" for at in (100, 500, 1_000, 1_500, 2_000)}
    row("memory after 100, 500, 1,000, 1,500, 2,000 rounds", ", ".join(marks.values()) + " MB")


def format_peaks(peaks: dict[str, int]) -> str:
    """Return peaks of memory as text."""
    total, own, files = (peaks[name] / GB for name in ("VmRSS", "RssAnon", "RssFile"))
    return f"{total:.2f} GB resident at most ({own:.2f} its own, {files:.2f} of files)"


def row(name: str, value: str) -> None:
    """Print a row of the table."""
    print(f"| {name} | {value} |", flush=True)


PARTS: dict[str, Callable[[Path], None]] = {
    "rounds": lambda _: rounds(),
    "few": lambda _: size(FEW),
    "many": lambda _: size(MANY),
    "sharing": lambda _: split_samples(),
    "copies": copies,
    "resume": resume,
    "prefetch": lambda _: prefetch(),
    "endurance": lambda _: endurance(),
}


def main() -> None:
    """Print the table, or the rows of one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--checkpoint", type=Path, help="(for itself) run one part here")
    arguments = parser.parse_args()
    if arguments.checkpoint:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        PARTS[arguments.parts[0]](arguments.checkpoint)
        return
    print(f"| PyTorch {torch.__version__}, {os.cpu_count()} CPUs | |\n|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        for part in arguments.parts:
            own = [sys.executable, __file__, part, "--checkpoint", f"{folder}/large.ckpt"]
            subprocess.run(own, check=True)


if __name__ == "__main__":
    main()
