"""Fixtures and hooks for all tests."""

import contextlib
import functools
import gc
import os
import re
import subprocess
from multiprocessing.process import BaseProcess

import pytest
from hypothesis import HealthCheck, settings
from lanes import is_chosen

from pl_fed.lazy_imports import quick_imports

with quick_imports():  # as the command line does: a third of the time until the first test
    from equal_trials import equal_trials_shared, trials_skipped
    from lightning.fabric.utilities import registry

    from pl_fed import torch_internals
    from pl_fed.callbacks import run_summary
    from pl_fed.engine import compiled

GLOBAL_SEED = "PL_GLOBAL_SEED"
FAST = "not slow"  # the expression of the fast lane
SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)

# on a busy machine, slow draws say nothing about the code
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

os.environ.setdefault("WANDB_MODE", "disabled")  # tests of W&B set their own


def pytest_addoption(parser):
    """Add the option for the tests that are marked ``exhaustive``."""
    parser.addoption(
        "--exhaustive",
        default="all",
        metavar="all|none|K/N",
        help="of the tests of further combinations, run all (the default), none, or a part of them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out exhaustive tests that nobody asks for; none belongs to the fast lane."""
    chosen, left_out = [], []
    for item in items:
        is_exhaustive = item.get_closest_marker("exhaustive") is not None
        if is_exhaustive:
            item.add_marker("slow")
        asked = not is_exhaustive or is_chosen(item.nodeid, config.option.exhaustive)
        (chosen if asked else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def pytest_configure(config):
    """Hide the real data from the fast lane."""
    if config.option.markexpr == FAST:
        os.environ.pop("PL_FED_DATA", None)


def pytest_ignore_collect(collection_path, config):
    """Leave out the files of the fast lane without a fast test: it need not import them."""
    if config.option.markexpr == FAST and collection_path.name.startswith("test_"):
        return True if SLOW_FILE.search(collection_path.read_text()) else None
    return None


def pytest_collection_finish():
    """Let the garbage collector skip permanent objects: 4 % of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="session")
def fast_lane(request):
    """Let no test or fixture of the fast lane start a process or compile."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.option.markexpr == FAST:
            patch.setattr(subprocess.Popen, "__init__", refuse_in_fast_lane)
            patch.setattr(BaseProcess, "start", refuse_in_fast_lane)
            patch.setattr(compiled, "compile_graph", refuse_in_fast_lane)
            patch.setattr(torch_internals, "compile_graph", refuse_in_fast_lane)
            patch.setattr(run_summary, "read_commit", lambda: None)  # starts git
        yield


def refuse_in_fast_lane(*_, **__):
    """Fail."""
    pytest.fail("A test that starts a process or compiles must be marked slow.")


@pytest.fixture(autouse=True, scope="session")
def installed_packages():
    """Let Trainers look once for callbacks of installed packages: 10 ms, of a fit of 200 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def results_folder(tmp_path_factory):
    """Save results of the privacy accountant in a temporary folder, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_FED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@contextlib.contextmanager
def restore_global_seed():
    """Restore the seed that Lightning's ``seed_everything`` leaves in the environment."""
    before = os.environ.get(GLOBAL_SEED)
    yield
    if before is None:
        os.environ.pop(GLOBAL_SEED, None)
    else:
        os.environ[GLOBAL_SEED] = before


@pytest.fixture(autouse=True, scope="module")
def seed_of_module():
    """Let the fixtures of a module leave no seed to later modules: it draws their splits."""
    with restore_global_seed():
        yield


@pytest.fixture(autouse=True)
def seed_of_test(seed_of_module):
    """Let a test leave no seed to later tests."""
    with restore_global_seed():
        yield


@pytest.fixture(autouse=True, scope="module")
def shared_trials(request):
    """Let equal federations share their trials before training, except in tests of trials."""
    if request.path.parent.name == "preflight" or request.path.name == "test_stateful_modules.py":
        yield
    else:
        with equal_trials_shared():
            yield


@pytest.fixture
def untried():
    """Let federations of rounds without a Trainer skip the trials before training."""
    with trials_skipped():
        yield


@pytest.fixture
def temporary_working_folder(tmp_path, monkeypatch):
    """Let a Trainer without a folder make its runs below a temporary one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def real_data():
    """The folder with the real data sets, or ``None``: PL_FED_DATA."""
    return os.environ.get("PL_FED_DATA")


@pytest.fixture
def uncompiled(monkeypatch):
    """Run traced steps without the slow compilation; return the traced graphs.

    The tracer notes no shapes then, more than half of its work: only the compiler reads them.
    """
    graphs = []

    def keep(graph, *_, **__):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiled, "compile_graph", keep)
    monkeypatch.setattr("torch.fx.experimental.proxy_tensor.extract_val", lambda *_, **__: None)
    return graphs
