"""Tables of cases that are one test: a thousand refusals take longer as items than they run."""

import functools
import inspect

import pytest


def table_test(names, rows, ids=None):
    """Return a decorator that makes a check one test of all rows, which names those that fail.

    It takes what ``pytest.mark.parametrize`` takes. The rows share the fixtures of the test.

    Args:
        names: The arguments of the check that a row has.
        rows: The values of these arguments.
        ids: Names of the rows, or a function that names a value.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [row if len(names) > 1 else (row,) for row in rows]
    if ids is None or callable(ids):
        ids = [", ".join(str((ids or repr)(value)) for value in row) for row in rows]

    def decorate(check):
        def test(**fixtures):
            failures = []
            for name, row in zip(ids, rows, strict=True):
                try:
                    check(**fixtures, **dict(zip(names, row, strict=True)))
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"The row of {name} failed.")
                    failures.append(failure)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(rows)} rows failed", failures)

        functools.update_wrapper(test, check)
        del test.__wrapped__  # pytest would read the check's arguments
        parameters = inspect.signature(check).parameters.values()
        test.__signature__ = inspect.Signature([p for p in parameters if p.name not in names])
        return test

    return decorate
