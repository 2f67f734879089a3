"""The section ``federation.privacy``: client-level differential privacy of the global model.

H. B. McMahan, D. Ramage, K. Talwar and L. Zhang, "Learning Differentially Private Recurrent
Language Models", ICLR 2018, arXiv 1710.06963, Algorithm 1 with the fixed-denominator estimator::

    w^{t+1} = w^t + (Σ_{k in S_t} min(1, C / ‖Δ_k‖) Δ_k + N(0, (z C)² I)) / m

C is the clipping norm, z the noise multiplier, and m the expected size of a cohort, rounded to a
whole number and at least 1.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from pl_fed.arguments import check_choice, check_integers, check_interval, check_positive

_PATH = "federation.privacy"

Accounting = Literal["auto", "pld", "rdp"]


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Differential privacy: every client's upload is clipped, and the server adds Gaussian noise.

    The guarantee covers the sequence of global models, for each client with all its data. Personal
    models that use only these models and the client's own data cost no further privacy, as long as
    they stay with their client. The noise is simulated: a keyed generator computes it, which is not
    cryptographic. Logs and metrics are not private.

    Source: McMahan et al., ICLR 2018, Algorithm 1.

    Args:
        clip_norm: C > 0, the largest norm of an upload; the first one with ``target_quantile``.
        delta: δ, in (0, 1); below 1 / clients for a meaningful guarantee.
        epsilon: ε > 0, the target after ``rounds``; it determines the noise. The run ends before
            ε exceeds it. Give either ``epsilon`` or ``noise_multiplier``.
        noise_multiplier: z > 0: the standard deviation of the noise in a sum of uploads, divided
            by C.
        rounds: The number of rounds for ``epsilon``; ``None`` for the trainer's ``max_epochs``.
        stop_at_epsilon: The run ends before ε exceeds this number; ``None`` for ``epsilon``.
        accounting: ``"pld"`` (privacy loss distributions), ``"rdp"`` (Rényi divergences), or
            ``"auto"``: the tightest one with a theorem for the sampler.
        amplification: Whether to use the randomness of the sampler. Without it the guarantee also
            holds against an observer who knows all cohorts, and any cohorts are allowed.
        target_quantile: γ in (0, 1): C follows this quantile of the norms of the uploads (Andrew et
            al., NeurIPS 2021). ``None`` fixes C.
        quantile_share: The share of the budget (of z⁻²) for the adaptive C, in (0, 1).
        clip_lr: η > 0, the step size of the logarithm of the adaptive C.
        noise_cohort_size: The expected cohort of the simulated federation. The noise in the mean
            has the deviation that it would have with such a cohort, and ε is that of the simulated
            federation, not of the run. ``None`` simulates nothing.
        population: The number of clients of the simulated federation, with ``noise_cohort_size``.
        min_separation: Selects correlated noise (DP-FTRL): the banded square-root factorisation
            for clients that take part at most once in so many rounds. ``None`` adds independent
            noise in each round.
        buckets: B, at least 2 and at most the expected cohort: clients are put in B random buckets,
            each with a noisy sum, and ``federation.aggregator`` works on the B sums as if they were
            uploads. ``None`` releases one sum, and allows the mean only. ε does not depend on it.
        noise_seed: Seed of the noise and of the cohorts. ``None`` draws a fresh one from the
            system, which the checkpoint keeps: no other run has this noise or these cohorts. An
            integer repeats a run bit for bit. Two published runs with one noise seed reveal sums of
            uploads, also with other ε.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or does not fit another one.

    Example:
        >>> DifferentialPrivacy(clip_norm=0.5, epsilon=2.0, delta=1e-6).budget
        2.0
    """

    clip_norm: float
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    rounds: int | None = None
    stop_at_epsilon: float | None = None
    accounting: Accounting = "auto"
    amplification: bool = True
    target_quantile: float | None = None
    quantile_share: float = 0.01
    clip_lr: float = 0.2
    noise_cohort_size: int | None = None
    population: int | None = None
    min_separation: int | None = None
    buckets: int | None = None
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        numbers = ("clip_norm", "delta", "epsilon", "noise_multiplier", "stop_at_epsilon")
        for name in (*numbers, "target_quantile", "quantile_share", "clip_lr"):
            _check_number(name, getattr(self, name))
        self._check_noise()
        for name in ("delta", "target_quantile", "quantile_share"):
            if (share := getattr(self, name)) is not None:
                check_interval("(0, 1)", **{f"{_PATH}.{name}": share})
        check_positive(
            **{f"{_PATH}.{name}": getattr(self, name) for name in ("clip_norm", "clip_lr")}
        )
        check_choice(("auto", "pld", "rdp"), **{f"{_PATH}.accounting": self.accounting})
        for name in ("rounds", "noise_cohort_size", "population", "min_separation"):
            if getattr(self, name) is not None:
                check_integers(1, **{f"{_PATH}.{name}": getattr(self, name)})
        if self.buckets is not None:
            check_integers(2, **{f"{_PATH}.buckets": self.buckets})
        if self.noise_seed is not None:
            check_integers(0, **{f"{_PATH}.noise_seed": self.noise_seed})
        if not isinstance(self.amplification, bool):
            raise TypeError(
                f"Expected argument `{_PATH}.amplification` to be true or false but got"
                f" {self.amplification!r}."
            )
        self._check_correlated_noise()
        self._check_simulation()

    def _check_noise(self) -> None:
        """Refuse a missing, a double or an infinite budget."""
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"Expected one of `{_PATH}.epsilon` and `{_PATH}.noise_multiplier` but got"
                f" {self.epsilon} and {self.noise_multiplier}: set the first for a target, for"
                " example 2.0, and the other to null."
            )
        for name in ("epsilon", "stop_at_epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"Expected argument `{_PATH}.{name}` to be above 0, and finite, but got"
                    f" {value}: set, for example, 2.0."
                )
        if self.noise_multiplier is not None and not 0 < self.noise_multiplier < math.inf:
            raise ValueError(
                f"Expected argument `{_PATH}.noise_multiplier` to be above 0, and finite, but got"
                f" {self.noise_multiplier}: without noise there is no privacy; to clip only, remove"
                " `federation.privacy` and set `federation.pre_aggregators` to"
                " pl_fed.aggregators.Clipping."
            )
        if self.rounds is not None and self.epsilon is None:
            raise ValueError(
                f"Expected argument `{_PATH}.rounds` to be given with `{_PATH}.epsilon` but got"
                f" {self.rounds} without: the noise multiplier does not depend on it."
            )

    def _check_correlated_noise(self) -> None:
        """Refuse options that do not fit correlated noise."""
        if self.min_separation is not None and self.target_quantile is not None:
            raise ValueError(
                f"Expected no `{_PATH}.target_quantile` with `{_PATH}.min_separation` but got"
                f" {self.target_quantile}: correlated noise needs one clipping norm in all rounds."
            )
        if self.min_separation is not None and self.buckets is not None:
            raise ValueError(
                f"Expected no `{_PATH}.buckets` with `{_PATH}.min_separation` but got"
                f" {self.buckets}: correlated noise cancels in the sum of all updates, which an"
                " aggregator of buckets does not add up; set one of them to null."
            )

    def _check_simulation(self) -> None:
        """Check the sizes of a simulated federation."""
        cohort, clients = self.noise_cohort_size, self.population
        if (cohort is None) != (clients is None):
            raise ValueError(
                f"Expected `{_PATH}.noise_cohort_size` and `{_PATH}.population` to be given"
                f" together but got {cohort} and {clients}: both describe the simulated federation."
            )
        if cohort is not None and clients is not None and cohort > clients:
            raise ValueError(
                f"Expected argument `{_PATH}.noise_cohort_size` to be at most"
                f" `{_PATH}.population` ({clients}) but got {cohort}."
            )

    @property
    def budget(self) -> float:
        """The ε before which a run ends; infinity without a limit."""
        limits = (self.stop_at_epsilon, self.epsilon)
        return min((limit for limit in limits if limit is not None), default=math.inf)

    @property
    def is_simulated(self) -> bool:
        """Whether ε is that of a simulated, larger federation."""
        return self.noise_cohort_size is not None

    @property
    def metric(self) -> str:
        """The name of ε in the logs; it says so if the cohort is simulated."""
        return "privacy/simulated_epsilon" if self.is_simulated else "privacy/epsilon"


def _check_number(name: str, value: Any) -> None:
    if value is None and name not in ("clip_norm", "delta", "quantile_share", "clip_lr"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Expected argument `{_PATH}.{name}` to be a number but got {value!r}.")
