"""Runs of modules that keep something between steps end alike in two processes and after a resume.

``tests/preflight/test_step_trial.py`` compares the engines.
"""

import functools

import pytest
import worlds
from stateful_modules import ACCEPTED
from test_processes import assert_close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Local steps run eagerly"),
]


@pytest.fixture(scope="module")
def run_uninterrupted(tmp_path_factory):
    """Return a function of a module's name: the outcome of one process, which runs once."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return functools.cache(lambda name: worlds.run(f"stateful, {name}", folder / name))


@pytest.mark.parametrize("name", ACCEPTED)
def test_resumed_run_equals_uninterrupted_run(tmp_path, run_uninterrupted, name):
    scenario, expected = f"stateful, {name}", run_uninterrupted(name)
    worlds.run(scenario, tmp_path / "stopped", rounds=2)
    checkpoint = tmp_path / "stopped" / "run" / "checkpoints" / "last.ckpt"
    resumed = worlds.run(scenario, tmp_path / "resumed", resumes=checkpoint)
    assert_close(expected, resumed, 0.0)


def test_two_processes_equal_one(tmp_path, run_uninterrupted):
    jobs = {
        name: {"name": f"stateful, {name}", "folder": tmp_path / "2" / name} for name in ACCEPTED
    }
    (tmp_path / "2").mkdir()
    outcomes = worlds.start(2, 1, jobs, tmp_path / "2")
    for name in ACCEPTED:
        expected = run_uninterrupted(name)
        for outcome in outcomes:
            assert "failed" not in outcome[name], outcome[name]
            assert_close(expected["client"], outcome[name]["client"], 1e-10)
            assert_close(expected["metrics"], outcome[name]["metrics"], 1e-10)
