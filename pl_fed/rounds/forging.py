"""The forged uploads of a round: attackers replace their own ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.nets.rows import finite_rows
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.client_states import ClientStates, read_frozen_values
from pl_fed.rounds.server import Server
from pl_fed.rounds.upload_channel import UploadChannel
from pl_fed.rounds.uploads import Uploads, mean_factor, scale
from pl_fed.types import Batch, RoundContext


class Forging:
    """Forging: lets the attackers of a cohort replace their uploads, equally in every process.

    An attacker whose own upload is broken may forge a valid upload. It then proposes the server's
    current states. An upload is broken if its client reports a loss of w^t that is not finite.

    Args:
        states: The clients' data and states.
        byzantine_clients: The Byzantine clients and their attack.
        evaluator: Copies the global model for attackers that train.
        channel: Compresses the forged uploads, too; ``None`` without compression.
    """

    def __init__(
        self,
        states: ClientStates,
        byzantine_clients: ByzantineClients,
        evaluator: Evaluator,
        channel: UploadChannel | None,
    ) -> None:
        self.states = states
        self.client = states.client
        self.byzantine_clients = byzantine_clients
        self.evaluator = evaluator
        self.channel = channel

    def run(
        self, uploads: Uploads, valid: Tensor, server: Server, server_states: Mapping[str, Tensor]
    ) -> tuple[Uploads, Tensor]:
        """Return all uploads and reported losses, with the forged ones, and a mask of valid ones.

        Args:
            uploads: The honest uploads.
            valid: A mask of the valid ones, bool [cohort].
            server: The server. Attackers may simulate a merge by its aggregator.
            server_states: The server's current states by name, [length] each.
        """
        byzantine_clients, context = self.byzantine_clients, uploads.context
        attackers = byzantine_clients.mark_attackers(context.clients, context.round)
        context.note("forged", float(attackers.sum()))
        honest = uploads.gather()
        attackers = attackers.to(honest.rows.device)
        if not valid.all():
            proposals = uploads.proposals.replace_broken(valid, server_states)
            honest = replace(honest, proposals=proposals)
        attacker_context = self._build_context(context)
        reported = byzantine_clients.forge_losses(attacker_context, attackers)
        own = honest.rows[attackers]
        simulated: Tensor | None = None  # one copy of the uploads for all simulations
        send: Callable[[Tensor], Tensor] = self.client.restrict_rows
        if self.channel is not None:
            ids = context.clients[attackers.cpu()]
            send = partial(self.channel.carry, own=own, clients=ids, round=context.round)

        def carry(forged: Tensor) -> Tensor:
            """Return forged uploads as the server receives them, [attackers, numel].

            They have the form of an upload: 0 in the parts that clients keep, for example. An
            attacker's own upload has gone through the channel already.
            """
            is_own = (forged == own).all(dim=1, keepdim=True)
            return own.where(is_own, send(forged))

        def simulate_merge(
            forged: Tensor, reject: Callable[[Tensor], None] = lambda _: None
        ) -> Tensor:
            """Return the update that the server would merge for forged uploads [attackers, numel].

            The memory of its aggregator does not change. ``reject`` receives the ids of the clients
            whose uploads the aggregator would leave out.
            """
            nonlocal simulated
            if simulated is None:
                simulated = honest.rows.clone()
            simulated[attackers] = carry(forged.to(simulated))
            is_valid = valid.clone()
            has_loss = _has_finite_loss(reported, simulated)[attackers]
            is_valid[attackers] = finite_rows(simulated[attackers]) & has_loss
            merged = replace(honest, rows=simulated, context=reported)
            merged = merged.leave_out(~is_valid, byzantine_clients)
            merged = merged.normalize(self.client, server.aggregator)
            sent = scale(merged.rows, mean_factor(self.client, len(merged.share.cohort)))
            return server.simulate_merge(sent, merged.weights, merged.context, reject)

        rows = byzantine_clients.forge(
            honest.rows, attackers, valid, attacker_context, simulate_merge
        )
        rows[attackers] = carry(rows[attackers])
        # a finite forged upload is valid even if the attacker's own upload is broken
        is_valid = finite_rows(rows) & (valid | attackers.to(valid.device))
        is_valid &= _has_finite_loss(reported, rows)
        context = replace(context, losses=reported.losses, start_losses=reported.start_losses)
        return replace(honest, rows=rows, context=context), is_valid

    def _build_context(self, context: RoundContext) -> RoundContext:
        """Return the context of attackers, with nets and samples for those that train."""
        return replace(
            context,
            net=self.evaluator.copy_global_model,
            samples=self._read_samples,
            project=self.client.project,
            frozen=self.client.frozen_parameters,
            frozen_values=lambda client: read_frozen_values(
                self.client, self.states.loaded, client, self.states.server_states
            ),
            reject=lambda _: None,
        )

    def _read_samples(self, client: int) -> Batch:
        """Return the training samples of an attacker; none if they are too few for a minibatch."""
        data = self.states.data
        if self.states.rule.batches_per_pass(int(data.train.sizes[client])):
            return data.training_samples(client)
        return data.batch(torch.empty(0, dtype=torch.int64, device=data.device))


def _has_finite_loss(context: RoundContext, rows: Tensor) -> Tensor:
    """Return a mask of the uploads whose loss of w^t is finite or not measured, bool [n]."""
    losses = context.start_losses
    if not len(losses):
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    return losses.isfinite().to(rows.device)
