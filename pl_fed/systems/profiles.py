"""The clients' speed, bandwidth and availability, and their coins of each round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_fed.random import key, normals, uniforms
from pl_fed.systems.settings import COLUMNS, PATH, Systems, describe_range, is_valid
from pl_fed.systems.trace import Trace


class ClientProfiles:
    """Client profiles: the numbers of all clients, in each round.

    A number of a distribution is keyed by (seed, column, client). A coin is keyed by (seed,
    purpose, round, client).

    Args:
        settings: The section.
        num_clients: Number of clients.
        owners: Names of the owners of each client's samples, also of held-out clients; may be
            empty.
        seed: The seed of the federation.
        num_held_out: Number of held-out clients, which a trace may name.

    Raises:
        ValueError: If a number is out of range, or the trace does not fit the clients.
    """

    def __init__(
        self,
        settings: Systems,
        num_clients: int,
        owners: Sequence[Sequence[str]],
        seed: int,
        num_held_out: int = 0,
    ) -> None:
        self.seed = seed
        self.jitter = settings.jitter
        self._trace: Trace | None = None
        if settings.trace is not None:
            self._trace = Trace.read(settings.trace, num_clients, owners, num_held_out)
        self._constant: dict[str, Tensor] = {}
        for column in COLUMNS:
            distribution = settings.distribution(column)
            if distribution is not None:
                shares = self._draw(f"systems {column}", torch.arange(num_clients))
                values = distribution.quantiles(shares).double()
                _check_values(column, values, num_clients)
                self._constant[column] = values

    def select(self, clients: Tensor, round: int) -> dict[str, Tensor]:
        """Return the numbers of clients in a round by column, float64 [clients] each.

        Args:
            clients: Ids, int64 [clients].
            round: The round, from 0.
        """
        numbers = {name: values[clients] for name, values in self._constant.items()}
        if self._trace is not None:
            numbers |= self._trace.select(clients, round)
        if self.jitter:
            z = normals(key(self.seed, "systems jitter", round), clients).double()
            numbers["speed"] = numbers["speed"] / (self.jitter * z).exp()
        return numbers

    def draw_coins(self, purpose: str, clients: Tensor, round: int) -> Tensor:
        """Return a number in (0, 1) for each client in a round, float64 [clients]."""
        return self._draw(f"systems {purpose} coins", clients, round)

    def _draw(self, purpose: str, clients: Tensor, *parts: int) -> Tensor:
        """Return numbers of (0, 1), the middles of 2²⁴ equal parts, float64 [clients]."""
        return uniforms(key(self.seed, purpose, *parts), clients).double() + 2.0**-25


def _check_values(column: str, values: Tensor, num_clients: int) -> None:
    """Refuse a distribution with a number out of range."""
    if values.shape != (num_clients,):
        raise ValueError(
            f"Expected `{PATH}.{column}` to give one number for each of {num_clients} clients but"
            f" got shape {list(values.shape)}: return one quantile for each share."
        )
    for client, value in enumerate(values.tolist()):
        if not is_valid(column, value):
            raise ValueError(
                f"Expected `{PATH}.{column}` to give numbers {describe_range(column)} but client"
                f" {client} has {value:.6g}: choose a distribution in this range."
            )
