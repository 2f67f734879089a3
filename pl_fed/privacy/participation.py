"""The participation of a client in the rounds, as the accountant sees it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Participation:
    """Participation: how often a client takes part, and what an observer knows about it.

    Attributes:
        kind: ``"poisson"``: each client takes part with probability ``cohort / clients``,
            independently in each round. ``"without_replacement"``: all cohorts of ``cohort``
            clients are equally likely, independently in each round. ``"any"``: any cohorts, known
            to the observer. ``"banded"``: any cohorts, and the noise of the rounds is correlated.
        clients: The number of clients.
        cohort: The expected number of clients of a cohort.
        min_separation: A client takes part at most once in so many consecutive rounds; for the
            kinds ``"any"`` and ``"banded"``.

    Example:
        >>> Participation("poisson", clients=100, cohort=5.0).sensitivity
        1.0
        >>> Participation("without_replacement", clients=100, cohort=5.0).sensitivity
        2.0
    """

    kind: Literal["poisson", "without_replacement", "any", "banded"]
    clients: int
    cohort: float
    min_separation: int = 1

    @property
    def rate(self) -> float:
        """The probability that a client takes part in a round."""
        return self.cohort / self.clients

    @property
    def sensitivity(self) -> float:
        """The largest change of a sum of clipped uploads between neighbours, divided by C.

        With a fixed number of clients in the cohort, a neighbour replaces the upload of one client
        by another one: 2 C. In all other cases, a neighbour lacks the upload of one client: C.
        """
        return 2.0 if self.kind == "without_replacement" else 1.0

    @property
    def neighbours(self) -> str:
        """The definition of neighbouring federations, in words."""
        if self.kind == "without_replacement":
            return "one client's data are replaced by other data"
        return "one client sends nothing"

    def count(self, rounds: int) -> int:
        """Return the largest number of rounds of one client among the first rounds."""
        return -(-rounds // self.min_separation)
