"""HierFAVG: hierarchical federated averaging, with edge servers between the clients and the cloud.

L. Liu, J. Zhang, S. H. Song and K. B. Letaief. "Client-edge-cloud hierarchical federated learning".
ICC 2020. arXiv 1905.06641.

Algorithm 1: an edge server merges the models of its clients after every κ₁ local steps; after every
κ₂ of these merges the cloud merges the models of the edge servers, and sends the mean to all. A
round is a merge of the edge servers, so that κ₁ is the local work of a round and ``edge_rounds`` is
κ₂. The cloud weighs an edge server by the training samples of its clients, as in the paper.

Departs from the paper: by default, all clients of an edge server weigh the same; the weights of the
paper are those of ``aggregators.Mean(weighting="samples")``. ``federation.aggregator`` and
``federation.server_optimizer`` act at each edge server, with a memory of their own; the cloud takes
the mean. An edge server without a client in a round's cohort keeps its model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.clients.clustered import Clustered
from pl_fed.clients.contract import ClientRound
from pl_fed.data.client_data import ClientData
from pl_fed.devices import numbers_on
from pl_fed.types import Population


class HierFedAvg(Clustered):
    """Hierarchical FedAvg: clients train the model of their edge server.

    Clients evaluate and predict with the model of their edge server, which is the cloud's model
    after the last round of each ``edge_rounds``.

    Args:
        net: The net that clients train: see :class:`Client`. Nets with running statistics are
            refused, because edge servers would share them.
        edges: The number of edge servers, at least 2. Of n clients, client k belongs to edge server
            ⌊k · edges / n⌋.
        edge_rounds: κ₂, the rounds of edge servers for each merge of the cloud, at least 1; with 1,
            all edge servers have the same model.
        local_steps: κ₁, the minibatch steps in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``edges`` is below 2 or above the number of clients, ``edge_rounds`` is below
            1, or the net has running statistics.

    Example:
        >>> client = HierFedAvg(nn.Linear(4, 2), edges=3, edge_rounds=5)
        >>> client.num_centers, client.evaluated
        (3, ('personal',))
    """

    new_client_reason = "a client trains the model of its own edge server"

    def __init__(self, net: nn.Module, edges: int = 2, edge_rounds: int = 2, **kwargs: Any) -> None:
        check_integers(2, edges=edges)
        check_integers(1, edge_rounds=edge_rounds)
        super().__init__(net, edges, needs_losses=False, **kwargs)
        self.edge_rounds = edge_rounds
        self.edge_samples = [1] * edges
        self.add_server_state("edge_round", 0.0)  # rounds since the last merge of the cloud

    def draw_centers(self) -> Tensor:
        """Return the first models of the edge servers, [edges, numel]: all are the net."""
        return self.row("global").data.expand(self.num_centers, -1)

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse more edge servers than clients, and count the samples of each edge server."""
        if self.num_centers > population.clients:
            raise ValueError(
                f"Expected argument `edges` to be at most {population.clients}, the number of"
                f" clients, but got {self.num_centers}."
            )
        edges = self._edges_of(torch.arange(population.clients))
        samples = torch.zeros(self.num_centers, dtype=torch.int64)
        self.edge_samples = samples.index_add(0, edges, data.train.sizes).tolist()

    def _edges_of(self, clients: Tensor) -> Tensor:
        """Return the edge server of each client, by ids, int64 [clients]."""
        return clients * self.num_centers // self.population.clients

    def choose_centers(self, client: ClientRound) -> Tensor:
        """Return the client's edge server."""
        return self._edges_of(client.ids)

    def update_body(self, server_states: Mapping[str, Tensor]) -> None:
        """Let the cloud merge the models of edge servers, after every ``edge_rounds`` rounds."""
        counter = server_states["edge_round"]
        counter += 1
        if int(counter) < self.edge_rounds:
            return
        counter.zero_()
        centers = server_states["centers"].view(self.num_centers, -1)
        weights = numbers_on(centers, self.edge_samples, centers.dtype)
        centers.copy_((weights / weights.sum()) @ centers)
