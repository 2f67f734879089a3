"""Contract tests: laws that all classes of a package keep, each class with several arguments.

A contract test checks a class and its arguments: ``check(kind, arguments, ...)``. The decorators
here turn such a check into one test per class, or into one test for all classes. A failure carries
a note with the class and the arguments.
"""

import functools
import importlib
import inspect
import pkgutil

import pytest


def find_configurations(package, base, arguments):
    """Return (class, arguments) for each concrete class of a package, with all its arguments.

    Args:
        package: The package; a walk finds its modules.
        base: The base class.
        arguments: The arguments to try by class name; by default none.
    """
    return [
        (member, choice)
        for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name, member in vars(importlib.import_module(entry.name)).items()
        if inspect.isclass(member) and member.__module__ == entry.name
        if issubclass(member, base) and not inspect.isabstract(member)
        for choice in arguments.get(name, [{}])
    ]


def check_all(check, configurations, *args, **kwargs):
    """Run a check with each class and its arguments; a failure names both."""
    for kind, arguments in configurations:
        try:
            check(kind, arguments, *args, **kwargs)
        except BaseException as error:
            error.add_note(f"The check failed for {kind.__name__} with {arguments}.")
            raise


def one_test_per_class(configurations):
    """Return a decorator that makes a check a test with one item per class."""
    kinds = list(dict.fromkeys(kind for kind, _ in configurations))

    def decorate(check):
        @pytest.mark.parametrize("kind", kinds, ids=[kind.__name__ for kind in kinds])
        def test(kind):
            check_all(check, [pair for pair in configurations if pair[0] is kind])

        return _named_like(check, test)

    return decorate


def one_test(configurations):
    """Return a decorator that makes a check one test of all classes; for fast checks.

    Arguments of the check behind the first two, as hypothesis gives them, stay the test's.
    """

    def decorate(check):
        def test(*args, **kwargs):
            check_all(check, configurations, *args, **kwargs)

        parameters = list(inspect.signature(check).parameters.values())[2:]
        test.__signature__ = inspect.Signature(parameters)
        return _named_like(check, test)

    return decorate


def _named_like(check, test):
    functools.update_wrapper(test, check, updated=())
    del test.__wrapped__  # pytest would read the check's arguments
    test.pytestmark = [mark for owner in (test, check) for mark in getattr(owner, "pytestmark", [])]
    return test
