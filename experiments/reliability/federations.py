"""Small federations: six or eleven clients with a few random samples each."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import pl_fed.clients
from pl_fed import EngineOptions, Federation
from pl_fed.clients import Client
from pl_fed.data import Arrays, DataSource, FederatedData
from pl_fed.engine import LocalSettings
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import Sampler

FEATURES, CLASSES = 4, 3
ARGUMENTS: dict[str, dict[str, Any]] = {"LpProj": {"dimensions": 7}}
ADAPTERS = "FedExLoRA"  # needs a net with adapters
ALGORITHMS = {
    name: kind
    for name, kind in inspect.getmembers(pl_fed.clients, inspect.isclass)
    if issubclass(kind, Client) and not inspect.isabstract(kind) and name != ADAPTERS
}


class Given(DataSource):
    """Given: arrays as a data set."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def load(self) -> Arrays:
        """Return the arrays."""
        return self.arrays


class Cohorts(Sampler):
    """Cohorts: draws the given cohorts, round after round."""

    has_fixed_size = False

    def __init__(self, cohorts: Sequence[Sequence[int]]) -> None:
        self.cohorts = cohorts
        self.round = 0

    def size_of_cohort(self, num_clients: int) -> int:
        """Return the size of the largest cohort."""
        return max(map(len, self.cohorts))

    def size_probabilities(self, num_clients: int) -> Tensor:
        """Return the shares of the sizes, float64 [num_clients + 1]."""
        sizes = torch.tensor([len(cohort) for cohort in self.cohorts])
        return torch.bincount(sizes, minlength=num_clients + 1).double() / len(sizes)

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the next cohort."""
        self.round += 1
        return torch.tensor(self.cohorts[self.round - 1])


def draw_samples(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of a client."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def make_data(
    samples: Sequence[tuple[Tensor, Tensor]], root_samples: int = 0, last: int = 0
) -> FederatedData:
    """Return a federation's data.

    Args:
        samples: Each client's inputs and classes.
        root_samples: The number of samples of the server.
        last: The client with the last samples. Ids of samples key the draws of attacks on data:
            the ids of the other clients do not depend on its number of samples.
    """
    order = sorted(range(len(samples)), key=lambda client: client == last)
    sizes = torch.tensor([len(samples[client][1]) for client in order])
    owners = torch.tensor(order).repeat_interleave(sizes)
    x, y = (torch.cat(column) for column in zip(*(samples[client] for client in order)))
    return FederatedData(
        Given(Arrays(x, y, owners, num_classes=CLASSES)),
        batch_size=4,
        val_fraction=0.0,
        test_fraction=0.0,
        root_samples=root_samples,
        seed=0,
    )


def make_client(kind: type[Client], **options: Any) -> Client:
    """Return an algorithm on a small net."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    arguments = {**ARGUMENTS.get(kind.__name__, {}), **options}
    return kind(net, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **arguments)


class Rounds:
    """Rounds of a federation without a trainer.

    Args:
        client: The algorithm; it is copied.
        data: The data.
        engine: The name of the engine.
        chunk_size: The number of clients that the engine trains at once.
        **settings: Further arguments of the federation.
    """

    def __init__(
        self,
        client: Client,
        data: FederatedData,
        engine: str = "one_by_one",
        chunk_size: int | None = 1,
        **settings: Any,
    ) -> None:
        self.client = copy.deepcopy(client)
        options = {"seed": 0, "max_rejected": 1.0, "model_selection": None, **settings}
        self.federation = Federation(engine=EngineOptions(engine, chunk_size), **options)
        run_settings = RunSettings(LocalSettings(nullcontext), rounds=4)
        self.federation.setup(self.client, data, "fit", settings=run_settings)
        self.client.train()
        self.optimizer = self.client.configure_optimizers()

    def run(self, round: int) -> dict[str, Any]:
        """Run a round, and return its report."""
        return self.federation.run_round(round, self.optimizer)

    @property
    def released(self) -> list[Tensor]:
        """The global model, its running statistics, and the server's states."""
        rows = [self.client.row("global").data, self.client.statistics("global").data]
        return [*rows, *self.federation.server_states.values()]

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the released tensors, all clients' states and the server's memory."""
        federation = self.federation
        clients = torch.arange(federation.data.num_clients)
        store = {name: federation.store.read(name, clients) for name in federation.store.defaults}
        memory = federation.server.aggregator.state_dict()
        memory = {name: value for name, value in memory.items() if isinstance(value, Tensor)}
        released = {f"released {place}": row.clone() for place, row in enumerate(self.released)}
        return {**released, **store, **{name: value.clone() for name, value in memory.items()}}
