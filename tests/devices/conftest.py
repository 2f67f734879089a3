"""Fixtures that run cases on the pretend device, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pretend_device
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = ("device_cases", "planted_faults", "run_on_device", "command_on_device")
# these install the device
collect_ignore = [f"{name}.py" for name in (*SCRIPTS, "pytest_on_device")]


@pytest.fixture(scope="session")
def run_script(tmp_path_factory):
    """Return a function that runs a script of this folder in an interpreter of its own."""
    if reason := pretend_device.missing_tool():
        pytest.skip(f"the pretend device cannot be built: {reason}")

    def run(script, *arguments, **environment):
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        command = [sys.executable, *([str(HERE / script)] if script else []), *arguments]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=550
        )

    return run


@pytest.fixture
def compare(run_script, tmp_path):
    """Return a function that compares a group of cases on the device with the CPU."""

    def run(group, *words):
        path = tmp_path / "rows.json"
        done = run_script("run_on_device.py", group, str(path), *words)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(path.read_text())

    return run
