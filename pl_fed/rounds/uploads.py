"""The uploads of a round on their way to the server: forged by attackers, left out if broken."""

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from pl_fed.aggregators import Aggregator, Mean, weights_by_samples
from pl_fed.clients.base import Client
from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.nets.rows import finite_rows
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.server import Server
from pl_fed.rounds.trained_cohort import GLOBAL_STATISTICS, TrainedCohort
from pl_fed.types import Batch, RoundContext


class Uploads:
    """The uploads of a cohort, with what its clients propose for the server's states.

    Args:
        trained: The cohort after its local work.
        context: What aggregators and attacks know of the round.
        sizes: Training samples of all clients, int64 [clients].
        byzantine_clients: The Byzantine clients, of which it says how many to expect.

    Attributes:
        share: Which process holds which upload, of the clients that are not left out.
        rows: This process's uploads [clients, numel]; all uploads, once they are forged.
        context: The round, of the clients that are not left out.
    """

    def __init__(
        self,
        trained: TrainedCohort,
        context: RoundContext,
        sizes: Tensor,
        byzantine_clients: ByzantineClients,
    ) -> None:
        self.share = trained.share
        self.context = context
        self._proposers = self.share.clients
        if trained.own.uploads is None:  # this process's clients sent nothing
            self.rows = context.broadcast.expand(len(self._proposers), -1)
        else:
            self.rows = trained.own.uploads
        self._owns_rows = trained.own.buffer is not None  # else the clients may keep that tensor
        self._proposals = trained.own.proposals
        self._valid = trained.valid
        self._sizes = sizes
        self._byzantine_clients = byzantine_clients
        self._training_share = trained.share
        self._cohort_size = len(self.share.cohort)
        self._factor = 1.0  # of the rows in a mean

    @property
    def weights(self) -> Tensor:
        """Training samples of each client that is not left out, of all processes, [clients]."""
        return self._sizes[self.share.cohort].to(self.rows.device)

    @property
    def contributions(self) -> Tensor:
        """The rows as they count in the server's mean: see :meth:`leave_out_broken`."""
        return self.rows if self._factor == 1 else self.rows * self._factor

    def forge(
        self,
        server: Server,
        server_states: Mapping[str, Tensor],
        net: Callable[[], nn.Module],
        samples: Callable[[int], Batch],
    ) -> None:
        """Let the attackers replace their uploads: in every process alike.

        Args:
            server: The server, whose aggregator attackers may try.
            server_states: The server's current states. A broken client, whose forged upload may be
                valid, proposes no change of them.
            net: Returns a copy of the global model, for attackers that train in their own way.
            samples: Returns the training samples of a client, likewise.
        """
        context, valid = self.context, self._valid

        def simulate_merge(rows: Tensor, valid: Tensor) -> Tensor:
            """Return what the server would make of the valid ones of some uploads."""
            merged = self._select_context(context, valid)
            weights = self._sizes[merged.clients].to(rows.device)
            return server.simulate(rows if valid.all() else rows[valid], weights, merged)

        rows = self.share.gather(self.rows if self._owns_rows else self.rows.clone())
        self.rows = self._byzantine_clients.forge(
            rows, valid, context, simulate_merge, net, samples
        )
        if not valid.all():
            valid_here = valid[self._training_share.mine.to(valid.device), None]
            self._proposals = {
                name: proposal.where(valid_here, server_states[name])
                for name, proposal in self._proposals.items()
            }
        forged = self._byzantine_clients.attacks(context.clients, context.round).to(valid.device)
        self._valid = finite_rows(self.rows) & (valid | forged)  # a forged one counts by itself
        self.share = WorkShare.alone(self.share.cohort)

    def leave_out_broken(self, client: Client) -> int:
        """Leave out broken uploads with their proposals, and return their number.

        Where uploads are changes of a mean over all clients, the valid ones count as parts of the
        whole cohort: a client that is left out changes nothing.
        """
        valid = self._valid
        if valid.all():
            return 0
        rejected = int((~valid).sum())
        self.rows = self.rows[valid[self.share.mine.to(valid.device)]]
        valid_here = valid[self._training_share.mine.to(valid.device)]
        self._proposals = {name: rows[valid_here] for name, rows in self._proposals.items()}
        self._proposers = self._proposers[valid_here.cpu()]
        self.context = self._select_context(self.context, valid)
        self.share = self.share.select(valid.cpu())
        partial = client.population.cohort < client.population.clients
        if client.mean_of == "clients" and (client.uploads_changes or partial):
            self._factor = len(self.share.cohort) / self._cohort_size
        return rejected

    def _select_context(self, context: RoundContext, valid: Tensor) -> RoundContext:
        """Return the round of the clients whose uploads are valid, bool [cohort]."""
        return self._byzantine_clients.expect(context.of(valid), int((~valid).sum()))

    def distance_to_benign_mean(
        self, update: Tensor, benign: Tensor, aggregator: Aggregator
    ) -> Tensor | float:
        """Return the distance of the merged update to the mean of the benign uploads.

        Args:
            update: The merged update, [numel].
            benign: Which of the clients that are not left out are benign, bool [clients].
            aggregator: The aggregator that merged them.
        """
        number = int(benign.count_nonzero())
        if not number:
            return math.nan
        all_benign = number == len(benign)
        if all_benign and type(aggregator) is Mean and aggregator.mass(self.weights) == number:
            return 0.0  # the update is that mean
        shares = benign[self.share.mine].to(self.rows.device) / number
        mean = self.share.processes.sum(weighted_sum(self.contributions, shares))
        distance: Tensor = (update - mean).norm()
        return distance

    def update_server_states(
        self,
        client: Client,
        server_states: Mapping[str, Tensor],
        proposed: Iterable[str],
        aggregator: Aggregator,
    ) -> None:
        """Move the server's states, in place: to the means of proposals, and by the uploads.

        Args:
            client: The algorithm.
            server_states: The states by name, [length] each.
            proposed: Names of the states of which a client of any process proposes a change. The
                others stay as they are, bit for bit.
            aggregator: The aggregator: where it is a mean weighted by samples, so is that of
                running statistics.
        """
        for name in proposed:
            current = server_states[name]
            change = self._proposals.get(name, current.expand(0, -1)) - current
            mean_of_all = name in client.state_means.values()
            number = float(self._cohort_size if mean_of_all else len(self.share.cohort))
            if name == GLOBAL_STATISTICS and weights_by_samples(aggregator):
                change = change * self._sizes[self._proposers[: len(change)], None].to(change)
                number = float(self.weights.sum())
            current += self._training_share.processes.sum(change.sum(0)) / number
        for name, change in client.receive(self.share.clients, self.rows).items():
            server_states[name].add_(self.share.processes.sum(change))
