"""``python experiments/benchmarks/round_costs.py``: what does a defence cost beside Krum?

Defences with memory or with models take turns with Krum in the same process, over rounds of one
simulated federation: an MLP of 100,180 parameters, 20 clients, one thread. The script prints the
median processor time of a merge in milliseconds over the last ten rounds, and as a multiple of
Krum's.
"""

import copy
import statistics
import time

import torch
from torch import Tensor, nn

from pl_fed.aggregators import (
    RFLBAT,
    Aggregator,
    DeepSight,
    FLDetector,
    FoolsGold,
    FreqFed,
    Krum,
    NguyenFlame,
)
from pl_fed.nets.rows import RowLayout
from pl_fed.types import RoundContext

CLIENTS, ROUNDS, COUNTED = 20, 34, 10


class Simulation:
    """Rounds with random uploads and a global model that moves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(784, 126), nn.ReLU(), nn.Linear(126, 10))
        self.layout = RowLayout.from_parameters(self.net)
        self.model = nn.utils.parameters_to_vector(self.net.parameters()).detach()

    def copy_net(self, update: Tensor | None = None) -> nn.Module:
        """Return a copy of the net plus an update [d]."""
        net = copy.deepcopy(self.net)
        row = self.model if update is None else self.model + update
        nn.utils.vector_to_parameters(row, net.parameters())
        return net

    def draw_round(self, number: int) -> tuple[Tensor, RoundContext]:
        """Return the uploads [n, d] of a round and its context, and move the model."""
        common = 0.01 * torch.randn(self.layout.numel)
        uploads = common + 0.02 * torch.randn(CLIENTS, self.layout.numel)
        context = RoundContext(
            round=number,
            num_byzantine=CLIENTS // 5,
            clients=torch.arange(CLIENTS),
            num_clients=CLIENTS,
            broadcast=self.model.clone(),
            layout=self.layout,
            net=self.copy_net,
            inputs=torch.empty(0, 784),
        )
        self.model = self.model + common
        return uploads, context


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    defences: dict[str, Aggregator] = {
        "Krum": Krum(),
        "NguyenFlame": NguyenFlame(),
        "FoolsGold": FoolsGold(),
        "RFLBAT": RFLBAT(),
        "FLDetector": FLDetector(),
        "FreqFed": FreqFed(),
        "DeepSight, 1,000 inputs": DeepSight(num_inputs=1000),
        "DeepSight, 20,000 inputs": DeepSight(),
    }
    simulation, weights = Simulation(), torch.ones(CLIENTS)
    seconds: dict[str, list[float]] = {name: [] for name in defences}
    for number in range(ROUNDS):
        uploads, context = simulation.draw_round(number)
        for name, defence in defences.items():
            if name.startswith("DeepSight, 20") and number < ROUNDS - 1:
                continue  # it has no memory, and takes seconds
            started = time.process_time()
            defence(uploads, weights, context)
            seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(times[-COUNTED:]) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:26} {1e3 * median:8.1f} ms {median / medians['Krum']:8.1f} times Krum")


if __name__ == "__main__":
    main()
