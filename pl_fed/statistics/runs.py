"""Tables of runs: one run per seed, pairs of two groups, and scores of all groups.

A diverged run has a value that is NaN or infinite, and a missing run has no row. Neither is left
out silently: a method that diverges on its worst seeds would look better than it is.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from pl_fed.statistics.intervals import compute_mean
from pl_fed.statistics.samples import Floats, subtract_pairs

Repeated = Literal["refuse", "mean", "first", "last"]
Diverged = Literal["refuse", "leave_out"] | float
_Key = tuple[Hashable, ...]  # group and seed, and the client if there is one


@dataclass(frozen=True)
class Runs:
    """Table of runs, or of the clients of runs.

    Args:
        groups: Name of the group of each row: the method and its condition, [rows].
        seeds: Seed of each row, [rows].
        values: Result of each row, [rows]; NaN or infinite for a run that diverged.
        clients: Client of each row, [rows], if the values are those of clients.

    Raises:
        ValueError: If the columns have different lengths, or there is no row.
    """

    groups: Sequence[str]
    seeds: Sequence[Hashable]
    values: Sequence[float]
    clients: Sequence[Hashable] | None = None

    def __post_init__(self) -> None:
        lengths = {
            "groups": len(self.groups),
            "seeds": len(self.seeds),
            "values": len(self.values),
        }
        if self.clients is not None:
            lengths["clients"] = len(self.clients)
        if len(set(lengths.values())) > 1 or not lengths["values"]:
            raise ValueError(
                "Expected the columns of a table of runs to have equal lengths above 0 but got"
                f" {', '.join(f'{number} {name}' for name, number in lengths.items())}."
            )

    @property
    def keys(self) -> list[_Key]:
        """The group and seed of each row, and the client if there is one."""
        if self.clients is None:
            return list(zip(self.groups, self.seeds))
        return list(zip(self.groups, self.seeds, self.clients))


def resolve_repeated_seeds(runs: Runs, rule: Repeated = "refuse") -> Runs:
    """Return a table with one run for each seed of a group.

    Two runs of one seed and config are the same experiment twice. As two independent runs they
    would narrow intervals, and give this seed a double weight.

    Args:
        runs: The table.
        rule: The result of repeated runs: an error, their mean, the first or the last one. The
            mean of runs with NaN is NaN.

    Returns:
        The table, in the order of the first rows of each seed.

    Raises:
        ValueError: If a seed is repeated and ``rule`` is ``"refuse"``.

    Example:
        >>> runs = Runs(["Ditto"] * 3, [0, 0, 1], [0.8, 0.9, 0.5])
        >>> resolve_repeated_seeds(runs, "last").values
        [0.9, 0.5]
    """
    if rule not in ("refuse", "mean", "first", "last"):
        raise ValueError(
            f"Expected argument `rule` to be refuse, mean, first or last but got {rule!r}."
        )
    rows_by_key: dict[_Key, list[float]] = {}
    for key, value in zip(runs.keys, runs.values):
        rows_by_key.setdefault(key, []).append(float(value))
    for key, values in rows_by_key.items():
        if rule == "refuse" and len(values) > 1:
            client = f" for client {key[2]}" if runs.clients is not None else ""
            raise ValueError(
                f"Expected one run per seed but got {len(values)} rows of seed {key[1]} in group"
                f" {key[0]!r}{client}. Remove the repeated runs, or choose a rule for them, for"
                " example rule='last' of resolve_repeated_seeds."
            )
    values = [_reduce(column, rule) for column in rows_by_key.values()]
    clients = None if runs.clients is None else [key[2] for key in rows_by_key]
    return Runs(
        [str(key[0]) for key in rows_by_key], [key[1] for key in rows_by_key], values, clients
    )


def _reduce(values: Sequence[float], rule: Repeated) -> float:
    if rule == "mean" and len(values) > 1:
        return float(np.mean(values))
    return values[-1] if rule == "last" else values[0]


@dataclass(frozen=True)
class Pairs:
    """Pairs of results: those of two groups on the same seeds, or clients of the same seeds.

    Args:
        first: Results of the first group, float64 [pairs].
        second: Results of the second group, float64 [pairs].
        seeds: Seed of each pair.
        clients: Client of each pair, if the pairs are clients. Clients of one seed are not
            independent of each other.
        incomplete: Number of seeds, or clients of a seed, that only one of the groups has.
        diverged: Number of pairs that were left out because a run diverged.
    """

    first: Floats
    second: Floats
    seeds: tuple[Hashable, ...]
    clients: tuple[Hashable, ...] | None = None
    incomplete: int = 0
    diverged: int = 0

    @property
    def differences(self) -> Floats:
        """``first − second``, without the rounding errors of the subtraction, [pairs]."""
        return subtract_pairs(self.first, self.second)

    def average_clients(self) -> Self:
        """Return one pair for each seed: the means over its clients, with equal weights.

        These are the pairs for a statement about further runs. They assume independent seeds, and
        nothing about the clients of a seed.
        """
        rows_by_seed: dict[Hashable, list[int]] = {}
        for row, seed in enumerate(self.seeds):
            rows_by_seed.setdefault(seed, []).append(row)
        first, second = (
            np.array([compute_mean(values[rows]) for rows in rows_by_seed.values()])
            for values in (self.first, self.second)
        )
        return type(self)(first, second, tuple(rows_by_seed), None, self.incomplete, self.diverged)


def pair_runs(runs: Runs, first: str, second: str, diverged: Diverged = "refuse") -> Pairs:
    """Return the pairs of two groups, in the order of the first group's rows.

    Args:
        runs: The table, with one run for each seed of the two groups.
        first: Name of the first group.
        second: Name of the second group.
        diverged: The treatment of runs that diverged: ``"refuse"`` them, ``"leave_out"`` their
            pairs, or a finite number that counts as their result, for example the accuracy of
            chance. Leaving out favours the method that diverges; report ``Pairs.diverged``.

    Raises:
        ValueError: If a group does not exist, a seed is repeated, the groups share no seed, or a
            run diverged and ``diverged`` is ``"refuse"``.
    """
    if not isinstance(diverged, str) and not math.isfinite(diverged):
        raise ValueError(f"Expected argument `diverged` to be a finite number but got {diverged}.")
    tables = [_take_group(runs, name) for name in (first, second)]
    common = [key for key in tables[0] if key in tables[1]]
    if not common:
        raise ValueError(
            f"Expected groups {first!r} and {second!r} to have equal seeds"
            f"{'' if runs.clients is None else ' and clients'} but they share none."
        )
    results = np.array([[table[key] for key in common] for table in tables])
    results, complete = _treat_diverged(results.T, diverged, (first, second), common)
    pairs = [key for key, is_complete in zip(common, complete) if is_complete]
    return Pairs(
        results[:, 0],
        results[:, 1],
        tuple(key[0] for key in pairs),
        None if runs.clients is None else tuple(key[1] for key in pairs),
        incomplete=len(tables[0].keys() ^ tables[1].keys()),
        diverged=len(common) - len(pairs),
    )


@dataclass(frozen=True)
class Scores:
    """Scores of several groups on the same seeds.

    Args:
        values: The scores, float64 [seeds, groups].
        seeds: The seeds that all groups have, in the order of the first group's rows.
        groups: Names of the groups.
        incomplete: Number of seeds that only some groups have.
        diverged: Number of seeds that were left out because a run diverged.
    """

    values: Floats
    seeds: tuple[Hashable, ...]
    groups: tuple[str, ...]
    incomplete: int = 0
    diverged: int = 0


def arrange_scores(
    runs: Runs, groups: Iterable[str] | None = None, diverged: Diverged = "refuse"
) -> Scores:
    """Return the scores of groups on the seeds that all of them have; the means over clients.

    Args:
        runs: The table, with one run for each seed of a group.
        groups: Names of the groups; by default all, in the order of their first rows.
        diverged: The treatment of runs that diverged: ``"refuse"`` them, ``"leave_out"`` their
            seeds for all groups, or a number that counts as their result. For ranks, −∞ makes them
            the last ones.

    Raises:
        ValueError: If a group does not exist, a seed is repeated, no seed is common to all groups,
            or a run diverged and ``diverged`` is ``"refuse"``.
    """
    names = tuple(dict.fromkeys(runs.groups if groups is None else groups))
    tables = []
    for name in names:
        values = _take_group(runs, name)
        if not isinstance(diverged, str):  # a number counts for each client that has diverged
            values = {key: v if np.isfinite(v) else diverged for key, v in values.items()}
        tables.append(_average_clients(values))
    seeds = dict.fromkeys(seed for table in tables for seed in table)
    common = [seed for seed in seeds if all(seed in table for table in tables)]
    if not common:
        raise ValueError(f"Expected a seed that all of {len(names)} groups have but got none.")
    results = np.array([[table[seed] for table in tables] for seed in common])
    results, complete = _treat_diverged(results, diverged, names, [(seed,) for seed in common])
    scored = tuple(seed for seed, is_complete in zip(common, complete) if is_complete)
    return Scores(results, scored, names, len(seeds) - len(common), len(common) - len(scored))


def _take_group(runs: Runs, name: str) -> dict[_Key, float]:
    """Return the values of a group by seed, or by seed and client; refuse repeated seeds."""
    rows = [(key, value) for key, value in zip(runs.keys, runs.values) if key[0] == name]
    if not rows:
        names = ", ".join(map(repr, dict.fromkeys(runs.groups)))
        raise ValueError(f"Expected a group of the table ({names}) but got {name!r}.")
    clients = None if runs.clients is None else [key[2] for key, _ in rows]
    seeds, values = [key[1] for key, _ in rows], [value for _, value in rows]
    table = resolve_repeated_seeds(Runs([name] * len(rows), seeds, values, clients))
    return {key[1:]: value for key, value in zip(table.keys, table.values)}


def _average_clients(table: dict[_Key, float]) -> dict[Hashable, float]:
    """Return the mean over the clients of each seed."""
    values: dict[Hashable, list[float]] = {}
    for key, value in table.items():
        values.setdefault(key[0], []).append(value)
    return {seed: float(np.mean(column)) for seed, column in values.items()}


def _treat_diverged(
    results: Floats, rule: Diverged, groups: Sequence[str], keys: Sequence[_Key]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the results [keys, groups] without diverged runs, and a mask of the remaining keys."""
    missing = ~np.isfinite(results)
    complete = np.ones(len(results), dtype=bool)
    if rule == "leave_out":
        complete = ~np.any(missing, axis=1)
    elif not isinstance(rule, str):
        results = np.where(missing, rule, results)
    elif rule != "refuse":
        raise ValueError(
            f"Expected argument `diverged` to be refuse, leave_out or a number but got {rule!r}."
        )
    elif missing.any():
        row, column = np.argwhere(missing)[0]
        raise ValueError(
            f"Expected finite results but got {results[row, column]} for seed {keys[row][0]} of"
            f" group {groups[column]!r}, as of a run that diverged. Set `diverged` to 'leave_out',"
            " or to a number that counts as its result, for example the accuracy of chance."
        )
    if not complete.any():
        raise ValueError("Expected a seed on which no run diverged but got none.")
    return results[complete], complete
