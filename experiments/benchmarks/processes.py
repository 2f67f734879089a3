"""Rounds on several processes: time, cost of exchanged rows, and memory of aggregation.

    OMP_NUM_THREADS=1 python experiments/benchmarks/processes.py [rounds|travel|memory] ...

Each process runs one thread. Times are medians. Memory is the growth of the largest resident size
of a process while it aggregates its share of the uploads.
"""

import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import pl_fed
from pl_fed import models
from pl_fed.aggregators import Krum, Mean, Median
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.distributed import work_share
from pl_fed.distributed.processes import Processes
from pl_fed.distributed.work_share import WorkShare
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import Uniform
from pl_fed.types import RoundContext


class Noise(DataSource):
    """Random images of random classes, of clients of unequal sizes."""

    def __init__(self, shape, num_clients, samples):
        self.shape, self.num_clients, self.samples = shape, num_clients, samples

    def load(self):
        """Return the samples."""
        draw = torch.Generator().manual_seed(0)
        sizes = torch.randint(
            self.samples // 2, 2 * self.samples, (self.num_clients,), generator=draw
        )
        owner = torch.arange(self.num_clients).repeat_interleave(sizes)
        x = torch.randn(len(owner), *self.shape, generator=draw)
        y = torch.randint(10, (len(owner),), generator=draw)
        return Arrays(x, y, owner, num_classes=10)


def cnn():
    """The CNN of pfl-research's CIFAR-10 benchmark, 1,626,442 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, 10),
    )


def mlp():
    """109,386 parameters."""
    return models.MLP(784, [128, 64], 10)


PARTS = ("fetch_states", "store_states", "join_tables", "merge")  # of WorkShare
ROUNDS = {
    "FedAvg, MLP 784-128-64-10, 10 clients, 1 epoch": (FedAvg, mlp, (784,), 10, 100),
    "Ditto, MLP 784-128-64-10, 100 clients, 1 epoch": (Ditto, mlp, (784,), 100, 100),
    "FedAvg, CNN 1,626,442, 50 clients, 1 epoch": (FedAvg, cnn, (3, 32, 32), 50, 50),
    "Ditto, CNN 1,626,442, 20 clients, 1 epoch": (Ditto, cnn, (3, 32, 32), 20, 50),
}
AGGREGATORS = {"Mean": Mean(), "Median": Median(), "Krum": Krum()}


def record_times(function, times, key):
    """Record the time of a method's calls in a dict of lists."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        started = time.perf_counter()
        result = function(*args, **kwargs)
        times.setdefault(key, []).append(time.perf_counter() - started)
        return result

    return wrapper


def time_rounds(processes, name, repeats=7):
    """Run rounds, and return milliseconds for a round and for its parts."""
    kind, net, shape, cohort, samples = ROUNDS[name]
    torch.manual_seed(0)
    data = FederatedData(Noise(shape, 2 * cohort, samples), batch_size=10, seed=0)
    client = kind(net(), optimizer=functools.partial(torch.optim.SGD, lr=0.01), local_epochs=1)
    federation = pl_fed.Federation(
        Uniform(cohort), engine=pl_fed.EngineOptions("one_by_one"), seed=0
    )
    federation.setup(client, data, "fit", settings=RunSettings(processes=processes))
    optimizer, times = client.configure_optimizers(), {}
    client.train()
    originals = {name: vars(WorkShare)[name] for name in PARTS}
    for part, method in originals.items():
        setattr(WorkShare, part, record_times(method, times, part))
    wholes = []
    for round in range(repeats):
        if processes.size > 1:
            dist.barrier()
        started = time.perf_counter()
        federation.run_round(round, optimizer)
        wholes.append(time.perf_counter() - started)
    for part, method in originals.items():
        setattr(WorkShare, part, method)
    middle = {part: 1e3 * statistics.median(seconds[1:]) for part, seconds in times.items()}
    return {"round": 1e3 * statistics.median(wholes[1:]), **middle}


def time_travel(processes, numel, rows=4, repeats=9):
    """Exchange rows with every other process and back; the same through one shared file."""
    size = processes.size
    counts = [0 if process == processes.rank else rows for process in range(size)]
    own_rows = torch.randn(sum(counts), numel)
    with tempfile.NamedTemporaryFile(dir=tempfile.gettempdir()) as file:
        paths = processes.gather_objects(file.name)
        shared = torch.from_file(paths[0], shared=True, size=2 * size * rows * numel)
        shared = shared.view(2, size, rows, numel)
        by_exchange, by_file = [], []
        for turn in range(repeats):
            dist.barrier()
            started = time.perf_counter()
            processes.exchange(processes.exchange(own_rows, counts, counts), counts, counts)
            by_exchange.append(time.perf_counter() - started)
            started = time.perf_counter()
            shared[turn % 2, processes.rank] = own_rows[:rows]
            dist.barrier()
            received = shared[turn % 2, (processes.rank + 1) % size].clone()
            shared[turn % 2, (processes.rank + 1) % size] = received
            dist.barrier()
            shared[turn % 2, processes.rank].clone()
            by_file.append(time.perf_counter() - started)
    return [1e3 * statistics.median(seconds) for seconds in (by_exchange, by_file)]


def peak():
    """Return the largest resident size since the last call, and the size now, in MB."""
    status = Path("/proc/self/status").read_text()
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
    Path("/proc/self/clear_refs").write_text("5")
    return int(sizes["VmHWM"]) / 1024, int(sizes["VmRSS"]) / 1024


def merge_memory(processes, aggregator, cohort, numel):
    """Return the memory of a merge above that before the uploads, in MB, and its time in ms."""
    clients = torch.arange(cohort)
    share = WorkShare.balance(processes, clients, torch.ones(cohort))
    context = RoundContext(clients=clients, losses=torch.ones(cohort))
    _, before = peak()
    uploads = torch.randn(len(share.clients), numel)
    peak()
    if processes.size > 1:
        dist.barrier()
    started = time.perf_counter()
    share.merge(aggregator, uploads, torch.ones(cohort), context)
    took = time.perf_counter() - started
    return peak()[0] - before, 1e3 * took


def work(rank, size, port, part, folder):
    """Measure in one of the processes; the first process writes the results."""
    torch.set_num_threads(1)
    processes = Processes(rank, size)
    if size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=size)
    found = {}
    if part == "rounds":
        found = {name: time_rounds(processes, name) for name in ROUNDS}
    elif part == "travel" and size > 1:
        found = {numel: time_travel(processes, numel) for numel in (7_850, 109_386, 1_626_442)}
    elif part == "memory":
        for name, aggregator in AGGREGATORS.items():
            for way, gathered_bytes in (("gathered", 1 << 60), ("in shards", 0)):
                work_share.GATHERED_BYTES = gathered_bytes
                if way == "gathered" or aggregator.shards:
                    found[name, way] = merge_memory(processes, aggregator, 40, 1_626_442)
    if rank == 0:
        torch.save(found, folder / f"{size}.pt")


def measure(part, sizes):
    """Return the results for each number of processes."""
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in sizes:
            port = 20_000 + os.getpid() % 20_000 + size
            multiprocessing.spawn(work, (size, port, part, folder), nprocs=size)
            results[size] = torch.load(folder / f"{size}.pt", weights_only=False)
    return results


def rounds():
    """Print the time of rounds."""
    results = measure("rounds", (1, 2))
    print(
        "| round | 1 process, ms | 2 processes, ms | ratio | of these: rows there, rows back,"
        " small tables, merge |\n|---|---|---|---|---|"
    )
    for name in ROUNDS:
        alone, pair = results[1][name], results[2][name]
        parts = ", ".join(f"{pair[part]:.1f}" for part in PARTS)
        print(
            f"| {name} | {alone['round']:.0f} | {pair['round']:.0f} |"
            f" {pair['round'] / alone['round']:.2f} | {parts} |"
        )


def travel():
    """Print the cost of rows sent between processes, and of rows in one shared file."""
    results = measure("travel", (2,))[2]
    print("| 4 rows each way, and back | exchanged, ms | by a shared file, ms |\n|---|---|---|")
    for numel, (exchanged, filed) in results.items():
        print(f"| {numel:,} numbers each | {exchanged:.1f} | {filed:.1f} |")


def memory():
    """Print the memory of merging 40 uploads of 1,626,442 numbers (260 MB)."""
    results = measure("memory", (1, 2, 4))
    print(
        "| merge of 40 × 1,626,442 | "
        + " | ".join(f"{n} processes, MB (ms)" for n in results)
        + " |\n|---" * 1
        + "|---" * len(results)
        + "|"
    )
    for key in results[1]:
        cells = " | ".join(f"{mb:.0f} ({ms:.0f})" for mb, ms in (r[key] for r in results.values()))
        print(f"| {', '.join(key)} | {cells} |")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ("rounds", "travel", "memory"):
        globals()[chosen]()
        print(flush=True)
