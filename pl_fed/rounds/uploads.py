"""The uploads of a round: attackers forge them, and broken uploads are left out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pl_fed.aggregators import Aggregator, Mean, weights_by_samples
from pl_fed.clients.base import Client
from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.aggregation import row_norm, weighted_sum
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.trained_cohort import GLOBAL_STATISTICS
from pl_fed.types import RoundContext


@dataclass(frozen=True)
class Proposals:
    """Proposals: new server states that clients propose beside their uploads.

    Attributes:
        share: The distribution of the clients over the processes.
        rows: The proposals of this process's clients by name, [clients, length] each.
        names: Names of the states with a proposal in any process.
    """

    share: WorkShare
    rows: Mapping[str, Tensor]
    names: Sequence[str]

    def select(self, selected: Tensor) -> "Proposals":
        """Return the proposals of some clients, by a mask, bool [cohort]."""
        own = self.share.select_own(selected)
        rows = {name: proposal[own] for name, proposal in self.rows.items()}
        return replace(self, share=self.share.select(selected.cpu()), rows=rows)

    def replace_broken(self, valid: Tensor, current: Mapping[str, Tensor]) -> "Proposals":
        """Return proposals in which broken clients propose the server's current states.

        Args:
            valid: A mask of the valid clients, bool [cohort].
            current: The server's current states by name, [length] each.
        """
        own = self.share.select_own(valid)[:, None]
        rows = {name: rows.where(own, current[name]) for name, rows in self.rows.items()}
        return replace(self, rows=rows)


@dataclass(frozen=True)
class Uploads:
    """Uploads: the uploads of a cohort, with the clients' proposals of new server states.

    Attributes:
        share: The distribution of the uploads over the processes.
        rows: The uploads of ``share.clients``, [clients, numel].
        may_change: Whether ``rows`` may change in place: no client holds that tensor.
        weights: Numbers of training samples of the cohort, [cohort].
        context: The context of the cohort for aggregators and attacks.
        proposals: The clients' proposals of new server states.
    """

    share: WorkShare
    rows: Tensor
    may_change: bool
    weights: Tensor
    context: RoundContext
    proposals: Proposals

    def gather(self) -> "Uploads":
        """Return the uploads of the whole cohort in every process, in a tensor that may change."""
        rows = self.share.gather(self.rows if self.may_change else self.rows.clone())
        share = WorkShare.single_process(self.share.cohort)
        return replace(self, share=share, rows=rows, may_change=True)

    def leave_out(self, broken: Tensor, byzantine_clients: ByzantineClients) -> "Uploads":
        """Return the uploads without broken clients; the same object if there are none.

        Args:
            broken: A mask of the broken clients, bool [cohort].
            byzantine_clients: Their expected number among the uploads may change.
        """
        if not broken.any():
            return self
        valid = self.select(~broken)
        context = byzantine_clients.assume_byzantine(valid.context, int(broken.sum()))
        return replace(valid, context=context)

    def select(self, selected: Tensor) -> "Uploads":
        """Return the uploads of some clients, by a mask, bool [cohort]."""
        return Uploads(
            share=self.share.select(selected.cpu()),
            rows=self.rows[self.share.select_own(selected)],
            may_change=True,
            weights=self.weights[selected.to(self.weights.device)],
            context=self.context.select(selected),
            proposals=self.proposals.select(selected),
        )

    def normalize(self, client: Client, aggregator: Aggregator) -> "Uploads":
        """Return the uploads times τ / τ_k or F_k / F, for algorithms that declare these factors.

        τ_k are the clients' amounts of local work (``normalizer``), and F_k the weights of their
        uploads (``weigher``). τ and F are means with the weights of the aggregator. If all numbers
        are equal, the uploads do not change.

        Args:
            client: The algorithm.
            aggregator: The aggregator of the uploads.
        """
        uploads = self
        for name, divides in ((client.normalizer, True), (client.weigher, False)):
            if name:
                uploads = uploads._scale_by_proposals(name, divides, weights_by_samples(aggregator))
        return uploads

    def _scale_by_proposals(self, name: str, divides: bool, by_samples: bool) -> "Uploads":
        """Return the uploads times the clients' numbers over their mean, or the inverse.

        Args:
            name: The server state for which clients propose their numbers.
            divides: Whether the factors are mean / number; otherwise number / mean.
            by_samples: Whether the mean weighs clients by their samples.
        """
        proposals = self.proposals
        own = proposals.rows.get(name, self.rows.new_empty(0, 1))
        numbers = proposals.share.gather(own).flatten().double()
        if not len(numbers):
            return self
        weights = self.weights.to(numbers) if by_samples else torch.ones_like(numbers)
        smallest = numbers.min()
        mean = smallest + ((numbers - smallest) * weights).sum() / weights.sum()
        divisor = numbers if divides else mean
        ratios = mean / numbers if divides else numbers / mean
        factors = torch.where(divisor == 0, 1, ratios).to(self.rows)  # no step: the upload is 0
        own_factors = self.share.select_own(factors)[:, None]
        return replace(self, rows=self.rows * own_factors, may_change=True)

    def distance_to_benign_mean(
        self, update: Tensor, benign: Tensor, aggregator: Aggregator, factor: float
    ) -> Tensor | float:
        """Return the distance of the merged update to the mean of the benign uploads.

        Args:
            update: The merged update, [numel].
            benign: A mask of the benign clients, bool [cohort].
            aggregator: The aggregator that merged the uploads.
            factor: The factor of the uploads in the server's mean: see :func:`mean_factor`.
        """
        num_benign = int(benign.count_nonzero())
        if not num_benign:
            return math.nan
        all_benign = num_benign == len(benign)
        if all_benign and type(aggregator) is Mean and aggregator.mass(self.weights) == num_benign:
            return 0.0  # the update is the mean of the benign uploads
        shares = self.share.select_own(benign).to(self.rows.device) / num_benign
        mean = self.share.processes.sum(weighted_sum(scale(self.rows, factor), shares))
        return row_norm(update - mean)

    def find_weights(
        self, aggregator: Aggregator, reported: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Return the weights of the clients in the aggregator's mean, [cohort].

        ``None`` for equal ones, and for an aggregator that merges no weighted mean.

        Args:
            aggregator: The aggregator that merged the uploads.
            reported: The ids and weights that it reported: see :meth:`RoundContext.weigh_rows`.
                Clients without a weight have 0.
        """
        if not reported:
            return self.weights if weights_by_samples(aggregator) else None
        clients, numbers = reported[-1]
        positions = {client: place for place, client in enumerate(self.share.cohort.tolist())}
        weights = torch.zeros(len(positions), dtype=torch.float64)
        weights[[positions[client] for client in clients.tolist()]] = numbers.cpu().double()
        return weights.to(self.rows.device)

    def update_server_states(
        self,
        client: Client,
        server_states: Mapping[str, Tensor],
        weights: Tensor | None,
    ) -> None:
        """Change the server's states in place: to the means of proposals, and by the uploads.

        States without a proposal stay bit-equal.

        Args:
            client: The algorithm; its ``receive`` returns the changes by the uploads.
            server_states: The states by name, [length] each.
            weights: The weights of the clients in the means of running statistics and of the
                algorithm's ``weighted_states``, at least 0, [cohort]; ``None`` for equal ones.
        """
        share, rows = self.proposals.share, self.proposals.rows
        for name in self.proposals.names:
            current = server_states[name]
            change = rows.get(name, current.expand(0, -1)) - current
            is_population_mean = name in client.state_means.values()
            clients = client.population.cohort if is_population_mean else len(self.share.cohort)
            divisor = float(clients)
            is_weighted = name in (GLOBAL_STATISTICS, *client.weighted_states)
            if is_weighted and weights is not None:
                own = share.select_own(weights)[: len(change), None]
                change = change * own.to(change)
                divisor = float(weights.sum()) or 1.0
            current += share.processes.sum(change.sum(0)) / divisor
        for name, change in client.receive(self.share.clients, self.rows).items():
            server_states[name].add_(self.share.processes.sum(change))


def mean_factor(client: Client, num_uploads: int) -> float:
    """Return the factor of the uploads in the server's mean.

    If uploads are changes of a mean over all clients, it is uploads / expected cohort. Then neither
    a left-out client nor a cohort of another size changes the weight of a client in this mean.

    Args:
        client: The algorithm.
        num_uploads: Number of valid uploads.
    """
    population = client.population
    if client.mean_of == "clients" and (client.uploads_changes or not population.is_full):
        return num_uploads / population.cohort
    return 1.0


def scale(rows: Tensor, factor: float) -> Tensor:
    """Return rows times a factor; the same tensor for a factor of 1."""
    return rows if factor == 1 else rows * factor
