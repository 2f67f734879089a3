"""Parameters of a test by their values: `make test` runs a choice of them, and `make test-all` all.

``exhaustive.py`` chooses among combinations by their ids instead.
"""

import itertools

import pytest


def mark_further(values, further):
    """Return the values of a parameter; those in ``further`` are marked exhaustive."""
    values = list(values)
    check_contained(further, values)
    return [mark_if(value in further, value) for value in values]


def mark_others(values, *chosen):
    """Return the values, or tuples of values, of parameters; all but the chosen are exhaustive."""
    values = list(values)
    check_contained(chosen, values)
    return [
        mark_if(value not in chosen, *(value if isinstance(value, tuple) else (value,)))
        for value in values
    ]


def check_contained(named, values):
    """Fail if a named value is none of the values."""
    unknown = [value for value in named if value not in values]
    assert not unknown, f"{unknown} are none of {values}"


def mark_if(is_further, *values, **options):
    """Return a case with these values, marked exhaustive if it is a further one."""
    return pytest.param(*values, marks=pytest.mark.exhaustive if is_further else (), **options)


def covering(*axes):
    """Return all combinations of the values of several parameters.

    Those that are not marked exhaustive run along the axes in step, so that each value is in one.
    """
    axes = [list(axis) for axis in axes]
    sizes = [len(axis) for axis in axes]
    chosen = {tuple(step % size for size in sizes) for step in range(max(sizes))}
    return [
        mark_if(places not in chosen, *(axis[place] for axis, place in zip(axes, places)))
        for places in itertools.product(*map(range, sizes))
    ]
