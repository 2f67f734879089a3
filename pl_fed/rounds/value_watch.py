"""A watch over the values of modules during the local steps of each round."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import kept_parts, user_names
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.nets.fingerprints import Fingerprints
from pl_fed.nets.kept_values import Changes, KeptValues, Part, ValueGuard, join_names
from pl_fed.preflight.step_facts import StepFacts
from pl_fed.preflight.step_rules import describe_shared_values, refuse_changes

_MISSING = object()


class ValueWatch:
    """Value watch: refuses changes by local steps that the trial before training did not show.

    In each round it compares the attributes of all modules by identity, and restores those that
    carry nothing to another client. In the rounds 0, 1, 3, 7, ... it also compares them deep
    inside, with frozen parameters.

    Args:
        client: The algorithm.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._scratch: frozenset[str] = frozenset()
        self._outside: frozenset[str] = frozenset()
        self._parts: list[Part] | None = None

    def expect(self, facts: StepFacts) -> None:
        """Take the attributes that local steps may change from the facts of a trial."""
        self._scratch = frozenset(facts.scratch)
        self._outside = frozenset(facts.outside)

    @contextmanager
    def watch(self, round: int) -> Iterator[None]:
        """Compare the values of all modules before and after the local steps of a round.

        Raises:
            ValueError: If local steps change an attribute or a frozen parameter.
        """
        if self._parts is None:
            self._parts = [
                part
                for part in kept_parts(self.client)
                if part.owner is not self.client and part.ignored is not None
            ]
        reads = (round + 1) & round == 0  # rounds 0, 1, 3, 7, ...
        before = KeptValues.record(self._parts) if reads else None
        attributes = _AttributesBefore(self._parts)
        guard = ValueGuard(self._parts) if self._scratch else None
        options = OptionGuard.guard_trainer(self.client)
        changes = Changes()
        try:
            yield
            if before is not None:
                changes = before.changes(KeptValues.record(self._parts))
        finally:  # also after an exception, for a later fit
            changed_options = tuple(options.restore())
            changed = attributes.restore()
            if guard is not None:  # values of one client must not stay, also deep in a dict
                guard.restore()
        if not changed and not changed_options and before is None:
            return
        facts = StepFacts(
            net=type(self.client.global_model).__name__,
            optimizer_options=changed_options,
            attributes=user_names(self.client, (changed | changes.attributes) - self._scratch),
            frozen_parameters=user_names(self.client, changes.frozen_parameters),
            toggled=user_names(self.client, changes.toggled),
            shared=user_names(self.client, changes.outside - self._outside),
        )
        if sentence := describe_shared_values(facts):
            rank_zero_warn(sentence)
        try:
            refuse_changes(facts)
        except ValueError as error:
            error.add_note(f"In round {round}; the trial before training did not show it.")
            raise


class _AttributesBefore:
    """The attributes of parts before the local steps of a round.

    All are compared as one list, because there are many of them, and few ever change.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._values = [vars(part.owner) for part in parts]
        self._before = [*map(dict.copy, self._values)]

    def restore(self) -> set[str]:
        """Restore the attributes that are other objects; return the names of those that differ."""
        if _have_same_entries(self._values, self._before):
            return set()
        pairs = zip(self._parts, self._before)
        return {name for part, before in pairs for name in _restore(part, before)}


def _have_same_entries(dicts: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Return whether dicts have the same names, in the same order, for the same objects."""
    names, other_names = [*chain.from_iterable(dicts)], [*chain.from_iterable(others)]
    values, other_values = (map(dict.values, entries) for entries in (dicts, others))
    return names == other_names and all(
        map(is_, chain.from_iterable(values), chain.from_iterable(other_values))
    )


def _restore(part: Part, before: dict[str, Any]) -> Iterator[str]:
    """Restore the attributes that are other objects, and yield the names of those that differ.

    A step may build an equal value anew, as torchvision's detectors do with their anchors.
    """
    values, prints = vars(part.owner), Fingerprints({})
    ignored = part.all_ignored
    for name in dict.fromkeys((*before, *values)):
        now, then = values.get(name, _MISSING), before.get(name, _MISSING)
        if name in ignored or now is then:
            continue
        if then is _MISSING:
            del values[name]
        else:
            values[name] = then
        if now is _MISSING or then is _MISSING or prints.compute(now) != prints.compute(then):
            yield join_names(part.name, name)
