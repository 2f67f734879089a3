"""``OMP_NUM_THREADS=1 python experiments/benchmarks/local_steps.py``: the cost of a round.

Compares a round of pl_fed with a loop written by hand, on one CPU thread. Both do the same work: 10
clients take 10 minibatch steps each, and the updates are averaged. A round of pl_fed is a whole
``Federation.run_round`` (keyed draws, states, checks, reports) without the Trainer; ``targets.py``
includes the Trainer. Both take turns in one process. The script prints a table of the medians.

``--engine stacked`` times the other engine; ``--profile mlp-10`` prints where a round's time goes.
"""

import argparse
import cProfile
import pstats
import statistics
import time

import torch
from by_hand import ByHand
from cases import Case
from fit import client_of
from race import time_run
from report import print_row, table
from settings import Settings

from pl_fed import EngineOptions, Federation
from pl_fed.data import FederatedData
from pl_fed.samplers import All

LOGISTIC, MLP, IMAGE = "LogisticRegression", "MLP", (3, 32, 32)
CASES = {
    "logistic-10": Case("FedAvg, logistic regression 784×10", LOGISTIC, (784,)),
    "logistic-100": Case("FedAvg, logistic regression 784×10", LOGISTIC, (784,), batch_size=100),
    "mlp-10": Case("FedAvg, MLP 784-128-64-10", MLP, (784,)),
    "mlp-100": Case("FedAvg, MLP 784-128-64-10", MLP, (784,), batch_size=100),
    "ditto-10": Case("Ditto, MLP 784-128-64-10", MLP, (784,), ditto=True),
    "ditto-100": Case("Ditto, MLP 784-128-64-10", MLP, (784,), batch_size=100, ditto=True),
    "cnn-16": Case("FedAvg, CNN 16-32 on 3×32×32", "FlameCNN", IMAGE, batch_size=16),
}
HEADER = ["10 clients × 10 steps", "batch", "by hand, ms a round", "pl_fed, ms a round", "ratio"]


class ByPlFed:
    """pl_fed without a Trainer around it."""

    def __init__(self, case: Case, data: FederatedData, engine: str) -> None:
        self.client = client_of(case)
        self.federation = Federation(All(), engine=EngineOptions(engine), seed=0)
        self.federation.setup(self.client, data, "fit")
        self.client.train()
        self.optimizer = self.client.configure_optimizers()
        self.done = 0

    def round(self) -> None:
        """Run one round."""
        self.federation.run_round(self.done, self.optimizer)
        self.done += 1


def compare(case: Case, engine: str, seconds: float) -> tuple[float, float]:
    """Return the median milliseconds of a round, for both."""
    data = case.data()
    hand, ours = ByHand(case, data.clients), ByPlFed(case, data, engine)
    settings = Settings()
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 8:
        times.append((time_run(hand.round, settings), time_run(ours.round, settings)))
    first, second = zip(*times[3:])  # without the rounds that warm up
    return 1e3 * statistics.median(first), 1e3 * statistics.median(second)


def profile(case: Case, engine: str) -> None:
    ours = ByPlFed(case, case.data(), engine)
    ours.round()
    with cProfile.Profile() as profiler:
        for _ in range(50):
            ours.round()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--engine", default="one_by_one")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    parser.add_argument("--profile", metavar="CASE", choices=CASES, help="profile it instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        profile(CASES[arguments.profile], arguments.engine)
        return
    print(table(HEADER, []), end="")
    for case in (CASES[name] for name in arguments.cases):
        hand, ours = compare(case, arguments.engine, arguments.seconds)
        cells = [f"{hand:.2f}", f"{ours:.2f}", f"{ours / hand:.2f}"]
        print_row([case.title, str(case.batch_size), *cells])


if __name__ == "__main__":
    main()
