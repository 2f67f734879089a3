"""A watch over the values of modules during the local steps of each round."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import is_
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import kept_parts, user_name
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.nets.kept_values import KeptValues, Part, ValueGuard, join_names
from pl_fed.rounds.step_facts import StepFacts
from pl_fed.rounds.step_rules import describe_shared_values, refuse_changes

_MISSING = object()


class ValueWatch:
    """Value watch: refuses local steps that change what the trial before training did not show.

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
        attributes = [(part, vars(part.owner).copy()) for part in self._parts]
        guard = ValueGuard(self._parts) if self._scratch else None
        options = OptionGuard.guard_trainer(self.client)
        yield
        changed_options = tuple(options.restore())
        found = KeptValues.record(self._parts) if before is not None else None
        changed: set[str] = set()
        for part, values in attributes:
            if not _has_same_values(part, values):
                changed.update(_restore(part, values))
        if guard is not None:  # values of one client must not stay, also deep in a dict
            guard.restore()
        if not changed and not changed_options and found is None:
            return
        net = type(self.client.global_model).__name__
        facts = StepFacts(net=net, optimizer_options=changed_options)
        facts = self._add_changes(facts, changed, before, found)
        if sentence := describe_shared_values(facts):
            rank_zero_warn(sentence)
        try:
            refuse_changes(facts)
        except ValueError as error:
            error.add_note(f"In round {round}; the trial before training did not show it.")
            raise

    def _add_changes(
        self,
        facts: StepFacts,
        changed: set[str],
        before: KeptValues | None,
        after: KeptValues | None,
    ) -> StepFacts:
        """Return facts with the changes of a round."""
        frozen: frozenset[str] = frozenset()
        toggled: frozenset[str] = frozenset()
        shared: frozenset[str] = frozenset()
        if before is not None and after is not None:
            changes = before.changes(after)
            changed = changed | changes.attributes
            shared = changes.outside
            frozen, toggled = changes.frozen_parameters, changes.toggled

        def names(found: Any) -> tuple[str, ...]:
            return tuple(dict.fromkeys(user_name(self.client, name) for name in sorted(found)))

        return replace(
            facts,
            attributes=names(changed - self._scratch),
            frozen_parameters=names(frozen),
            toggled=names(toggled),
            shared=names(shared - self._outside),
        )


def _has_same_values(part: Part, before: dict[str, Any]) -> bool:
    """Return whether all attributes of a part are the objects that they were before."""
    values = vars(part.owner)
    return values.keys() == before.keys() and all(map(is_, values.values(), before.values()))


def _restore(part: Part, before: dict[str, Any]) -> Iterator[str]:
    """Restore the attributes that are other objects, and yield their dotted names."""
    values = vars(part.owner)
    ignored = part.all_ignored
    for name in dict.fromkeys((*before, *values)):
        if name in ignored or values.get(name, _MISSING) is before.get(name, _MISSING):
            continue
        if name in before:
            values[name] = before[name]
        else:
            del values[name]
        yield join_names(part.name, name)
