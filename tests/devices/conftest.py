"""Fixtures that run cases on the pretend device, in forks of a process that has it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pretend_device
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 550  # a script's time limit
SCRIPTS = ("device_server", "device_cases", "planted_faults", "run_on_device", "command_on_device")
# these install the device
collect_ignore = [f"{name}.py" for name in (*SCRIPTS, "pytest_on_device")]


@pytest.fixture(scope="session")
def device_server():
    """The process with the pretend device; its forks run the scripts."""
    if reason := pretend_device.missing_tool():
        pytest.skip(f"the pretend device cannot be built: {reason}")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "device_server.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def run_script(device_server, tmp_path_factory):
    """Return a function that runs a script of this folder, or code, in a process of its own."""

    def run(script, *arguments, **environment):
        folder = tmp_path_factory.mktemp("script")
        outputs = [str(folder / "stdout"), str(folder / "stderr")]
        arguments = [*([str(HERE / script)] if script else []), *arguments]
        job = [arguments, {**os.environ, **environment}, outputs, SECONDS]
        print(json.dumps(job), file=device_server.stdin, flush=True)
        status = int(device_server.stdout.readline())
        texts = [Path(path).read_text() for path in outputs]
        return subprocess.CompletedProcess(arguments, status, *texts)

    return run


@pytest.fixture
def compare(run_script, tmp_path):
    """Return a function that compares a part of a group of cases on the device with the CPU."""

    def run(group, part="chosen", *words):
        path = tmp_path / "rows.json"
        done = run_script("run_on_device.py", group, str(path), part, *words)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(path.read_text())

    return run
