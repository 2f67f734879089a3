"""``OMP_NUM_THREADS=1 python experiments/benchmarks/local_steps.py``: the cost of a round.

What a round costs in pl_fed beside a loop written by hand, on one CPU thread. Both do the same
work: 10 clients take 10 minibatch steps each, and the updates are averaged. The loop by hand
gathers minibatches by index, builds an optimizer for each client, and does nothing else; a round of
pl_fed is ``Federation.run_round`` with all that it does: keyed draws, states, checks, reports. They
take turns in one process, and a table of the medians is printed.

``--engine stacked`` times the other engine; ``--profile mlp-10`` prints where a round's time goes.
"""

import argparse
import copy
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)

from pl_fed import Federation
from pl_fed.clients import Client, Ditto, FedAvg
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.models import MLP, FlameCNN
from pl_fed.samplers import All

CLIENTS, STEPS, LR, LAM = 10, 10, 0.01, 1.0


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    net: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    ditto: bool = False


CASES = {
    "logistic-10": Case("FedAvg, logistic regression 784×10", lambda: MLP(784, []), (784,), 10),
    "logistic-100": Case("FedAvg, logistic regression 784×10", lambda: MLP(784, []), (784,), 100),
    "mlp-10": Case("FedAvg, MLP 784-128-64-10", MLP, (784,), 10),
    "mlp-100": Case("FedAvg, MLP 784-128-64-10", MLP, (784,), 100),
    "ditto-10": Case("Ditto, MLP 784-128-64-10", MLP, (784,), 10, ditto=True),
    "ditto-100": Case("Ditto, MLP 784-128-64-10", MLP, (784,), 100, ditto=True),
    "cnn-16": Case("FedAvg, CNN 16-32 on 3×32×32", FlameCNN, (3, 32, 32), 16),
}


class Noise(DataSource):
    """Random inputs and classes: for each client a few samples more than its steps take."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def load(self) -> Arrays:
        """Return the samples."""
        each = self.case.batch_size * STEPS + 7
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(CLIENTS * each, *self.case.shape, generator=draw)
        y = torch.randint(10, (CLIENTS * each,), generator=draw)
        return Arrays(x, y, torch.arange(CLIENTS).repeat_interleave(each), num_classes=10)


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


class ByHand:
    """A federation as one writes it for one experiment: FedAvg, and personal models for Ditto."""

    def __init__(self, case: Case, data: FederatedData) -> None:
        self.case, self.x, self.y = case, data.clients.x, data.clients.y
        self.owned = [data.clients.train.samples(client) for client in range(CLIENTS)]
        self.model, self.personal = case.net(), case.net()
        self.server = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.kept = [copy.deepcopy(self.server) for _ in range(CLIENTS)]

    def round(self) -> None:
        """Run one round."""
        total = [torch.zeros_like(value) for value in self.server]
        for client in range(CLIENTS):
            self.train(client)
            with torch.no_grad():
                parameters = self.model.parameters()
                for update, parameter, value in zip(total, parameters, self.server):
                    update += parameter - value
        for value, update in zip(self.server, total):
            value += update / CLIENTS

    def train(self, client: int) -> None:
        """Run one client's local steps."""
        batch_size, ditto = self.case.batch_size, self.case.ditto
        samples = self.owned[client]
        order = samples[torch.randperm(len(samples))]
        load(self.model, self.server)
        optimizer = sgd(self.model.parameters())
        if ditto:
            load(self.personal, self.kept[client])
            own_optimizer = sgd(self.personal.parameters())
        for begin in range(0, STEPS * batch_size, batch_size):
            index = order[begin : begin + batch_size]
            x, y = self.x[index], self.y[index]
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            optimizer.step()
            if ditto:
                own_optimizer.zero_grad()
                F.cross_entropy(self.personal(x), y).backward()
                self.pull()
                own_optimizer.step()
        if ditto:
            self.kept[client] = [value.detach().clone() for value in self.personal.parameters()]

    @torch.no_grad()
    def pull(self) -> None:
        """Add λ (v − w^t) to the gradient."""
        for parameter, centre in zip(self.personal.parameters(), self.server):
            parameter.grad.add_(parameter - centre, alpha=LAM)


@torch.no_grad()
def load(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values):
        parameter.copy_(value)


class ByPlFed:
    """The same by pl_fed, without a Trainer around it."""

    def __init__(self, case: Case, data: FederatedData, engine: str) -> None:
        self.client: Client
        if case.ditto:
            self.client = Ditto(case.net(), lam=LAM, optimizer=sgd, local_steps=STEPS)
        else:
            self.client = FedAvg(case.net(), optimizer=sgd, local_steps=STEPS)
        self.federation = Federation(All(), engine=engine, seed=0)
        self.federation.setup(self.client, data, "fit")
        self.client.train()
        self.optimizer = self.client.configure_optimizers()
        self.done = 0

    def round(self) -> None:
        """Run one round."""
        self.federation.run_round(self.done, self.optimizer)
        self.done += 1


def data_of(case: Case) -> FederatedData:
    return FederatedData(Noise(case), batch_size=case.batch_size, val_fraction=0, test_fraction=0)


def timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(case: Case, engine: str, seconds: float) -> tuple[float, float]:
    """Return the median milliseconds of a round of both."""
    data = data_of(case)
    hand, ours = ByHand(case, data), ByPlFed(case, data, engine)
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 8:
        times.append((timed(hand.round), timed(ours.round)))
    first, second = zip(*times[3:])  # without the rounds that warm up
    return 1e3 * statistics.median(first), 1e3 * statistics.median(second)


def profile(case: Case, engine: str) -> None:
    ours = ByPlFed(case, data_of(case), engine)
    ours.round()
    with cProfile.Profile() as profiler:
        for _ in range(50):
            ours.round()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--engine",
        default="one_by_one",
        choices=["one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled"],
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    parser.add_argument("--profile", metavar="CASE", choices=CASES, help="profile it instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.profile:
        profile(CASES[arguments.profile], arguments.engine)
        return
    print("| 10 clients × 10 steps | batch | by hand, ms a round | pl_fed, ms a round | ratio |")
    print("|---|---|---|---|---|")
    for case in (CASES[name] for name in arguments.cases):
        hand, ours = compare(case, arguments.engine, arguments.seconds)
        row = f"| {case.name} | {case.batch_size} | {hand:.2f} | {ours:.2f} | {ours / hand:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
