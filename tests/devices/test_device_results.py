"""The whole product runs on a device, and gives the CPU's numbers."""

import json
import os

import pytest
from further_cases import mark_if

pytestmark = pytest.mark.slow

GROUPS = {  # with the least number of cases that the walks must find
    "algorithms": 55,
    "defences and attacks": 100,
    "scenarios": 40,
    "pieces": 58,
    "modules": 6,
    "storage and processes": 15,
}


@pytest.mark.parametrize(
    ("group", "part"),
    [
        *(pytest.param(group, "chosen", id=group) for group in GROUPS),
        *(mark_if(True, group, "further", id=f"{group}, further") for group in GROUPS),
    ],
)
def test_device_gives_the_numbers_of_the_cpu(compare, group, part):
    result = compare(group, part)
    assert result["cases"] >= GROUPS[group]
    rows = result["rows"]
    wrong = {
        name: row
        for name, row in rows.items()
        if "difference" not in row or not row["difference"] <= row["tolerance"]
    }
    assert wrong == {}
    launches = {name: row["launches"] for name, row in rows.items() if "processes" not in name}
    assert min(launches.values()) > 100, min(launches, key=launches.get)


def test_command_line_runs_on_the_device(run_script, tmp_path):
    done = run_script("command_on_device.py", FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    for place in ("cpu", "gpu"):
        assert "error" not in numbers[place], numbers[place]["error"]
    cpu, device = numbers["cpu"], numbers["gpu"]
    assert {"fit", "half", "resumed", "models"} <= cpu.keys() == device.keys()
    assert device["files"] == cpu["files"] != []
    for part in cpu.keys() - {"files"}:
        assert len(device[part]) == len(cpu[part]) > 0, part
        for row, expected in zip(device[part], cpu[part]):
            assert row == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True), part


def test_command_line_shows_the_traceback_of_a_device_error(run_script, tmp_path):
    fault = "import sys; sys.path[:0] = ['tests/devices']; import command_on_device as c\n"
    fault += "from pl_fed.data import FederatedData as M; M.transfer_batch_to_device ="
    fault += " lambda self, batch, device, index: batch.to(device)\nc.main(sys.argv[1:])"
    options = ("--trainer.accelerator=gpu", "--trainer.logger=false", "--trainer.max_epochs=5")
    place = f"--trainer.default_root_dir={tmp_path}"
    done = run_script("", "-c", fault, "fit", "--config=configs/quickstart.yaml", place, *options)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "RuntimeError: Expected all tensors to be on the same device" in done.stderr


@pytest.mark.exhaustive
def test_gpu_tests_run_on_the_device(run_script):
    """``tests/test_gpu.py`` is for real cards; its eager tests show here that it fits pl_fed."""
    words = "not graphs and not two_processes and not nccl and not wait and not compiled"
    options = ("-n", "0", "-m", "gpu", "-k", words, "-p", "pytest_on_device")
    paths = os.pathsep.join(["tests/devices", os.environ.get("PYTHONPATH", "")])
    done = run_script("", "-m", "pytest", "tests/test_gpu.py", *options, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
