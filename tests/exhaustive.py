"""Marks for the combinations of a test's parameters that another combination stands for.

The marks belong above all ``parametrize`` of a test. They name combinations by their ids, in which
``*`` stands for any part. The ids of the tests stay as they are.
"""

from fnmatch import fnmatchcase
from itertools import product

import pytest

Parameters = type(pytest.param())


def exhaustive_for(*patterns):
    """Return a decorator that marks the named combinations as exhaustive, and no others."""
    return _mark_combinations(patterns, marks_named=True)


def exhaustive_but(*patterns):
    """Return a decorator that marks all combinations as exhaustive but the named ones."""
    return _mark_combinations(patterns, marks_named=False)


def _mark_combinations(patterns, marks_named):
    def decorate(test):
        axes = [mark for mark in test.pytestmark if mark.name == "parametrize"]
        others = [mark for mark in test.pytestmark if mark.name != "parametrize"]
        names = [name for axis in axes for name in _names_of(axis)]
        combinations = [_join(choice) for choice in product(*map(_list_parameters, axes))]
        for pattern in patterns:
            if not any(fnmatchcase(combination.id, pattern) for combination in combinations):
                raise ValueError(f"Expected ids of {test.__name__} but got {pattern!r}.")
        for place, case in enumerate(combinations):
            is_named = any(fnmatchcase(case.id, pattern) for pattern in patterns)
            further = [pytest.mark.exhaustive] if is_named == marks_named else []
            marks = (*case.marks, *further)
            combinations[place] = pytest.param(*case.values, marks=marks, id=case.id)
        test.pytestmark = others
        return pytest.mark.parametrize(names, combinations)(test)

    return decorate


def _names_of(axis):
    names = axis.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _list_parameters(axis):
    """Return the parameters of one ``parametrize`` with the ids that pytest gives them."""
    names, ids, parameters = _names_of(axis), axis.kwargs.get("ids"), []
    given = [*ids] if ids is not None and not callable(ids) else None
    for place, values in enumerate(axis.args[1]):
        own_id, marks = given and given[place], ()
        if isinstance(values, Parameters):
            own_id, marks, values = values.id or own_id, values.marks, values.values
        elif len(names) == 1 and isinstance(axis.args[0], str):
            values = (values,)
        make_id = ids if callable(ids) else lambda value: None
        parts = (
            make_id(value) or _describe(value, f"{name}{place}")
            for name, value in zip(names, values, strict=True)
        )
        parameters.append(pytest.param(*values, marks=marks, id=own_id or "-".join(parts)))
    return _number_equal_ids(parameters)


def _number_equal_ids(parameters):
    ids, numbered = [parameter.id for parameter in parameters], []
    for place, parameter in enumerate(parameters):
        number = ids[:place].count(parameter.id) if ids.count(parameter.id) > 1 else ""
        numbered.append(parameter._replace(id=f"{parameter.id}{number}"))
    return numbered


def _describe(value, otherwise):
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | complex | None):
        return str(value)
    return getattr(value, "__name__", otherwise)


def _join(choice):
    """Return the parameters of several ``parametrize`` as those of one."""
    values = [value for parameter in choice for value in parameter.values]
    marks = [mark for parameter in choice for mark in parameter.marks]
    return pytest.param(*values, marks=marks, id="-".join(parameter.id for parameter in choice))
