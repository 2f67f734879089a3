"""A mixture of all clients that an aggregator keeps between rounds."""

import torch
from torch import Tensor

from pl_fed.aggregators.memory import Memory
from pl_fed.types import RoundContext


class ClientMixture(Memory):
    """Client mixture: one share for each client of the federation, at least 0, with sum 1.

    At first all shares are equal. A client that joins later gets the share 1 / K of the K clients.
    One that leaves keeps a share.

    Attributes:
        shares: The shares by client id, float64 [K].

    Example:
        >>> mixture = ClientMixture()
        >>> mixture.admit_clients(torch.tensor([1]), RoundContext(num_clients=4))
        >>> mixture.normalize_shares(torch.tensor([3, 1]))
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    shares: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_memory("shares", torch.empty(0, dtype=torch.float64))

    def admit_clients(self, clients: Tensor, context: RoundContext) -> None:
        """Give a share to each client of the federation that has none.

        Args:
            clients: Ids of the clients of a round, int64 [n], n at least 1.
            context: The context of the round.
        """
        before, after = len(self.shares), max(context.num_clients, int(clients.max()) + 1)
        if after > before:
            new = self.shares.new_full((after - before,), 1 / after)
            self.shares = torch.cat([self.shares * (before / after), new])

    def normalize_shares(self, clients: Tensor) -> Tensor:
        """Return the shares of some clients, divided by their sum, float64 [n].

        If all of them are 0, so is the result.

        Args:
            clients: Client ids, int64 [n].
        """
        own = self.shares[clients.to(self.shares.device)]
        total = own.sum()
        return own / total if total > 0 else own
