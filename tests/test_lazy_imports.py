"""Packages that libraries merely name are imported at their first use, each in a new process."""

import subprocess
import sys

import pytest

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
def test_python_api_imports_no_heavy_package():
    out = run("""
from pl_fed import Federation, Trainer, clients, data
print_heavy()
import gc
print("lightning" in sys.modules, gc.isenabled())
""")
    assert out == ["imported: []", "True True"]


@pytest.mark.slow
def test_round_by_command_line_imports_no_heavy_package(tmp_path):
    """It reads data, trains, evaluates and writes the run's folder."""
    fit = ["fit", "--config", "quickstart", "--trainer.logger", "false", "--trainer.max_epochs=1"]
    out = run(
        """
from pl_fed.__main__ import main
main()
print_heavy()
print("sklearn.datasets" in sys.modules)
""",
        *(*fit, f"--trainer.default_root_dir={tmp_path}"),
    )
    assert out[-2:] == ["imported: []", "False"]
    assert [*tmp_path.glob("*/summary.json")]


@pytest.mark.slow
def test_torchvision_is_imported_at_its_first_use():
    out = run("""
lazy_imports.import_lazily()
print_heavy()
print([name for name in ("signal", "optimize") if name in vars(sys.modules["scipy"])])
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
    assert out == ["imported: []", "[]", "0.5", "torchvision 0.5"]


@pytest.mark.slow
def test_plots_of_torchmetrics_import_matplotlib():
    out = run("""
lazy_imports.import_lazily()
import torch, torchmetrics
metric = torchmetrics.MeanMetric()
metric.update(torch.tensor([1.0, 3.0]))
print("matplotlib" in sys.modules)
figure, axes = metric.plot()
print(type(figure).__name__, [float(y) for line in axes.lines for y in line.get_ydata()])
""")
    assert out == ["False", "Figure [2.0]"]


@pytest.mark.slow
def test_counter_of_operations_imports_triton_at_its_first_use():
    out = run("""
lazy_imports.import_lazily()
import torch
from torch.utils.flop_counter import FlopCounterMode
print_heavy()
with FlopCounterMode(display=False) as counter:
    torch.ones(3, 3) @ torch.ones(3, 3)
print(counter.get_total_flops())
""")
    assert out == ["imported: []", "54"]


@pytest.mark.slow
def test_failure_leaves_the_usual_import():
    out = run("""
class Broken(lazy_imports._LazyFinder):
    def exec_module(self, module):
        raise KeyError("another release")
lazy_imports._LazyFinder = Broken
lazy_imports.import_lazily()
print("torchmetrics" in sys.modules, any(isinstance(f, Broken) for f in sys.meta_path))
import torchmetrics
print(torchmetrics.MeanMetric().__class__.__name__)
""")
    assert out == ["False False", "MeanMetric"]


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
