"""The script for a GPU keeps its time, its results and carried packages; its nets can be built."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "experiments" / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """The script, with the modules beside it; tests have modules of the same names."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    import gpu

    yield gpu
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def test_a_race_finds_carried_packages(script, monkeypatch):
    import race

    monkeypatch.setenv("PYTHONPATH", "/carried")
    path = race.environment(Path("/tree"), "cuda")["PYTHONPATH"]
    assert path.split(os.pathsep) == ["/tree", "/carried"]


@pytest.mark.slow
def test_nets_of_the_targets_take_the_inputs_of_their_cases(script):
    import cases

    assert {"MLP", "FlameCNN"} <= cases.NETS.keys()
    for case in cases.NETS.values():
        assert case.build().eval()(torch.zeros(2, *case.shape)).ndim == 2


@pytest.mark.slow
def test_processes_of_a_command_end_at_its_deadline(script, tmp_path):
    child = f"import time; time.sleep(0.6); open({str(tmp_path / 'late')!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    deadline = SimpleNamespace(left=0.2)
    printed = script.run_command([sys.executable, "-S", "-c", parent], {}, deadline)
    assert "stopped: its share of the time was over" in printed
    time.sleep(0.5)
    assert not (tmp_path / "late").exists()


@pytest.mark.slow
def test_a_failed_command_is_no_finished_part(script, monkeypatch, tmp_path, capsys):
    """The parts share the time that is left; a part that failed runs again."""
    run = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    parts = {
        "first": lambda out, device, deadline: script.run_pytest(out / "t", "x", "cpu", deadline),
        "memory": lambda out, device, deadline: f"{deadline.left:.0f} s are left",
    }
    run_command = script.run_command
    monkeypatch.setattr(script, "run_command", lambda command, *more: run_command(run, *more))
    monkeypatch.setattr(script, "PARTS", parts)
    arguments = ["gpu.py", "--out", str(tmp_path), "--device", "cpu", "--parts", *parts]
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "10"])
    script.main()
    assert [path.name for path in tmp_path.glob("*.done")] == ["memory.done"]
    printed = capsys.readouterr().out
    assert "failed: exit status 3" in printed
    assert int(printed.split(" s are left")[0].split()[-1]) > 500


def test_larger_federations_of_a_slow_engine_are_left_out(script):
    slow = {"net": "CNN", "engine": "one by one", "clients": "10", "round_ms": "600.000"}
    larger = {**slow, "clients": "100"}
    assert script.is_too_slow(larger, [slow])
    assert not script.is_too_slow(larger, [{**slow, "round_ms": "400.000"}])
    assert not script.is_too_slow({**slow, "clients": "10"}, [{**larger, "round_ms": "9000.000"}])
    assert len(script.SCALING) == len({*script.SCALING}) == 13
    assert {name for name, _ in script.SCALING} == script.ENGINES.keys()
