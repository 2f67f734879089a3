"""All algorithms of the package, for tests of privacy."""

import inspect

import pytest
from small_federations import seeded, sgd
from torch import nn

import pl_fed.clients
from pl_fed.clients import Client
from pl_fed.models import LoRA
from pl_fed.types import Population

CLIENTS = 4
ARGUMENTS = {"LpProj": {"dimensions": 7}}
ALGORITHMS = {
    kind.__name__: kind
    for _, kind in inspect.getmembers(pl_fed.clients, inspect.isclass)
    if issubclass(kind, Client) and not inspect.isabstract(kind)
}


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def net_with_adapters():
    """Return a net for algorithms of adapters."""
    pytest.importorskip("peft", reason="needs adapters")
    return LoRA(net(), r=2, target_modules=["0"])


NETS = {"FedExLoRA": net_with_adapters}  # nets of algorithms that take no other


def make(name, **options):
    """Return an algorithm on a small net."""
    arguments = {**ARGUMENTS.get(name, {}), **options}
    client = ALGORITHMS[name](seeded(NETS.get(name, net)), optimizer=sgd(0.3), **arguments)
    client.population = Population(CLIENTS, CLIENTS, 24)
    return client
