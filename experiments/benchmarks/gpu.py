"""``python experiments/benchmarks/gpu.py``: everything about pl_fed on a GPU, in nine minutes.

The parts run in this order, and each writes its results before the next begins:

- ``first``: three rounds of Ditto with a test and a checkpoint, for an MLP and for BatchNorm.
- ``tests``: the tests marked ``gpu``, without those that compile.
- ``numbers``: two runs of the command line on the CPU and on the GPU, and their results.
- ``scaling``: 10, 100 and 1,000 clients of the nets in each engine, the most telling rows first.
- ``targets``: ``targets.py --device cuda``, with pfl-research where it is installed.
- ``steps``: a profile of local steps, and the operations that wait for the GPU.
- ``memory``: the GPU's memory over 1,000 rounds.
- ``compiled``: the tests marked ``gpu`` that compile.

Each part ends after its share of the time that is left of ``--minutes``; what it has measured by
then stays. A row of ``scaling`` that compiles may pass the end by a minute. A part whose results
are complete is skipped, and ``scaling`` continues where it stopped. ``--device cpu`` tries the
script without a GPU. All files go to ``--out``.

A machine without a package index needs three wheels beside torch, torchvision, Lightning and
torchmetrics: jsonargparse, docstring_parser and typeshed_client. ``pip install --target FOLDER``
them, and set ``PYTHONPATH=FOLDER``. W&B is not used.
"""

import argparse
import contextlib
import csv
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from cases import SCALED, TARGETS, Case
from fit import fit
from report import machine, read_rows, table
from settings import Settings, build_python_path

ROOT = Path(__file__).resolve().parents[2]
SHARES = {  # of the time
    "first": 0.05,
    "tests": 0.15,
    "numbers": 0.13,
    "scaling": 0.29,
    "targets": 0.15,
    "steps": 0.03,
    "memory": 0.05,
    "compiled": 0.15,
}
FAILED = "failed: exit status"  # of a command
COMPILES = "compiled or graphs"  # names of tests that compile
RUNS = {  # name: options of `fit --config configs/quickstart.yaml`
    "quickstart, MLP": [],
    "quickstart, CNN": [
        *("--model.net", "pl_fed.models.FlameCNN", "--model.net.in_channels", "1"),
        *("--model.net.image_size", "8"),
    ],
}
UNLOGGED = ("--trainer.logger", "false")  # W&B may not be installed
ENGINES = {  # name: engine and mode of torch.compile
    "one by one": ("one_by_one", None),
    "stacked": ("stacked", None),
    "one by one, compiled": ("one_by_one_compiled", None),
    "stacked, compiled": ("stacked_compiled", None),
    "stacked, CUDA graphs": ("stacked_compiled", "reduce-overhead"),
}
SCALING = (  # engines and numbers of clients, the most telling ones first
    *(("stacked", 1000), ("stacked", 100), ("stacked", 10), ("one by one", 10)),
    *(("stacked, compiled", 1000), ("stacked, CUDA graphs", 1000), ("one by one", 100)),
    *(("stacked, compiled", 100), ("stacked, CUDA graphs", 100), ("one by one, compiled", 10)),
    *(("stacked, compiled", 10), ("stacked, CUDA graphs", 10), ("one by one, compiled", 100)),
)
RACES = {  # row of targets.py: engines
    "cnn": ("stacked_compiled", "auto"),
    "mlp": ("stacked_compiled", "auto"),
    "ditto": ("auto",),
    "logistic-10": ("auto",),
    "logistic-100": ("auto",),
    "stacked-100": ("auto",),
    "stacked-1000": ("auto",),
}
LONGEST_ROUND = 5.0  # seconds: larger federations of an engine that would be slower are left out
ROUNDS_OF_MEMORY = 1000


class Deadline:
    """Deadline: the end of a part's share of the time."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 1."""
        return max(1.0, self.at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self.at


def run_first(out: Path, device: str, deadline: Deadline) -> str:
    """Fit, test and save two small federations; the other parts need this to work."""
    command = [sys.executable, "-m", "pl_fed", "fit", "--config", "configs/quickstart.yaml"]
    command += ["--trainer.max_epochs", "3", "--trainer.accelerator", device, *UNLOGGED]
    command += ["--trainer.default_root_dir", str(out / "runs" / "first")]
    printed = run_command(command, {}, deadline)
    (out / "first.txt").write_text(printed)
    if FAILED in printed:
        raise RuntimeError(printed[-600:])
    rounds: list[float | None] = []

    def continue_after_round(seconds: float | None) -> bool:
        rounds.append(seconds)
        return len(rounds) < 4

    case = Case("", "Normalized", (784,))
    engine = fit(case, case.data(), Settings("auto", device), 1, continue_after_round)
    printed += f"a net with BatchNorm ran {len(rounds) - 1} rounds by the engine {engine}\n"
    (out / "first.txt").write_text(printed)
    return printed


def run_tests(out: Path, device: str, deadline: Deadline) -> str:
    """Run the tests marked ``gpu`` that compile nothing, and return pytest's last line."""
    return run_pytest(out / "tests.txt", f"not ({COMPILES})", device, deadline)


def run_compiled_tests(out: Path, device: str, deadline: Deadline) -> str:
    """Run the tests marked ``gpu`` that compile, and return pytest's last line."""
    return run_pytest(out / "compiled.txt", COMPILES, device, deadline)


def run_pytest(path: Path, selection: str, device: str, deadline: Deadline) -> str:
    """Run a part of ``tests/test_gpu.py``, write its output, and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "--tb=short"]
    command += ["-n", "0", "-rfE", "--durations=5", "-k", selection]
    printed = run_command(command, {"PL_FED_TEST_DEVICE": device}, deadline)
    path.write_text(printed)
    lines = [line for line in printed.splitlines() if line.strip() and FAILED not in line]
    if FAILED in printed and f"{FAILED} 1\n" not in printed:  # 1: some tests failed
        raise RuntimeError(printed[-600:])
    return lines[-1] if lines else "nothing was printed"


def compare_numbers(out: Path, device: str, deadline: Deadline) -> str:
    """Run configs on the CPU and on the device, and return a table of their test results."""
    rows, text = [], ""
    for name, options in RUNS.items():
        for accelerator in dict.fromkeys(("cpu", device)):
            folder = out / "runs" / f"{name.split()[-1]}-{accelerator}"
            command = [sys.executable, "-m", "pl_fed", "fit", "--config", "configs/quickstart.yaml"]
            command += [*options, "--trainer.accelerator", accelerator]
            command += ["--trainer.default_root_dir", str(folder)]
            command += ["--trainer.enable_progress_bar", "false", *UNLOGGED]
            started = time.monotonic()
            printed = run_command(command, {}, deadline)
            seconds = time.monotonic() - started
            results = read_results(folder) or {"failed": printed[-300:]}
            rows.append([name, accelerator, f"{seconds:.1f}", json.dumps(results)])
            text = table(["run", "device", "seconds", "test results"], rows)
            (out / "numbers.md").write_text(text)
    if '"failed"' in text:
        raise RuntimeError(text)
    return text


def read_results(folder: Path) -> dict[str, float]:
    """Return the mean and the spread of the test accuracy, and the loss, of a folder's last run."""
    rows = [
        row
        for path in sorted(folder.glob("*/metrics.csv"))
        for row in read_rows(path)
        if row.get("test/personal/accuracy")
    ]
    names = [f"test/personal/{name}" for name in ("accuracy", "accuracy_std", "loss")]
    return {name: round(float(rows[-1][name]), 4) for name in names} if rows else {}


def profile_steps(out: Path, device: str, deadline: Deadline) -> str:
    """Profile rounds of 100 stacked clients; return the operations that wait for the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    case, rounds = replace(TARGETS["mlp"], clients=100), []
    profiler = torch.profiler.profile(activities=activities)

    def continue_after_round(seconds: float | None) -> bool:
        rounds.append(seconds)
        if len(rounds) == 4:
            profiler.start()
        if len(rounds) == 6:
            profiler.stop()
        return len(rounds) < 6 and not deadline.has_passed

    fit(case, case.data(), Settings("stacked", device), 1, continue_after_round)
    if len(rounds) in (4, 5):  # the deadline ended the profile
        profiler.stop()
    if len(rounds) < 5:
        return "stopped: its share of the time was over before a round was profiled\n"
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    (out / "steps.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=30))
    waits = [
        f"{event.key}: {event.count}"
        for event in profiler.key_averages()
        if "Synchronize" in event.key or event.key == "aten::item"
    ]
    profiled = "two rounds" if len(rounds) == 6 else "one round"
    return f"waits in {profiled} of {case.steps} local steps: {', '.join(waits) or 'none'}\n"


def watch_memory(out: Path, device: str, deadline: Deadline) -> str:
    """Record the device's allocated memory every 100 rounds."""
    rows: list[list[str]] = []
    case, count = replace(TARGETS["ditto"], steps=2), 0

    def continue_after_round(_: float | None) -> bool:
        nonlocal count
        if count % 100 == 0:
            rows.append([str(count), f"{read_memory(device):,}"])
        count += 1
        return count <= ROUNDS_OF_MEMORY and not deadline.has_passed

    fit(case, case.data(), Settings("stacked", device), 1, continue_after_round)
    text = table(["round", "allocated bytes"], rows)
    (out / "memory.md").write_text(text)
    return text


def read_memory(device: str) -> int:
    """Return the bytes that tensors hold on the device; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def measure_scaling(out: Path, device: str, deadline: Deadline) -> str:
    """Measure rounds of each net, number of clients and engine; append each to scaling.csv."""
    path = out / "scaling.csv"
    rows = read_rows(path)
    measured = {(row["net"], row["engine"], row["clients"]) for row in rows}
    for name, clients in SCALING:
        engine, mode = ENGINES[name]
        for net, case in SCALED.items():
            row = {"net": net, "engine": name, "clients": str(clients)}
            if tuple(row.values()) in measured or is_too_slow(row, rows):
                continue
            if deadline.has_passed:
                return f"stopped after {len(rows)} rows\n"
            settings = Settings(engine, device, compile_mode=mode)
            row |= measure_rounds(replace(case, clients=clients), settings)
            rows.append(row)
            append_row(path, row)
    return table(list(rows[0]), [list(row.values()) for row in rows])


def is_too_slow(row: dict[str, str], rows: list[dict[str, str]]) -> bool:
    """Return whether a row would be slow, by those with fewer clients."""
    return any(
        float(other["round_ms"] or 0) * int(row["clients"]) / int(other["clients"])
        > 1e3 * LONGEST_ROUND
        for other in rows
        if (other["net"], other["engine"]) == (row["net"], row["engine"])
        and int(other["clients"]) < int(row["clients"])
    )


def measure_rounds(case: Case, settings: Settings, seconds: float = 1.0) -> dict[str, str]:
    """Return the median round, the peak of the memory, and the use of the device."""
    times: list[float] = []
    busy = DeviceUse(settings.device)

    def continue_after_round(last: float | None) -> bool:
        if last is not None:
            times.append(last)
        if len(times) == 2:  # the first rounds compile
            busy.start()
        return len(times) < 5 or (sum(times[2:]) < seconds and len(times) < 200)

    gc.collect()  # a Trainer holds itself, and the memory of its run
    if settings.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        engine = fit(case, case.data(), settings, 1, continue_after_round)
    except Exception as error:  # one row fails: the others go on
        return dict.fromkeys(("round_ms", "peak_mb", "device_use"), "") | {"ran": str(error)[:200]}
    peak = torch.cuda.max_memory_allocated() if settings.device == "cuda" else 0
    ordered = sorted(times[2:])
    return {
        "round_ms": f"{1e3 * ordered[len(ordered) // 2]:.3f}",
        "peak_mb": f"{peak / 2**20:.0f}",
        "device_use": busy.stop(),
        "ran": engine,
    }


class DeviceUse:
    """Device use: nvidia-smi's share of the time in which the GPU has run a kernel."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Begin to sample."""
        if self.device == "cuda" and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [*query, "--loop-ms=200"], stdout=subprocess.PIPE, text=True
            )

    def stop(self) -> str:
        """Return the mean of the samples in percent."""
        if self._process is None:
            return ""
        self._process.terminate()
        samples = [int(line) for line in self._process.communicate()[0].split() if line.isdigit()]
        return f"{sum(samples) / len(samples):.0f}" if samples else ""


def race_targets(out: Path, device: str, deadline: Deadline) -> str:
    """Run ``targets.py`` on the device, row by row."""
    printed = ""
    for name, engine in [(name, engine) for name, engines in RACES.items() for engine in engines]:
        if device == "cpu" and name in ("cnn", "stacked-1000"):
            continue  # minutes
        command = [sys.executable, "experiments/benchmarks/targets.py", "--rows", name]
        command += ["--device", device, "--seconds", "5", "--engine", engine]
        if deadline.has_passed:
            printed += f"{name}, {engine}: no time was left\n"
        else:
            printed += run_command(command, {}, deadline)
        (out / "targets.txt").write_text(printed)
    if FAILED in printed:
        raise RuntimeError(printed)
    return printed


def run_command(command: list[str], environment: dict[str, str], deadline: Deadline) -> str:
    """Run a command until the deadline, and return its output.

    Its own processes end with it, so that none runs on the device beside the next part.
    """
    own = {"PYTHONPATH": build_python_path(ROOT), "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            status = process.wait(deadline.left)
            ended = f"\n{FAILED} {status}\n" if status else ""
        except subprocess.TimeoutExpired:
            ended = "\nstopped: its share of the time was over\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read() + ended


def append_row(path: Path, row: dict[str, str]) -> None:
    """Append a row, with the header before the first."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


PARTS: dict[str, Callable[[Path, str, Deadline], str]] = {
    "first": run_first,
    "tests": run_tests,
    "numbers": compare_numbers,
    "steps": profile_steps,
    "scaling": measure_scaling,
    "targets": race_targets,
    "memory": watch_memory,
    "compiled": run_compiled_tests,
}


def describe_driver(device: str) -> str:
    """Return the driver's version and CUDA's."""
    if device != "cuda":
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        driver = "unknown, as nvidia-smi is missing"
    return f" Driver {driver}, CUDA {torch.version.cuda}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.md").write_text(machine(options.device) + describe_driver(options.device))
    total = Deadline(60 * options.minutes)
    parts = [name for name in options.parts if not (out / f"{name}.done").exists()]
    for position, name in enumerate(parts):
        started = time.monotonic()
        share = SHARES[name] / sum(SHARES[later] for later in parts[position:])
        deadline = Deadline(total.left * share)
        try:
            text = PARTS[name](out, options.device, deadline)
        except Exception as error:  # the next parts run all the same
            text = f"failed: {type(error).__name__}: {error}\n"
        else:
            if not deadline.has_passed:
                (out / f"{name}.done").touch()
        print(f"== {name}, {time.monotonic() - started:.0f} s\n{text}", flush=True)


if __name__ == "__main__":
    main()
