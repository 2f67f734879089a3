"""The centers of a clustered algorithm: their losses on the clients' data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from pl_fed.clients.model_guard import restore_models
from pl_fed.distributed.work_share import RemoteRows
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.rounds.client_states import ClientStates


class Centers:
    """Centers: the global models of a clustered algorithm, lent to its only global module.

    Args:
        states: The clients' data and states; the server's state ``centers`` has the rows.
        evaluator: Measures losses.
    """

    def __init__(self, states: ClientStates, evaluator: Evaluator) -> None:
        self.states = states
        self.client = states.client
        self.evaluator = evaluator
        self.settings = states.settings

    @property
    def rows(self) -> Tensor:
        """The centers, [centers, numel]: a view of the server's state."""
        return self.states.server_states["centers"].view(self.client.num_centers, -1)

    def measure(self, clients: Tensor) -> Tensor | None:
        """Return the mean loss of each center over each client's training data.

        Args:
            clients: Client ids, int64 [clients].

        Returns:
            [clients, centers]; ``None`` for an algorithm that reads no such losses.
        """
        client = self.client
        if not client.measures_centers:
            return None
        row, losses = client.row("global").data, []
        with restore_models(client, ["global"]), self.settings.autocast(), torch.no_grad():
            for center in self.rows:
                row.copy_(center)
                losses.append(self.evaluator.start_losses(self.states.data, clients, {}))
        return torch.stack(losses, dim=1).to(row)

    def measure_own(
        self, measure: Callable[[Tensor], Tensor], clients: Tensor, remote: RemoteRows
    ) -> Tensor:
        """Return a measure of the global model on clients' data: for each, that of its own center.

        Args:
            measure: Returns a measure of the global module, [n, ...], by the ids of n clients.
            clients: Client ids, int64 [clients].
            remote: Rows of clients with another home process.
        """
        if not self.client.num_centers or not len(clients):
            return measure(clients)
        start = self.states.begin(clients, remote=remote, center_losses=self.measure(clients))
        group = cast(Tensor, start.group).cpu()
        row, parts, places = self.client.row("global").data, [], []
        with restore_models(self.client, ["global"]):
            for number in group.unique().tolist():
                own = (group == number).nonzero().flatten()
                row.copy_(self.rows[number])
                parts.append(measure(clients[own]))
                places.append(own)
        order = torch.cat(places).argsort()
        return torch.cat(parts)[order.to(parts[0].device)]

    @contextmanager
    def lend(self, group: int) -> Iterator[Tensor]:
        """Let the global module be a center within the block, and keep what the block makes of it.

        Args:
            group: The center.

        Yields:
            The row of the global module.
        """
        row, center = self.client.row("global").data, self.rows[group]
        before = row.clone()
        row.copy_(center)
        try:
            yield row
            center.copy_(row)
        finally:
            row.copy_(before)
