"""Packages that libraries merely name are imported at their first use, each in a new process."""

import importlib
import subprocess
import sys

import pytest

from pl_fed import lazy_imports
from pl_fed.lazy_imports import LazyName

HEAVY = (
    *("datasets", "dp_accounting", "matplotlib", "pandas", "peft"),
    *("torchvision", "transformers", "wandb", "scipy.optimize", "scipy.signal"),
)
"""Packages that a run does not need if it neither compiles, logs to W&B, plots nor reads images."""

SETUP = f"""
import sys
from pl_fed import lazy_imports
def print_heavy():
    print("imported:", [name for name in {HEAVY} if name in sys.modules])
"""


def run(program, *arguments):
    command = [sys.executable, "-c", SETUP + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_import_of_pl_fed_imports_no_other_package():
    out = run("""
import pl_fed
print_heavy()
print([name for name in ("torch", "lightning", "numpy", "yaml", "rich") if name in sys.modules])
""")
    assert out == ["imported: []", "[]"]


@pytest.mark.slow
def test_round_by_command_line_imports_neither_heavy_packages_nor_the_compiler(tmp_path):
    """It reads data, trains in an eager engine, evaluates and writes the run's folder.

    torch's optimizers import the compiler themselves, so the test watches the imports of pl_fed.
    """
    fit = ["fit", "--config", "quickstart", "--trainer.logger", "false", "--trainer.max_epochs=1"]
    out = run(
        """
import builtins
original, imported = builtins.__import__, []
def watch(name, globals=None, *rest, **named):
    if (globals or {}).get("__name__", "").startswith("pl_fed"):
        imported.append(name)
    return original(name, globals, *rest, **named)
builtins.__import__ = watch
from pl_fed.__main__ import main
main()
print_heavy()
print("sklearn.datasets" in sys.modules, "pl_fed.engine.compiled" in sys.modules)
print("torch" in imported, [n for n in imported if n.startswith(("torch._ind", "torch._dyn"))])
""",
        *(*fit, "--federation.engine.name=stacked", f"--trainer.default_root_dir={tmp_path}"),
    )
    assert out[-3:] == ["imported: []", "False False", "True []"]
    assert [*tmp_path.glob("*/summary.json")]


@pytest.mark.exhaustive  # small packages and names stand for these below
@pytest.mark.slow
def test_python_api_imports_heavy_packages_at_their_first_use():
    """One interpreter uses a counter of operations, a detector's metric and a metric's plot."""
    out = run("""
from pl_fed import Federation, Trainer, clients, data
print_heavy()
import gc
print("lightning" in sys.modules, gc.isenabled())
print([name for name in ("signal", "optimize") if name in vars(sys.modules["scipy"])])
import torch
from torch.utils.flop_counter import FlopCounterMode
print_heavy()
with FlopCounterMode(display=False) as counter:
    torch.ones(3, 3) @ torch.ones(3, 3)
print(counter.get_total_flops())
from torchmetrics.detection import IntersectionOverUnion
box = {"boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0]]), "labels": torch.tensor([0])}
half = {**box, "boxes": torch.tensor([[0.0, 0.0, 1.0, 2.0]])}
metric = IntersectionOverUnion()
metric.update([{**half, "scores": torch.ones(1)}], [box])
print(metric.compute()["iou"].item())
import torchvision
print(torchvision.__name__, torchvision.ops.box_iou(box["boxes"], half["boxes"]).item())
import torchmetrics
metric = torchmetrics.MeanMetric()
metric.update(torch.tensor([1.0, 3.0]))
print("matplotlib" in sys.modules)
figure, axes = metric.plot()
print(type(figure).__name__, [float(y) for line in axes.lines for y in line.get_ydata()])
""")
    without = ["imported: []", "True True", "[]", "imported: []"]
    assert out == [*without, "54", "0.5", "torchvision 0.5", "False", "Figure [2.0]"]


def test_failure_leaves_the_usual_import(tmp_path, monkeypatch):
    """A small package stands for torchmetrics, and another for the one that it merely names."""
    (tmp_path / "small_metrics").mkdir()
    (tmp_path / "small_metrics" / "sums.py").touch()
    lines = "from small_metrics import sums\nfrom heavy_plots import draw\n"
    (tmp_path / "small_metrics" / "__init__.py").write_text(lines)
    (tmp_path / "heavy_plots.py").write_text("draw = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lazy_imports, "_NAMED", {"small_metrics": ("heavy_plots",)})

    class Broken(lazy_imports._LazyFinder):
        def exec_module(self, module):
            raise KeyError("another release")

    with monkeypatch.context() as patch:
        patch.setattr(lazy_imports, "_LazyFinder", Broken)
        lazy_imports.import_lazily()
    assert not {"small_metrics", "small_metrics.sums", "heavy_plots"} & {*sys.modules}
    assert not any(isinstance(finder, Broken) for finder in sys.meta_path)
    usual = importlib.import_module("small_metrics")
    assert usual.draw == 3
    for name in ("small_metrics", "small_metrics.sums", "heavy_plots"):
        del sys.modules[name]
    lazy_imports.import_lazily()
    assert isinstance(sys.modules.pop("small_metrics").draw, LazyName), "a finder that works"


def test_torchmetrics_that_is_imported_stays():
    import torchmetrics

    from pl_fed.lazy_imports import import_lazily

    import_lazily()
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
