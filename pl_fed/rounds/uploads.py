"""The uploads of a round: attackers forge them, and broken uploads are left out."""

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from pl_fed.aggregators import Aggregator, Mean, weights_by_samples
from pl_fed.clients.base import Client
from pl_fed.devices import to_device
from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.aggregation import row_norm, weighted_sum
from pl_fed.nets.rows import finite_rows
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.server import Server
from pl_fed.rounds.trained_cohort import GLOBAL_STATISTICS, TrainedCohort
from pl_fed.types import Batch, RoundContext


class Uploads:
    """Uploads: the uploads of a cohort, with its proposals of new server states.

    Args:
        trained: The cohort after local training.
        context: The context of the round for aggregators and attacks.
        sizes: Numbers of training samples of all clients, int64 [all clients].
        byzantine_clients: The Byzantine clients and their attack.

    Attributes:
        share: The distribution of the uploads over the processes, without left-out clients.
        rows: This process's uploads, [clients, numel]; after an attack all uploads, [cohort,
            numel].
        context: The context of the round, without left-out clients.
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
        self._all_valid = not trained.num_broken  # known without waiting for the device
        self._sizes = sizes
        self._byzantine_clients = byzantine_clients
        self._training_share = trained.share
        self._factor = 1.0  # factor of the rows in the server's mean

    @property
    def weights(self) -> Tensor:
        """Numbers of training samples of the cohort, without left-out clients, [cohort]."""
        return to_device(self._sizes[self.share.cohort], self.rows)

    @property
    def contributions(self) -> Tensor:
        """The uploads times their factor in the server's mean: see :meth:`leave_out_broken`."""
        return self.rows if self._factor == 1 else self.rows * self._factor

    def forge(
        self,
        server: Server,
        server_states: Mapping[str, Tensor],
        net: Callable[[], nn.Module],
        samples: Callable[[int], Batch],
        hides_cohort: bool = False,
    ) -> None:
        """Let the attackers replace their uploads, equally in every process.

        An attacker whose own upload is broken may forge a valid upload. It then proposes the
        server's current states.

        Args:
            server: The server. Attackers may simulate a merge by its aggregator.
            server_states: The server's current states by name, [length] each.
            net: Returns a copy of the global model, for attackers that train it.
            samples: Returns the training samples of a client by id, for attackers that train.
            hides_cohort: Whether attackers know only themselves of the cohort.
        """
        context, valid = self.context, self._valid

        def simulate_merge(rows: Tensor, valid: Tensor) -> Tensor:
            """Return the update that the server would merge from the valid uploads."""
            valid_context = self._select_context(context, valid)
            weights = self._sizes[valid_context.clients].to(rows.device)
            rows = rows if valid.all() else rows[valid]
            return server.simulate_merge(rows, weights, valid_context)

        rows = self.share.gather(self.rows if self._owns_rows else self.rows.clone())
        self.rows = self._byzantine_clients.forge(
            rows, valid, context, simulate_merge, net, samples, hides_cohort
        )
        if not valid.all():
            own_valid = self._select_own(valid)[:, None]
            self._proposals = {
                name: proposal.where(own_valid, server_states[name])
                for name, proposal in self._proposals.items()
            }
        attackers = self._byzantine_clients.mark_attackers(context.clients, context.round)
        # a finite forged upload is valid even if the attacker's own upload is broken
        self._valid = finite_rows(self.rows) & (valid | attackers.to(valid.device))
        self._all_valid = False  # unknown
        self.share = WorkShare.single_process(self.share.cohort)

    def leave_out_broken(self, client: Client) -> int:
        """Leave out broken uploads and their clients' proposals, and return the number of them.

        If uploads are changes of a mean over all clients, the valid uploads are scaled by valid
        clients / expected cohort. Then neither a left-out client nor a cohort of another size
        changes the weight of a client in this mean.
        """
        num_broken = 0 if self._all_valid else self._leave_out(~self._valid)
        population = client.population
        if client.mean_of == "clients" and (client.uploads_changes or not population.is_full):
            self._factor = len(self.share.cohort) / population.cohort
        return num_broken

    def _leave_out(self, broken: Tensor) -> int:
        """Leave out clients by a mask, bool [cohort], and return the number of them."""
        if not broken.any():
            return 0
        valid = ~broken
        self.rows = self.rows[valid[self.share.is_worker.to(valid.device)]]
        own_valid = self._select_own(valid)
        self._proposals = {name: rows[own_valid] for name, rows in self._proposals.items()}
        self._proposers = self._proposers[own_valid.cpu()]
        self.context = self._select_context(self.context, valid)
        self.share = self.share.select(valid.cpu())
        return int(broken.sum())

    def _select_own(self, mask: Tensor) -> Tensor:
        """Return a mask [cohort] for the clients that this process trained, [clients]."""
        return mask[self._training_share.is_worker.to(mask.device)]

    def _select_context(self, context: RoundContext, valid: Tensor) -> RoundContext:
        """Return the context without the clients whose uploads are broken.

        Args:
            context: The context of the cohort.
            valid: A mask of the valid uploads, bool [cohort].
        """
        num_broken = int((~valid).sum())
        return self._byzantine_clients.assume_byzantine(context.select(valid), num_broken)

    def distance_to_benign_mean(
        self, update: Tensor, benign: Tensor, aggregator: Aggregator
    ) -> Tensor | float:
        """Return the distance of the merged update to the mean of the benign uploads.

        Args:
            update: The merged update, [numel].
            benign: A mask of the benign clients, without left-out clients, bool [cohort].
            aggregator: The aggregator that merged the uploads.
        """
        num_benign = int(benign.count_nonzero())
        if not num_benign:
            return math.nan
        all_benign = num_benign == len(benign)
        if all_benign and type(aggregator) is Mean and aggregator.mass(self.weights) == num_benign:
            return 0.0  # the update is the mean of the benign uploads
        shares = benign[self.share.is_worker].to(self.rows.device) / num_benign
        mean = self.share.processes.sum(weighted_sum(self.contributions, shares))
        return row_norm(update - mean)

    def update_server_states(
        self,
        client: Client,
        server_states: Mapping[str, Tensor],
        proposed: Iterable[str],
        aggregator: Aggregator,
    ) -> None:
        """Change the server's states in place: to the means of proposals, and by the uploads.

        If the aggregator weights clients by samples, the mean of running statistics does too.

        Args:
            client: The algorithm; its ``receive`` returns the changes by the uploads.
            server_states: The states by name, [length] each.
            proposed: Names of the states with a proposal in any process. The means leave all other
                states bit-equal.
            aggregator: The aggregator of the uploads.
        """
        for name in proposed:
            current = server_states[name]
            change = self._proposals.get(name, current.expand(0, -1)) - current
            is_population_mean = name in client.state_means.values()
            clients = client.population.cohort if is_population_mean else len(self.share.cohort)
            divisor = float(clients)
            if name == GLOBAL_STATISTICS and weights_by_samples(aggregator):
                change = change * self._sizes[self._proposers[: len(change)], None].to(change)
                divisor = float(self.weights.sum())
            current += self._training_share.processes.sum(change.sum(0)) / divisor
        for name, change in client.receive(self.share.clients, self.rows).items():
            server_states[name].add_(self.share.processes.sum(change))
