"""Every room exports all its public classes, or the package does."""

import importlib
import inspect
import pkgutil

import pytest

import pl_fed

ROOMS = ["aggregators", "attacks", "compressors", "metrics", "optimizers", "skews", "systems"]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_class_is_exported(room):
    package = importlib.import_module(f"pl_fed.{room}")
    missing = []
    for entry in pkgutil.walk_packages(package.__path__, f"pl_fed.{room}."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            exports = (getattr(package, name, None), getattr(pl_fed, name, None))
            if own and not name.startswith("_") and member not in exports:
                missing.append(f"{entry.name}.{name}")
    assert not missing


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_exports_a_class(room):
    package = importlib.import_module(f"pl_fed.{room}")
    assert any(
        inspect.isclass(member) and member.__module__.startswith(f"pl_fed.{room}.")
        for member in vars(package).values()
    )
