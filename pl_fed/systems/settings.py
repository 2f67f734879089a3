"""The section ``federation.systems``: unequal clients, on a simulated clock."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from pl_fed.arguments import check_choice, check_integers, check_nonnegative, check_positive
from pl_fed.systems.base import Distribution
from pl_fed.systems.constant import Constant

PATH = "federation.systems"

Policy = Literal["wait", "drop", "partial"]


@dataclass(frozen=True)
class Systems:
    """Systems: the clients' speed, bandwidth and availability, and the rule for stragglers.

    All times are simulated: a client needs ``download + compute + upload`` seconds. A client that
    drops out or is late leaves no trace: its upload and its new states are discarded.

    Args:
        speed: Local steps per second of each client, above 0: a number or a distribution.
        upload: Bytes per second to the server, above 0: a number or a distribution. ``None`` takes
            no time.
        download: Bytes per second from the server, above 0: a number or a distribution. ``None``
            takes no time.
        availability: The probability that a drawn client answers in a round, in [0, 1]: a number
            or a distribution. A client that does not answer drops out before its training.
        dropout: The probability that a client drops out after its training, in [0, 1]: a number or
            a distribution. The server does not wait for it.
        jitter: σ ≥ 0: in each round, a client's compute time is multiplied by exp(σ z) with
            standard normal z.
        trace: A CSV file with a column ``client`` (ids or owners' names), and any of the columns
            ``speed``, ``upload``, ``download``, ``availability`` and ``dropout``. They replace the
            arguments of these names. With a column ``round``, a row is valid from that round on.
        deadline: Seconds until the server closes a round, for ``"drop"`` and ``"partial"``.
        policy: The rule for stragglers. ``"wait"``: a round lasts as long as its slowest client.
            ``"drop"``: a client that needs longer than the deadline is late, and its upload is
            discarded. ``"partial"``: clients do as many steps as fit into the deadline; a client
            without a fitting step is late.
        take_first: The server takes so many uploads, the first ones, and closes the round. The
            sampler draws more clients (over-selection). A draw orders uploads of the same time.
            ``None`` takes all.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or does not fit another one.

    Example:
        >>> from pl_fed.systems import LogNormal
        >>> Systems(speed=LogNormal(20.0, 1.0), deadline=5.0, policy="partial").changes_cohorts
        True
    """

    speed: float | Distribution = 10.0
    upload: float | Distribution | None = None
    download: float | Distribution | None = None
    availability: float | Distribution = 1.0
    dropout: float | Distribution = 0.0
    jitter: float = 0.0
    trace: str | Path | None = None
    deadline: float | None = None
    policy: Policy = "wait"
    take_first: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in COLUMNS:
                _check_numbers(field.name, getattr(self, field.name))
        check_nonnegative(**{f"{PATH}.jitter": self.jitter})
        check_choice(("wait", "drop", "partial"), **{f"{PATH}.policy": self.policy})
        if self.trace is not None and not isinstance(self.trace, str | Path):
            raise TypeError(
                f"Expected argument `{PATH}.trace` to be a CSV file but got {self.trace!r}."
            )
        if self.take_first is not None:
            check_integers(1, **{f"{PATH}.take_first": self.take_first})
        if self.deadline is not None:
            check_positive(**{f"{PATH}.deadline": self.deadline})
        if (self.deadline is None) != (self.policy == "wait"):
            remedy = "remove it, or set the policy to drop or partial"
            if self.deadline is None:
                remedy = "set, for example, 10.0"
            raise ValueError(
                f"Expected argument `{PATH}.deadline` to be given for the policies drop and partial"
                f' alone but got {self.deadline} for "{self.policy}": {remedy}.'
            )

    @property
    def changes_cohorts(self) -> bool:
        """Whether the number of uploads of a round may differ from that of the drawn clients."""
        always = (self.availability, self.dropout) == (1.0, 0.0)
        return not always or self.policy != "wait" or self.trace is not None

    def distribution(self, column: str) -> Distribution | None:
        """Return the distribution of a column, such as ``"speed"``; ``None`` without one."""
        value = getattr(self, column)
        return value if value is None or isinstance(value, Distribution) else Constant(value)


COLUMNS = ("speed", "upload", "download", "availability", "dropout")
"""The numbers of a client, in the section and in trace files."""

SHARES = ("availability", "dropout")
"""The columns that are probabilities; the others are above 0."""


def _check_numbers(column: str, value: object) -> None:
    """Refuse anything but a distribution or a number in the range of the column."""
    if isinstance(value, Distribution) or (value is None and column in ("upload", "download")):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"Expected argument `{PATH}.{column}` to be a number or a distribution of"
            f" pl_fed.systems but got {value!r}: set, for example, pl_fed.systems.LogNormal."
        )
    if not is_valid(column, value):
        raise ValueError(
            f"Expected argument `{PATH}.{column}` to be {describe_range(column)} but got {value}."
        )


def is_valid(column: str, value: float) -> bool:
    """Return whether a number is in the range of a column.

    Example:
        >>> is_valid("speed", 0.0), is_valid("availability", 0.0)
        (False, True)
    """
    return 0 <= value <= 1 if column in SHARES else 0 < value < float("inf")


def describe_range(column: str) -> str:
    """Return the range of a column in words."""
    return "in [0, 1]" if column in SHARES else "above 0, and finite"
