"""Runs of modules that keep something between steps end alike in two processes and after a resume.

``tests/preflight/test_step_trial.py`` compares the engines.
"""

import functools

import pytest
import worlds
from further_cases import mark_others
from stateful_modules import ACCEPTED
from test_processes import assert_close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Local steps run eagerly"),
]


CHOSEN = [  # of those that keep something alike, one
    *("CumulativeNorm", "LazyBuffer", "OldSpectralNorm", "RunningScale", "ScriptedParts", "Stash"),
    "Unsaved",
]


@pytest.fixture(scope="module")
def run_uninterrupted(tmp_path_factory):
    """Return a function of a module's name: the outcome of one process, which runs once."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return functools.cache(lambda name: worlds.run(f"stateful, {name}", folder / name))


@pytest.mark.parametrize("name", mark_others(ACCEPTED, *CHOSEN))
def test_resumed_run_equals_uninterrupted_run(tmp_path, run_uninterrupted, name):
    scenario, expected = f"stateful, {name}", run_uninterrupted(name)
    worlds.run(scenario, tmp_path / "stopped", rounds=2)
    checkpoint = tmp_path / "stopped" / "run" / "checkpoints" / "last.ckpt"
    resumed = worlds.run(scenario, tmp_path / "resumed", resumes=checkpoint)
    assert_close(expected, resumed, 0.0)


def test_two_processes_equal_one(tmp_path, run_uninterrupted):
    assert_two_equal_one(CHOSEN, tmp_path, run_uninterrupted)


@pytest.mark.exhaustive
def test_two_processes_equal_one_for_further_modules(tmp_path, run_uninterrupted):
    assert_two_equal_one(ACCEPTED.keys() - {*CHOSEN}, tmp_path, run_uninterrupted)


def assert_two_equal_one(names, folder, run_uninterrupted):
    """Check that two processes end as one with each of the modules."""
    jobs = {
        name: {"name": f"stateful, {name}", "folder": folder / "2" / name} for name in sorted(names)
    }
    (folder / "2").mkdir()
    outcomes = worlds.start(2, 1, jobs, folder / "2")
    for name in names:
        expected = run_uninterrupted(name)
        for outcome in outcomes:
            assert "failed" not in outcome, outcome["failed"]
            assert_close(expected["client"], outcome[name]["client"], 1e-10)
            assert_close(expected["metrics"], outcome[name]["metrics"], 1e-10)
