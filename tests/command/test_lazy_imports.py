"""Packages that torchmetrics names are imported at their first use, in processes of their own."""

import subprocess
import sys

import pytest

from pl_fed.command.lazy_imports import LazyName

SETUP = """
import sys
from pl_fed.command import lazy_imports
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_torchvision_is_imported_at_its_first_use():
    out = run("""
lazy_imports.import_torchmetrics()
heavy = {"torchvision", "transformers", "scipy.signal", "scipy.optimize"}
print(heavy & set(sys.modules), [name for name in heavy if "." in name
      and name.split(".")[1] in vars(sys.modules["scipy"])])
import torch
from torchmetrics.detection import IntersectionOverUnion
box = {"boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0]]), "labels": torch.tensor([0])}
half = {**box, "boxes": torch.tensor([[0.0, 0.0, 1.0, 2.0]])}
metric = IntersectionOverUnion()
metric.update([{**half, "scores": torch.ones(1)}], [box])
print(metric.compute()["iou"].item())
import torchvision
print(torchvision.__name__, torchvision.ops.box_iou(box["boxes"], half["boxes"]).item())
""")
    assert out.splitlines() == ["set() []", "0.5", "torchvision 0.5"]


@pytest.mark.slow
def test_failure_leaves_the_usual_import():
    out = run("""
class Broken(lazy_imports._LazyFinder):
    def exec_module(self, module):
        raise KeyError("another release")
lazy_imports._LazyFinder = Broken
lazy_imports.import_torchmetrics()
print("torchmetrics" in sys.modules, any(isinstance(f, Broken) for f in sys.meta_path))
import torchmetrics
print(torchmetrics.MeanMetric().__class__.__name__)
""")
    assert out.splitlines() == ["False False", "MeanMetric"]


def test_torchmetrics_that_is_imported_stays(monkeypatch):
    import torchmetrics

    from pl_fed.command.lazy_imports import import_torchmetrics

    import_torchmetrics()
    assert sys.modules["torchmetrics"] is torchmetrics


def test_lazy_name_acts_as_its_target():
    counter = LazyName("collections", "Counter")
    assert counter("aab")["a"] == 2
    assert counter.fromkeys is not None
    assert isinstance({}, LazyName("builtins", "dict"))
    assert not isinstance(3, LazyName("builtins", "dict"))
    assert not isinstance(3, LazyName("no_such_module", "Thing")), "it has no instances yet"

    class Mine(counter):
        pass

    assert Mine("bb")["b"] == 2
    with pytest.raises(AttributeError):
        getattr(LazyName("collections", "Counter"), "none_such")  # noqa: B009
