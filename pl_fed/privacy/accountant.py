"""The accountant: computes ε after some rounds, and the noise for a target ε.

The computation is Google's dp-accounting. The theorems behind it:

- Poisson sampling: privacy loss distributions of the Poisson-subsampled Gaussian mechanism, whose
  dominating pairs compose adaptively (Y. Zhu, J. Dong and Y.-X. Wang, "Optimal Accounting of
  Differential Privacy via Characteristic Function", AISTATS 2022, arXiv 2106.08567); or Rényi
  divergences (I. Mironov, K. Talwar and L. Zhang, arXiv 1908.10530).
- Sampling without replacement: Rényi divergences under replacement (Y.-X. Wang, B. Balle and S.
  Kasiviswanathan, "Subsampled Rényi Differential Privacy and Analytical Moments Accountant",
  AISTATS 2019, arXiv 1808.00087). The sensitivity is 2 C.
- Any cohorts: the composition of Gaussian mechanisms, which is a Gaussian mechanism with the
  closed form of B. Balle and Y.-X. Wang, "Improving the Gaussian Mechanism for Differential
  Privacy", ICML 2018, arXiv 1805.06530.
- Banded factorisation: one Gaussian mechanism (see :mod:`pl_fed.functional.privacy`).
"""

import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

from pl_fed.functional.privacy import gaussian_epsilon, sensitivity_of_bands
from pl_fed.privacy.differential_privacy import Accounting
from pl_fed.privacy.participation import Participation
from pl_fed.privacy.saved_results import SavedResults

INTERVAL = 1e-4  # of the privacy losses, the default of dp-accounting
_EXACT_ROUNDS = 40  # rounds from which on PLD is computed for some rounds only
_LARGEST_NOISE = 1e6
_LEAST_PLD_NOISE = 0.1  # with less, a distribution takes minutes and gigabytes, for ε above 70
_TOLERANCE = 1e-6  # of a calibrated noise multiplier


class Accountant:
    """Accountant: the privacy cost of rounds with clipped uploads and Gaussian noise.

    Args:
        participation: The participation of a client in the rounds.
        delta: δ of the guarantee.
        accounting: ``"pld"``, ``"rdp"`` or ``"auto"``.

    Raises:
        ModuleNotFoundError: If dp-accounting is not installed.
        ValueError: If there is no theorem for this accounting and this participation.
    """

    def __init__(
        self, participation: Participation, delta: float, accounting: Accounting = "auto"
    ) -> None:
        _import_library()
        without_replacement = participation.kind == "without_replacement"
        if accounting == "pld" and without_replacement:
            raise ValueError(
                'Expected argument `federation.privacy.accounting` to be "rdp" or "auto" for a'
                ' cohort of fixed size but got "pld": no privacy loss distribution is known for it;'
                " use pl_fed.samplers.Poisson for a tighter ε."
            )
        self.participation = participation
        self.delta = delta
        automatic = {"poisson": "pld", "without_replacement": "rdp"}.get(
            participation.kind, "gaussian"
        )
        self.accounting = automatic if accounting == "auto" else accounting
        self._saved = SavedResults(f"{participation} δ={delta!r} {self.accounting} {INTERVAL}")

    def epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Return ε after some rounds.

        Args:
            noise_multiplier: z > 0, the deviation of the noise in the sum divided by C.
            rounds: The number of rounds, at least 0.
        """
        if not rounds:
            return 0.0
        if self.accounting != "pld":
            return self._fresh_epsilon(noise_multiplier, rounds)
        return self._saved.get(
            f"ε z={noise_multiplier!r} rounds={rounds}",
            lambda: self._pld_epsilon(noise_multiplier, rounds),
        )

    def epsilon_bound(self, noise_multiplier: float, rounds: int, last: float) -> float:
        """Return ε after some rounds, or a bound of it that is cheaper over all rounds.

        The privacy loss distribution of a subsampled mechanism takes about 0.2 s for each number of
        rounds. Therefore, from 40 rounds on, the bound is ε after up to 5 % more rounds.

        Args:
            noise_multiplier: z > 0.
            rounds: The number of rounds, at least 0.
            last: The number of rounds at which the run ends; the bound never exceeds its ε.
        """
        if self.accounting == "pld" and self.participation.kind == "poisson":
            step = 1 << max(0, (2 * rounds // _EXACT_ROUNDS).bit_length() - 1)
            rounds = int(min(-(-rounds // step) * step, max(rounds, last)))
        if self.accounting == "gaussian" and rounds:
            deviation = self._gaussian_deviation(noise_multiplier, rounds)
            return gaussian_epsilon(deviation, self.delta)
        return self.epsilon(noise_multiplier, rounds)

    def _gaussian_deviation(self, noise_multiplier: float, rounds: int) -> float:
        """Return σ of the one Gaussian mechanism that some rounds compose to."""
        event, count = self.event(noise_multiplier, rounds)
        return float(event.noise_multiplier / math.sqrt(count))

    def calibrate(self, epsilon: float, rounds: int, inform: Callable[[str], None]) -> float:
        """Return the smallest noise multiplier whose ε after some rounds is at most the target.

        Args:
            epsilon: The target, above 0.
            rounds: The number of rounds, at least 1.
            inform: Called with a sentence before a search of several seconds.

        Raises:
            ValueError: If no noise multiplier of up to 1,000,000 reaches the target.
        """

        def search() -> float:
            inform(
                f"pl_fed searches for the noise of ε = {epsilon:g} after {rounds} rounds, which may"
                " take 20 s; later runs with these settings reuse the result."
            )
            return self._search_noise(epsilon, rounds)

        return self._saved.get(
            f"noise ε={epsilon!r} rounds={rounds}",
            search,
            is_valid=lambda noise: self._fresh_epsilon(noise, rounds) <= epsilon,
        )

    def _search_noise(self, epsilon: float, rounds: int) -> float:
        """Search for the noise multiplier; its ε is at most the target."""
        from scipy.optimize import brentq

        def gap(noise_multiplier: float) -> float:
            """Return the logarithm of ε by the target."""
            return math.log(max(self._fresh_epsilon(noise_multiplier, rounds), 1e-300) / epsilon)

        high = self._find_sufficient_noise(epsilon, rounds)
        while gap(low := high / 2) <= 0:
            high = low
        noise = float(brentq(gap, low, high, xtol=_TOLERANCE * low, rtol=_TOLERANCE))
        while gap(noise) > 0:
            noise *= 1 + _TOLERANCE
        return noise

    def _find_sufficient_noise(self, epsilon: float, rounds: int) -> float:
        """Return a power of 2 that is enough noise by RDP, which is fast and never below PLD."""
        noise = 1.0
        while self._rdp_epsilon(noise, rounds) > epsilon:
            noise *= 2
            if noise > _LARGEST_NOISE:
                raise ValueError(
                    "Expected argument `federation.privacy.epsilon` to be reachable but got"
                    f" {epsilon} for {rounds} rounds: set a larger `epsilon` or `delta`."
                )
        return noise

    def _fresh_epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Return ε without saving it, because a search asks for each multiplier once."""
        if self.accounting == "rdp":
            return self._rdp_epsilon(noise_multiplier, rounds)
        if self.accounting == "gaussian":
            deviation = self._gaussian_deviation(noise_multiplier, rounds)
            return float(_import_library().get_epsilon_gaussian(deviation, self.delta))
        return self._pld_epsilon(noise_multiplier, rounds)

    def count_rounds(self, noise_multiplier: float, epsilon: float, limit: int) -> int:
        """Return the largest number of rounds, up to a limit, whose ε is at most a budget."""
        if self.epsilon(noise_multiplier, limit) <= epsilon:
            return limit
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            if self.epsilon(noise_multiplier, middle) <= epsilon:
                low = middle
            else:
                high = middle
        return low

    def event(self, noise_multiplier: float, rounds: int) -> Any:
        """Return the event of dp-accounting, and how often it is composed.

        Args:
            noise_multiplier: z > 0, in units of C; the event has it in units of the sensitivity.
            rounds: The number of rounds, at least 1.
        """
        library, participation = _import_library(), self.participation
        gaussian = library.GaussianDpEvent(noise_multiplier / participation.sensitivity)
        if participation.kind == "poisson":
            return library.PoissonSampledDpEvent(participation.rate, gaussian), rounds
        if participation.kind == "without_replacement":
            cohort = round(participation.cohort)
            return (
                library.SampledWithoutReplacementDpEvent(participation.clients, cohort, gaussian),
                rounds,
            )
        if participation.kind == "banded":
            spread = sensitivity_of_bands(participation.min_separation, rounds)
            return library.GaussianDpEvent(noise_multiplier / spread), 1
        return gaussian, participation.count(rounds)

    def _pld_epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Return ε by privacy loss distributions; for little noise, a bound in closed form.

        The bound is ε if a client takes part in each round that it can be drawn for: sampling
        never adds to a privacy loss.
        """
        participation = self.participation
        if noise_multiplier < _LEAST_PLD_NOISE:
            is_sampled = participation.kind == "poisson"
            deviation = (
                noise_multiplier / math.sqrt(rounds)
                if is_sampled
                else self._gaussian_deviation(noise_multiplier, rounds)
            )
            return gaussian_epsilon(deviation, self.delta)
        if participation.kind == "poisson":
            composed = _poisson_loss(participation.rate, noise_multiplier).self_compose(rounds)
            return float(composed.get_epsilon_for_delta(self.delta))
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant(value_discretization_interval=INTERVAL)
        accountant.compose(*self.event(noise_multiplier, rounds))
        return float(accountant.get_epsilon(self.delta))

    def _rdp_epsilon(self, noise_multiplier: float, rounds: int) -> float:
        from dp_accounting.rdp import compute_epsilon

        event, count = self.event(noise_multiplier, rounds)
        orders, divergences = _renyi_divergences(event, self._is_replacement)
        return float(compute_epsilon(orders, count * divergences, self.delta)[0])

    @cached_property
    def _is_replacement(self) -> bool:
        return self.participation.kind == "without_replacement"


@lru_cache(maxsize=8)
def _poisson_loss(rate: float, noise_multiplier: float) -> Any:
    """Return the privacy loss distribution of one round with Poisson sampling."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, value_discretization_interval=INTERVAL, sampling_prob=rate
    )


@lru_cache(maxsize=8)
def _renyi_divergences(event: Any, is_replacement: bool) -> tuple[Any, Any]:
    """Return the Rényi orders, and the divergences of one event."""
    import absl.logging
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    relation = (
        NeighboringRelation.REPLACE_ONE if is_replacement else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)  # it warns of each order that it leaves out
    try:
        accountant = RdpAccountant(neighboring_relation=relation)
        accountant.compose(event, 1)
    finally:
        absl.logging.set_verbosity(verbosity)
    return accountant.orders, accountant.rdp


def _import_library() -> Any:
    """Return the package dp-accounting.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Expected the package dp-accounting to be installed for `federation.privacy` but it is"
            ' not: run `pip install "pl_fed[privacy]"`.'
        ) from error
    return dp_accounting
