"""Memory of an aggregator for each client, by the client's id."""

import torch
from torch import Tensor

from pl_fed.aggregators.memory import Memory


class ClientMemory(Memory):
    """Client memory: one row for each client that took part in a round so far.

    A client that returns after some rounds finds its own row. The memory grows with the clients
    that took part: m · d numbers for m clients with rows of d numbers.

    Attributes:
        ids: Ids of the clients, int64 [m], in the order of their first rounds.
        rows: The rows of these clients, [m, d].

    Example:
        >>> memory = ClientMemory()
        >>> memory.write(torch.tensor([7, 2]), torch.tensor([[1.0], [3.0]]))
        >>> memory.read(torch.tensor([2, 5]), default=torch.zeros(1))
        tensor([[3.],
                [0.]])
    """

    ids: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_memory("ids", torch.empty(0, dtype=torch.int64))
        self.add_memory("rows")

    def contains(self, clients: Tensor) -> Tensor:
        """Return whether each client has a row, bool [n] on the CPU."""
        return torch.isin(clients.cpu(), self.ids.cpu())

    def read(self, clients: Tensor, default: Tensor) -> Tensor:
        """Return a copy of the rows of clients, [n, d].

        Args:
            clients: Client ids, int64 [n].
            default: The row of a client that has none yet, [d].
        """
        rows = default.repeat(len(clients), 1)
        has_row = self.contains(clients)
        if has_row.any():
            positions = self._find_positions(clients[has_row])
            rows[has_row.to(rows.device)] = self.rows[positions.to(self.rows.device)].to(rows)
        return rows

    def write(self, clients: Tensor, rows: Tensor) -> None:
        """Keep a copy of the rows [n, d] of clients [n] with different ids."""
        is_new = ~self.contains(clients)
        if is_new.any():
            self.ids = torch.cat([self.ids, clients[is_new].to(self.ids)])
            new_rows = rows.new_zeros(int(is_new.sum()), rows.shape[1])
            self.rows = torch.cat([self.rows.to(rows), new_rows]) if len(self.rows) else new_rows
        positions = self._find_positions(clients).to(self.rows.device)
        self.rows[positions] = rows.detach().to(self.rows.device)

    def _find_positions(self, clients: Tensor) -> Tensor:
        """Return the positions of clients in :attr:`ids`, int64 [n]."""
        position = {client: index for index, client in enumerate(self.ids.tolist())}
        return torch.tensor([position[client] for client in clients.tolist()], dtype=torch.int64)
