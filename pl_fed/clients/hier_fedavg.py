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
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, ModelRows
from pl_fed.data.client_data import ClientData
from pl_fed.devices import numbers_on
from pl_fed.types import Batch, Population


class HierFedAvg(Client):
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
        super().__init__(net, models={"personal": Model(kept=False)}, **kwargs)
        if names := self.statistics("global").layout.names:
            raise ValueError(
                "Expected a net without running statistics for HierFedAvg, whose edge servers would"
                f" share them, but got {', '.join(names)}: use GroupNorm."
            )
        self.edge_rounds = edge_rounds
        self.edge_samples = [1] * edges
        self.add_centers(edges, self._copy_global_model, needs_losses=False)
        self.add_server_state("edge_round", 0.0)  # rounds since the last merge of the cloud

    def _copy_global_model(self) -> Tensor:
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

    def begin(self, client: ClientRound) -> None:
        """Take the model of the client's edge server."""
        client.group = self._edges_of(client.ids)
        nothing = client.models["personal"].statistics
        client.models["personal"] = ModelRows(self.centers_of(client)[client.group], nothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return F_k on the minibatch."""
        return self.loss("personal", batch)

    def end_round(self, client: ClientRound) -> Tensor:
        """Upload the change of the edge server's model."""
        return client.models["personal"].parameters - self.centers_of(client)[client.group]

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

    @property
    def shared_numbers(self) -> int:
        """How many numbers of one model cross the network between a client and its edge server."""
        return len(self.row("global").data)

    @property
    def upload_numbers(self) -> int:
        """How many numbers a client sends in a round: the change of one model."""
        return self.shared_numbers

    @property
    def download_numbers(self) -> int:
        """How many numbers a client receives in a round: one model."""
        return self.shared_numbers
