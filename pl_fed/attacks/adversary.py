"""The section ``federation.adversary``: the Byzantine clients and their attack."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from pl_fed.arguments import check_choice, check_instances, check_integers
from pl_fed.attacks.base import Attack

Knowledge = Literal["all", "own"]
_PATH = "federation.adversary"


@dataclass(frozen=True)
class Adversary:
    """Adversary: the Byzantine clients and their attack.

    Args:
        attack: The attack of the Byzantine clients, on their data or their uploads.
        fraction: Fraction of the clients that is Byzantine, in [0, 1]. The number of clients is
            rounded down, and the seed draws the clients.
        ids: Ids of the Byzantine clients, instead of ``fraction``.
        redraw: Whether each round draws its own Byzantine clients, by ``fraction``. Metrics are
            then over the clients that are benign in the round before the evaluation.
        start_round: First round of the attack. Byzantine clients are honest before it, but metrics
            leave them out in every round.
        stop_round: First round after the attack: Byzantine clients are honest from it on, which
            shows how long a backdoor lasts. ``None`` never stops the attack.
        knowledge: The honest uploads of a round that the Byzantine clients know: ``"all"``, or only
            their ``"own"``, the uploads that they would send if they were honest.
        expected: Number of Byzantine uploads that the aggregator assumes in a round. ``None``
            multiplies the fraction of Byzantine clients by the number of uploads, and rounds down,
            as in Ditto. A given number is reduced by the number of broken uploads.
        corruption: Attack on the training data of all clients, benign and Byzantine, such as
            outliers (FedTilt, section IV).

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or does not fit another one.

    Example:
        >>> from pl_fed.attacks import RandomLabels
        >>> Adversary(RandomLabels(), fraction=0.2).start_round
        0
    """

    attack: Attack | None = None
    fraction: float | None = None
    ids: list[int] | None = None
    redraw: bool = False
    start_round: int = 0
    stop_round: int | None = None
    knowledge: Knowledge = "all"
    expected: int | None = None
    corruption: Attack | None = None

    def __post_init__(self) -> None:
        attacks = {"attack": self.attack, "corruption": self.corruption}
        check_instances(Attack, **{f"{_PATH}.{name}": value for name, value in attacks.items()})
        self._check_clients()
        self._check_rounds()
        if self.expected is not None:
            check_integers(0, **{f"{_PATH}.expected": self.expected})
        check_choice(("all", "own"), **{f"{_PATH}.knowledge": self.knowledge})
        self._check_attacks()

    def _check_clients(self) -> None:
        """Check the arguments that select the Byzantine clients."""
        if self.fraction is not None and self.ids is not None:
            raise ValueError(
                f"Expected only one of `{_PATH}.fraction` and `{_PATH}.ids` to be given but got"
                f" {self.fraction!r} and {self.ids!r}: set the other to null."
            )
        if self.fraction is not None:
            _check_fraction(self.fraction)
        if self.ids is not None:
            object.__setattr__(self, "ids", _convert_ids(self.ids))
        if self.redraw and self.ids is not None:
            raise ValueError(
                f"Expected argument `{_PATH}.fraction` to be given with `{_PATH}.redraw` but got"
                f" `{_PATH}.ids` = {self.ids}: set a fraction instead, for example 0.2."
            )

    def _check_rounds(self) -> None:
        """Check that the attack stops after its first round."""
        check_integers(0, **{f"{_PATH}.start_round": self.start_round})
        if self.stop_round is None:
            return
        check_integers(0, **{f"{_PATH}.stop_round": self.stop_round})
        if self.stop_round <= self.start_round:
            raise ValueError(
                f"Expected argument `{_PATH}.stop_round` to be greater than `{_PATH}.start_round` ="
                f" {self.start_round} but got {self.stop_round}: set, for example,"
                f" {self.start_round + 10}, or null for an attack in all later rounds."
            )

    def attacks_in(self, round: int) -> bool:
        """Return whether Byzantine clients attack in a round, from 0."""
        return round >= self.start_round and (self.stop_round is None or round < self.stop_round)

    def _check_attacks(self) -> None:
        """Check that attack, corruption and knowledge fit together."""
        clients = "fraction" if self.fraction else "ids"
        if getattr(self, clients) and self.attack is None:
            raise ValueError(
                f"Expected argument `{_PATH}.attack` to be given with `{_PATH}.{clients}` ="
                f" {getattr(self, clients)} but got None: name one, for example"
                " pl_fed.attacks.RandomLabels."
            )
        if self.knowledge == "own" and self.attack is not None and self.attack.needs_simulation:
            raise ValueError(
                f'Expected argument `{_PATH}.knowledge` to be "all" for'
                f" {type(self.attack).__name__}, because it tries its factor against the defence,"
                ' but got "own".'
            )
        if self.corruption is not None and self.corruption.forges:
            raise ValueError(
                f"Expected argument `{_PATH}.corruption` to change data only but got"
                f" {type(self.corruption).__name__}, which forges uploads: set it as"
                f" `{_PATH}.attack`."
            )


def _check_fraction(fraction: Any) -> None:
    """Refuse a fraction that is not a number in [0, 1]."""
    expected = f"Expected argument `{_PATH}.fraction` to be a number in [0, 1] but got {fraction!r}"
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"{expected}: to select clients by id, set `{_PATH}.ids`.")
    if not 0 <= fraction <= 1:
        raise ValueError(f"{expected}: set, for example, 0.2 for a fifth of all clients.")


def _convert_ids(ids: Any) -> list[int]:
    """Return client ids as a list; refuse ids that are not different integers."""
    if isinstance(ids, Tensor | np.ndarray):
        ids = ids.tolist()
    is_list = isinstance(ids, Collection) and not isinstance(ids, str | Mapping)
    if not is_list or not all(type(client) is int for client in ids):
        raise TypeError(
            f"Expected argument `{_PATH}.ids` to be a list of client ids but got {ids!r}: give"
            " integers, for example [0, 3]."
        )
    if repeated := [client for client, count in Counter(ids).items() if count > 1]:
        raise ValueError(
            f"Expected argument `{_PATH}.ids` to be different client ids but got {repeated} more"
            " than once: give each id once."
        )
    return list(ids)
