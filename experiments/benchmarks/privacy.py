"""``OMP_NUM_THREADS=1 python experiments/benchmarks/privacy.py``: the time of clipping and noise.

Times the rounds of the MLP row of targets.py (10 clients, 10 steps of 10 samples, 109,386
parameters) with and without privacy, alternately, and the two parts of the privacy step alone. The
goal: clipping and noise cost at most 10 % of a round. The times are processor times, because the
machine may be shared, and the fastest tenth is more reliable than the median.
"""

import copy
import functools
import statistics
import time
from collections.abc import Callable

import torch

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.distributed.work_share import WorkShare
from pl_fed.models import MLP
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All

CLIENTS, SAMPLES, ROUNDS, BLOCK = 10, 100, 120, 10


class Noise(DataSource):
    """Random samples, 100 for each client."""

    def load(self) -> Arrays:
        """Return the samples."""
        draw = torch.Generator().manual_seed(0)
        count = CLIENTS * SAMPLES
        inputs = torch.randn(count, 784, generator=draw)
        targets = torch.randint(10, (count,), generator=draw)
        return Arrays(inputs, targets, torch.arange(count) // SAMPLES, num_classes=10)


def build(client: FedAvg, privacy: pl_fed.DifferentialPrivacy | None) -> pl_fed.Federation:
    """Return a federation after its setup."""
    data = FederatedData(Noise(), batch_size=10, val_fraction=0.0, test_fraction=0.0, seed=0)
    federation = pl_fed.Federation(
        All(), privacy=privacy, engine=pl_fed.EngineOptions("one_by_one_compiled"), seed=0
    )
    federation.setup(client, data, "fit", settings=RunSettings(rounds=ROUNDS))
    return federation


def time_part(part: Callable[[], object], repeats: int = 100) -> float:
    """Return the fastest tenth of the times of a function, in ms."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        part()
        times.append(1e3 * (time.process_time() - started))
    return statistics.quantiles(times, n=10)[0]


def main() -> None:
    """Print the times."""
    torch.manual_seed(0)
    plain = FedAvg(
        MLP(784, [128, 64], 10),
        local_epochs=1,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
    )
    settings = pl_fed.DifferentialPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
    runs = {}
    for name, privacy in (("without", None), ("with", settings)):
        client = copy.deepcopy(plain)
        federation = build(client, privacy)
        client.train()
        runs[name] = federation, client.configure_optimizers()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for begin in range(0, ROUNDS, BLOCK):
        for name, (federation, optimizer) in runs.items():
            for round in range(begin, begin + BLOCK):
                started = time.process_time()
                federation.run_round(round, optimizer)
                times[name].append(1e3 * (time.process_time() - started))
    for name, values in times.items():
        fastest = statistics.quantiles(values[BLOCK:], n=10)[0]
        print(f"{name} privacy: {statistics.median(values[BLOCK:]):.2f} ms, fastest {fastest:.2f}")
    fastest = {
        name: statistics.quantiles(values[BLOCK:], n=10)[0] for name, values in times.items()
    }
    print(f"privacy costs {100 * (fastest['with'] / fastest['without'] - 1):.1f} % of a round")
    privacy = runs["with"][0].session.rounds.privacy
    if privacy is not None:
        uploads = torch.randn(CLIENTS, plain.row("global").layout.numel)
        share = WorkShare.single_process(torch.arange(CLIENTS))
        parts = {
            "clipping and noise": lambda: privacy.protect(uploads, share, lambda *_: None),
            "accounting": lambda: privacy.report(0.5),
        }
        for name, part in parts.items():
            milliseconds = time_part(part)
            share_of_round = 100 * milliseconds / fastest["without"]
            print(f"{name}: {milliseconds:.2f} ms, {share_of_round:.1f} % of a round")


if __name__ == "__main__":
    main()
