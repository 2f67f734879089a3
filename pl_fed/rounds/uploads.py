"""The uploads of a round on their way to the server: forged by attackers, left out if broken."""

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from pl_fed.aggregators import Aggregator, Mean, counts_samples
from pl_fed.clients.base import Client
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.functional.rows import finite_rows
from pl_fed.rounds.adversary import Adversary
from pl_fed.rounds.server import Server
from pl_fed.rounds.sharing import Sharing
from pl_fed.rounds.trained import GLOBAL_STATISTICS, Trained
from pl_fed.types import RoundContext


class Uploads:
    """The uploads of a cohort, and what its clients propose for what the server keeps.

    Args:
        sharing: Which process has trained whom.
        trained: What came of this process's clients.
        whole: Which of the cohort's uploads are whole, bool [cohort].
        context: The round, of the whole cohort.
        sizes: Training samples of all clients, int64 [clients].
        expecting: Says of a context how many byzantine uploads are to be expected, where so many
            others are broken.

    Attributes:
        sharing: The same of those that are still in.
        rows: Those of this process's clients [clients, numel]; those of all, once they are forged.
        context: The round, of those that are still in.
    """

    def __init__(
        self,
        sharing: Sharing,
        trained: Trained,
        whole: Tensor,
        context: RoundContext,
        sizes: Tensor,
        expecting: Callable[[RoundContext, int], RoundContext],
    ) -> None:
        self.sharing = sharing
        self.context = context
        none = context.broadcast.expand(int(sharing.mine.sum()), -1)  # where they sent nothing
        self.rows = none if trained.uploads is None else trained.uploads
        self._trained = trained
        self._proposals = trained.proposals
        self._whole = whole
        self._sizes = sizes
        self._expecting = expecting
        self._mine, self._processes = sharing.mine, sharing.processes
        self._cohort = len(sharing.cohort)
        self._part = 1.0  # of the cohort that the rows count for
        self._ids = sharing.cohort[sharing.mine]  # whose proposals there are

    @property
    def weights(self) -> Tensor:
        """Training samples of each client that is still in, of all processes, [clients]."""
        return self._sizes[self.sharing.cohort].to(self.rows.device)

    @property
    def changes(self) -> Tensor:
        """The rows as they count in a mean over those that are still in: see :meth:`leave_out`."""
        return self.rows if self._part == 1 else self.rows * self._part

    def forge(self, adversary: Adversary, server: Server, kept: Mapping[str, Tensor]) -> None:
        """Let attackers, who may look at all uploads, replace theirs: in every process alike.

        Args:
            adversary: They.
            server: The server, with which they may try uploads out.
            kept: What the server keeps, by name: broken clients, who may forge an upload that is
                whole, propose no change of it.
        """
        context, whole = self.context, self._whole

        def tried(sent: Tensor, whole: Tensor) -> Tensor:
            known = self._context_of(context, whole)
            weights = self._sizes[known.clients].to(sent.device)
            return server.tried(sent if whole.all() else sent[whole], weights, known)

        sent = self.sharing.gathered(self._trained.changeable_uploads(self.rows))
        self.rows = adversary.forge(sent, whole, context, tried)
        if not whole.all():
            here = whole[self._mine.to(whole.device), None]
            proposals = self._proposals.items()
            self._proposals = {n: each.where(here, kept[n]) for n, each in proposals}
        forged = adversary.attacks(context.clients, context.round).to(whole.device)
        self._whole = finite_rows(self.rows) & (whole | forged)  # a forged one counts by itself
        self.sharing = Sharing.alone(self.sharing.cohort)

    def leave_out(self, client: Client) -> int:
        """Leave out broken uploads, and what goes with them; return how many.

        Where uploads are changes of a mean over all clients, those that are left count as parts of
        the whole cohort, in the mean of fewer.
        """
        whole = self._whole
        rejected = int((~whole).sum())
        if rejected:
            self.rows = self.rows[whole[self.sharing.mine.to(whole.device)]]
            here = whole[self._mine.to(whole.device)]
            self._proposals = {name: each[here] for name, each in self._proposals.items()}
            self._ids = self._ids[here.cpu()]
            self.sharing = self.sharing.of(whole.cpu())
            self.context = self._context_of(self.context, whole)
            partial = client.population.cohort < client.population.clients
            if client.mean_of == "clients" and (client.uploads_changes or partial):
                self._part = len(self.sharing.cohort) / self._cohort
        return rejected

    def _context_of(self, context: RoundContext, whole: Tensor) -> RoundContext:
        """Return the round of those clients alone whose uploads are whole."""
        return self._expecting(context.of(whole), int((~whole).sum()))

    def distance(self, update: Tensor, benign: Tensor, aggregator: Aggregator) -> Tensor | float:
        """Return how far the merged update is from the mean of the benign uploads.

        Args:
            update: Shape [numel].
            benign: Which of those that are still in are benign, bool [clients].
            aggregator: What has merged them.
        """
        number = int(benign.sum())
        if not number:
            return math.nan
        all_benign = number == len(benign)
        if all_benign and type(aggregator) is Mean and aggregator.mass(self.weights) == number:
            return 0.0  # it is that mean
        shares = benign[self.sharing.mine].to(self.rows.device) / number
        mean = self.sharing.processes.sum(weighted_sum(self.changes, shares))
        distance: Tensor = (update - mean).norm()
        return distance

    def move(
        self,
        client: Client,
        kept: Mapping[str, Tensor],
        proposed: Iterable[str],
        aggregator: Aggregator,
    ) -> None:
        """Move what the server keeps to the mean of what was proposed, in place.

        Args:
            client: The algorithm.
            kept: What it keeps, by name, each [length].
            proposed: The names of what any process's clients have proposed: constants stay as they
                are, bit for bit.
            aggregator: What merges parameters: where it is a mean by samples, that of running
                statistics is one, too.
        """
        for name in proposed:
            known = kept[name]
            change = self._proposals.get(name, known.expand(0, -1)) - known
            of_all = name in client.state_means.values()
            number = float(self._cohort if of_all else len(self.sharing.cohort))
            if name == GLOBAL_STATISTICS and counts_samples(aggregator):
                change = change * self._sizes[self._ids[: len(change)], None].to(change)
                number = float(self.weights.sum())
            known += self._processes.sum(change.sum(0)) / number

    def receive(self, client: Client, kept: Mapping[str, Tensor]) -> None:
        """Let an algorithm change what the server keeps by the uploads that are in, in place."""
        for name, change in client.receive(self.sharing.clients, self.rows).items():
            kept[name].add_(self.sharing.processes.sum(change))
