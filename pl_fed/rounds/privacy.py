"""The privacy step of a round: clip the uploads, add noise, and count the spent budget."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.aggregators import Aggregator
from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.functional.privacy import (
    clip_factors,
    exact_squared_norms,
    move_clip_norm,
    next_correlated_row,
    root_coefficients,
    split_noise,
)
from pl_fed.preflight.privacy_rules import find_participation
from pl_fed.privacy import Accountant, DifferentialPrivacy, Participation
from pl_fed.privacy.buckets import Buckets
from pl_fed.random import key, normal_row
from pl_fed.samplers import Sampler
from pl_fed.text import format_bound
from pl_fed.types import RoundContext

_PATH = "federation.privacy"
_NOISE_SEED_BITS = 63  # of a fresh noise seed: it fits a signed 64-bit number


class RoundPrivacy:
    """Round privacy: clips the uploads of each round, adds noise, and counts the spent budget.

    A round always spends its share of the budget, also with an empty cohort: the server cannot tell
    observers that nobody took part.

    Args:
        settings: The section ``federation.privacy``.
        participation: The participation of a client in the rounds, in the simulated federation if
            there is one.
        denominator: The expected number of clients of a cohort of the run, m.
        seed: The seed of the federation; it keys the buckets.
        noise_seed: The seed of the noise.

    Attributes:
        noise_multiplier: z; ``None`` before :meth:`plan`.
        max_rounds: The number of rounds that the budget allows; may be infinite.
        rounds: The number of rounds that have spent budget.
        clip_norm: C of the next round.
        buckets: The buckets of clients with a noisy sum each; ``None`` for one sum.
    """

    def __init__(
        self,
        settings: DifferentialPrivacy,
        participation: Participation,
        denominator: int,
        seed: int,
        noise_seed: int,
    ) -> None:
        self.settings = settings
        self.participation = participation
        self.denominator = denominator
        self.seed = seed
        self.noise_seed = noise_seed
        self.accountant = Accountant(participation, settings.delta, settings.accounting)
        self.noise_multiplier = settings.noise_multiplier
        self.max_rounds: float = math.inf
        self.rounds = 0
        self.clip_norm = float(settings.clip_norm)
        self.buckets = None if settings.buckets is None else Buckets(settings.buckets, seed)
        self._correlated: list[Tensor] = []  # the last rows of C⁻¹ Z, the latest first

    def plan(self, rounds: float) -> None:
        """Determine the noise for the target ε, and the number of rounds that the budget allows.

        A further fit keeps the noise, and so does one after a checkpoint was evaluated. Neither a
        larger number of rounds nor a larger ``stop_at_epsilon`` extends the budget of the first
        fit.

        Args:
            rounds: The number of rounds of the run; may be infinite.

        Raises:
            ValueError: If there is a target but no number of rounds, or the budget allows no round.
        """
        settings, limit = self.settings, rounds
        if settings.epsilon is not None and self.max_rounds == math.inf:
            limit = settings.rounds or rounds
            if not 1 <= limit < math.inf:
                raise ValueError(
                    f"Expected argument `{_PATH}.rounds` or `trainer.max_epochs` to be given with"
                    f" `{_PATH}.epsilon` but got {limit} rounds: set, for example, 100."
                )
            self._plan_for_target(settings.epsilon, int(limit))
        if settings.stop_at_epsilon is not None and self.noise_multiplier is not None:
            if limit == math.inf:
                raise ValueError(
                    f"Expected `trainer.max_epochs` to be given with `{_PATH}.stop_at_epsilon` but"
                    " got no limit: set, for example, 1000."
                )
            allowed = self.accountant.count_rounds(
                self.noise_multiplier, settings.stop_at_epsilon, int(limit)
            )
            if allowed < 1:
                cost = self.accountant.epsilon(self.noise_multiplier, 1)
                raise ValueError(
                    f"Expected argument `{_PATH}.stop_at_epsilon` to allow one round, which costs"
                    f" ε = {cost:.4g}, but got {settings.stop_at_epsilon:g}: set a larger number,"
                    f" or a larger `{_PATH}.noise_multiplier`."
                )
            if allowed < limit:
                self.max_rounds = min(self.max_rounds, allowed)

    def _plan_for_target(self, epsilon: float, rounds: int) -> None:
        """Determine the noise for a target ε, or the rounds in which given noise meets it."""
        if self.noise_multiplier is not None:
            self.max_rounds = self.accountant.count_rounds(self.noise_multiplier, epsilon, rounds)
            return
        self.noise_multiplier = self.accountant.calibrate(epsilon, rounds, rank_zero_info)
        rank_zero_info(
            f"Privacy: the noise multiplier z = {self.noise_multiplier:.6g} gives at most"
            f" ε = {epsilon:g} at δ = {self.settings.delta:g} after {rounds} rounds."
        )
        self.max_rounds = rounds

    @property
    def is_spent(self) -> bool:
        """Whether another round would exceed the budget."""
        return self.rounds >= self.max_rounds

    def check_nothing_spent(self) -> None:
        """Refuse to begin the budget of a federation again, for another client or other data.

        The new rounds would have the noise of the rounds before, and the difference of two releases
        with equal noise is not private.

        Raises:
            ValueError: If rounds have spent budget.
        """
        if self.rounds:
            raise ValueError(
                f"Expected a new Federation for `{_PATH}`, with a seed of its own, for another"
                " client or other data, but got one that has spent"
                f" ε = {self.epsilon():.4g} in {self.rounds} rounds: the new rounds would have"
                " their noise. On the same clients' data, the budgets of both runs add up."
            )

    def is_budget_of(
        self, settings: DifferentialPrivacy, participation: Participation, denominator: int
    ) -> bool:
        """Return whether the budget is that of some settings; they may change before a round.

        Raises:
            ValueError: If they are others, and rounds have spent budget.
        """
        own = (self.settings, str(self.participation), self.denominator)
        if own == (settings, str(participation), denominator):
            return True
        if self.rounds:
            raise ValueError(
                f"Expected the sampler and `{_PATH}` to stay as they are once rounds have spent"
                f" budget but got {participation} instead of {self.participation}, or other"
                " settings: the budget of a run has one accounting; restore them, or use a new"
                " Federation and add up both budgets."
            )
        return False

    def check_round(self, round: int) -> None:
        """Refuse a round that would draw the cohort of an earlier one again.

        The accounting needs a fresh cohort in each round, or the turns of the clients in order.

        Raises:
            ValueError: If another number of rounds has spent budget.
        """
        if round != self.rounds:
            raise ValueError(
                f"Expected the next round of a run with `{_PATH}` to be round {self.rounds} but got"
                f" round {round}, whose cohort was drawn before: to train on, set `ckpt_path`, or"
                " fit with the same Trainer after a change of `trainer.fit_loop.max_epochs`."
            )

    def merge(
        self,
        aggregator: Aggregator,
        uploads: Tensor,
        share: WorkShare,
        context: RoundContext,
        num_byzantine: int,
    ) -> Tensor:
        """Return the noisy mean, or the aggregator's row of the noisy means of buckets, [numel].

        The aggregator sees released values only, so that its result is post-processing.

        Args:
            aggregator: The server's aggregator; one sum does not call it.
            uploads: The valid uploads of this process's clients, [clients, numel].
            share: The distribution of the uploads over the processes.
            context: The context of the round.
            num_byzantine: The number of Byzantine clients that the server expects in a cohort of
                the expected size.
        """
        rows = self.protect(uploads, share, context.note)
        if self.buckets is None:
            return rows[0]
        bucket_context = self.buckets.build_context(context, num_byzantine)
        merged: Tensor = aggregator(rows, rows.new_ones(len(rows)), bucket_context)
        return merged

    def protect(
        self, uploads: Tensor, share: WorkShare, note: Callable[[str, float], None]
    ) -> Tensor:
        """Return the noisy means of the clipped uploads, (Σ clip(u_k) + noise) / (m / B).

        Args:
            uploads: The valid uploads of this process's clients, [clients, numel].
            share: The distribution of the uploads over the processes.
            note: Adds a number to the round's log.

        Returns:
            A row for each of the B buckets, [B, numel]; one row without buckets.
        """
        norms = exact_squared_norms(uploads)
        factors = clip_factors(norms, self.clip_norm)
        sums = share.processes.sum(self._sum(uploads, factors, share.clients))
        num_below = share.processes.sum((factors == 1).sum().double())
        note("clipped", len(share.cohort) - float(num_below))
        quantile = self.settings.target_quantile
        update_noise, count_noise = self._planned_noise, 0.0
        if quantile is not None:
            update_noise, count_noise = split_noise(update_noise, self.settings.quantile_share)
        deviation = update_noise * self.clip_norm * self._noise_scale
        rows = self._add_noise(sums, deviation, uploads.dtype)
        if quantile is not None:
            deviation = count_noise * self._noise_scale
            self._adapt(quantile, float(num_below) - len(share.cohort) / 2, deviation)
        self.rounds += 1
        return rows

    def _sum(self, uploads: Tensor, factors: Tensor, clients: Tensor) -> Tensor:
        """Return the sums of this process's clipped uploads, [B, numel] or [1, numel]."""
        if self.buckets is None:
            return weighted_sum(uploads, factors)[None]
        return self.buckets.sum(uploads, factors, clients, self.rounds)

    def _add_noise(self, sums: Tensor, deviation: float, dtype: torch.dtype) -> Tensor:
        """Return the noisy means, [B, numel].

        Args:
            sums: The sums of clipped uploads, [B, numel].
            deviation: The standard deviation of the noise of each sum.
            dtype: The type of the result.
        """
        rows = torch.empty_like(sums, dtype=dtype)
        for bucket, total in enumerate(sums):
            noise = self._draw_noise(sums.shape[1], bucket).to(sums.device)
            noisy = torch.add(total, noise, alpha=deviation, out=noise)  # in float64
            rows[bucket] = noisy.div_(self.denominator / len(sums))
        return rows

    @property
    def _planned_noise(self) -> float:
        """The noise multiplier.

        Raises:
            RuntimeError: Before :meth:`plan`.
        """
        if self.noise_multiplier is None:
            raise RuntimeError("Expected the noise of `federation.privacy` to be planned.")
        return self.noise_multiplier

    @property
    def _noise_scale(self) -> float:
        """The noise of the run divided by that of the simulated federation."""
        simulated = self.settings.noise_cohort_size
        return 1.0 if simulated is None else self.denominator / simulated

    def _draw_noise(self, numel: int, bucket: int = 0) -> Tensor:
        """Return new standardised noise of a sum in the next round, float64 [numel]."""
        if self.buckets is not None:
            return normal_row(key(self.noise_seed, "privacy noise", self.rounds, bucket), numel)
        if self.settings.min_separation is None:
            return normal_row(key(self.noise_seed, "privacy noise", self.rounds), numel)
        coefficients = root_coefficients(self.settings.min_separation)
        if len(self._correlated) < min(self.rounds, len(coefficients) - 1):  # after a checkpoint
            self._correlated = []
            for round in range(self.rounds):
                self._correlate(coefficients, round, numel)
        return self._correlate(coefficients, self.rounds, numel).clone()

    def _correlate(self, coefficients: list[float], round: int, numel: int) -> Tensor:
        """Return the correlated noise of a round, and store it for the next rounds."""
        row = normal_row(key(self.noise_seed, "privacy noise", round), numel)
        row = next_correlated_row(coefficients, row, self._correlated)
        self._correlated = [row, *self._correlated][: len(coefficients) - 1]
        return row

    def _adapt(self, quantile: float, shifted_count: float, deviation: float) -> None:
        """Move C to a quantile of the norms.

        Args:
            quantile: The target quantile, γ.
            shifted_count: Σ (b_k − 1/2), where b_k is 1 for an upload with a norm of at most C.
            deviation: The standard deviation of the noise of this sum.
        """
        draw = float(normal_row(key(self.noise_seed, "privacy quantile", self.rounds), 1))
        fraction = (shifted_count + deviation * draw) / self.denominator + 0.5
        self.clip_norm = move_clip_norm(self.clip_norm, fraction, quantile, self.settings.clip_lr)

    def epsilon(self) -> float:
        """Return ε of the rounds so far."""
        if self.noise_multiplier is None:
            return 0.0
        return self.accountant.epsilon(self.noise_multiplier, self.rounds)

    def report(self, clip_norm: float) -> dict[str, Tensor | float]:
        """Return the numbers of a round for the log.

        Args:
            clip_norm: C of the round.
        """
        bound = self.accountant.epsilon_bound(self._planned_noise, self.rounds, self.max_rounds)
        return {self.settings.metric: bound, "privacy/clip_norm": clip_norm}

    def statement(self) -> str:
        """Return the guarantee so far in words: ε, δ, the unit, the mechanism, and its limits."""
        participation, settings = self.participation, self.settings
        kinds = {
            "poisson": f"Poisson sampling with rate {participation.rate:g}",
            "without_replacement": f"cohorts of {participation.cohort:g} without replacement",
            "any": "no amplification by sampling",
            "banded": f"DP-FTRL with {settings.min_separation} bands",
        }
        methods = {"pld": "PLD", "rdp": "RDP", "gaussian": "the Gaussian mechanism"}
        simulated = ""
        if settings.is_simulated:
            simulated = (
                f" of a simulated federation with cohorts of {settings.noise_cohort_size} out of"
                f" {settings.population} clients, not of this run"
            )
        sums = f" and the noisy sums of {settings.buckets} buckets" if settings.buckets else ""
        clipping = "the last clipping norm" if settings.target_quantile else "the clipping norm"
        repeated = ""
        if settings.noise_seed is not None:
            repeated = (
                f" `{_PATH}.noise_seed` = {settings.noise_seed} repeats the noise: two published"
                " runs with it reveal sums of uploads, so publish one."
            )
        return (
            f"Privacy{simulated}: ε = {format_bound(self.epsilon())} at δ = {settings.delta:g}"
            f" after {self.rounds} rounds for a client with all its data, for neighbours in which"
            f" {participation.neighbours}; by {methods[self.accountant.accounting]} with"
            f" {kinds[participation.kind]}, the noise multiplier z = {self._planned_noise:.6g} and"
            f" {clipping} C = {self.clip_norm:.6g}. It covers the global models{sums}, not logs and"
            f" metrics; the noise is simulated, not cryptographic.{repeated}"
        )

    @property
    def noise_name(self) -> str:
        """A name of the noise and the cohorts, equal for runs that share them.

        It is a hash of the noise seed, and does not tell it.
        """
        return f"{key(self.noise_seed, 'name of the noise') & (2**64 - 1):016x}"

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """Return the spent budget and the settings, for a checkpoint."""
        return {
            "settings": self._identity(),
            "noise_multiplier": self.noise_multiplier,
            "noise_seed": self.noise_seed,
            "max_rounds": self.max_rounds,
            "rounds": self.rounds,
            "clip_norm": self.clip_norm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the budget of a checkpoint.

        Raises:
            ValueError: If the checkpoint is of other privacy settings.
        """
        saved, own = dict(state["settings"]), self._identity()
        saved.pop("rounds", None)  # of an earlier version
        for name in sorted(saved.keys() | own.keys()):
            if saved.get(name) != own.get(name):
                raise ValueError(
                    f"Expected a checkpoint with `{_PATH}` and `{name}` = {own.get(name)} but got"
                    f" one with {saved.get(name)}: the budget of a run has one setting; restore it,"
                    " or start a new run."
                )
        noise, max_rounds = state["noise_multiplier"], state.get("max_rounds", math.inf)
        if self.noise_multiplier not in (None, noise):
            planned = "that of the first run" if max_rounds == math.inf else str(max_rounds)
            raise ValueError(
                f"Expected a checkpoint with the noise multiplier {self.noise_multiplier:g} for"
                f" `{_PATH}.epsilon` but got one with {noise:g}: the number of rounds differs; set"
                f" `{_PATH}.rounds` to {planned}."
            )
        self.noise_multiplier = noise
        self.max_rounds = min(self.max_rounds, max_rounds)
        # before noise seeds, the seed of the federation was that of the noise
        self.noise_seed = int(state.get("noise_seed", self.seed))
        self.rounds, self.clip_norm = int(state["rounds"]), float(state["clip_norm"])
        self._correlated = []

    def _identity(self) -> dict[str, Any]:
        """Return the settings of a budget; the noise multiplier tells numbers of rounds apart."""
        settings = asdict(self.settings)
        del settings["rounds"]
        return {**settings, "sampling": str(self.participation)}


def build_privacy(
    settings: DifferentialPrivacy,
    sampler: Sampler,
    num_clients: int,
    seed: int,
    agree: Callable[[int], int] = lambda number: number,
    spent: RoundPrivacy | None = None,
) -> RoundPrivacy:
    """Return the privacy step for a sampler.

    Args:
        settings: The section ``federation.privacy``.
        sampler: Draws the cohorts.
        num_clients: The number of clients of the run.
        seed: The seed of the federation.
        agree: Returns the first process's argument: all processes add the same noise.
        spent: The privacy step of an earlier session, which goes on with the same settings.

    Raises:
        ValueError: If there is no theorem for the sampler, or the settings are others than those of
            a budget that rounds have spent.
    """
    participation = find_participation(settings, sampler, num_clients)
    denominator = sampler.size_of_cohort(num_clients)
    if spent is not None and spent.is_budget_of(settings, participation, denominator):
        return spent
    if settings.delta >= 1 / participation.clients:
        rank_zero_warn(
            f"`{_PATH}.delta` = {settings.delta:g} is not below 1 / {participation.clients} clients"
            f" = {1 / participation.clients:.3g}: a mechanism that publishes all data of one client"
            " would meet it."
        )
    noise_seed = settings.noise_seed
    if noise_seed is None:
        noise_seed = agree(secrets.randbits(_NOISE_SEED_BITS))
    return RoundPrivacy(settings, participation, denominator, seed, noise_seed)


def load_privacy(privacy: RoundPrivacy | None, state: Mapping[str, Any] | None) -> None:
    """Continue the budget of a checkpoint.

    Args:
        privacy: The privacy step of the run; ``None`` without privacy.
        state: The privacy state of the checkpoint; ``None`` if its run had no privacy.

    Raises:
        ValueError: If only one of the two runs is private, or the settings differ.
    """
    if (privacy is None) != (state is None):
        with_or_without = "without" if privacy is None else "with"
        other = "with" if privacy is None else "without"
        raise ValueError(
            f"Expected a checkpoint of a run {with_or_without} `{_PATH}` but got one {other}: its"
            " rounds would not be in the budget; use the settings of that run, or start a new one."
        )
    if privacy is not None and state is not None:
        privacy.load_state_dict(state)
