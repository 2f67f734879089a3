"""Results do not depend on the number of processes, and a run ends if any of them is lost."""

import csv
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning
import pytest
import torch
import worlds
from exhaustive import exhaustive_but
from forked_processes import ForkedCommand
from further_cases import mark_further, mark_if
from lightning.pytorch.strategies import DDPStrategy
from small_federations import sgd

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.data import Digits, FederatedData
from pl_fed.distributed import processes
from pl_fed.distributed.processes import (
    LostProcessError,
    Processes,
    end_launched_processes,
    explain_lost_process,
)
from pl_fed.models import MLP
from pl_fed.partitioners import IID
from pl_fed.run_folder import is_first_process, last_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:In round . the uploads of clients"),
]

STOPPED = "BatchNorm, in shards"  # the scenario that is stopped, and resumed
IN_TWO_AND_FOUR = ["Ditto", "Median in shards", "diverges", "one sends too little"]
ONLY_IN_FOUR = [
    "multi-Krum in shards, float32",
    "forged",
    "broken uploads",
    "BatchNorm, in shards",
    "all at home in one process",
    "fewer clients than processes",
    "nothing is sent",
]
NAMES = {
    2: [name for name in worlds.SCENARIOS if name not in ONLY_IN_FOUR],
    4: IN_TWO_AND_FOUR + ONLY_IN_FOUR,
}
FURTHER = {  # each part of them is in a scenario that is not listed
    2: {
        *("Ditto", "Median", "Median in shards", "TrimmedMean", "TrimmedMean in shards"),
        *("FLTrust", "a chain", "stacked", "parts are kept", "held-out clients"),
        *("Term, poisoned", "FairFed, poisoned", "FairFed in shards", "outliers", "DeepSight"),
        *("FedTilt, tilted in shards", "BatchNorm", "the server keeps all models"),
        *("the server keeps a control", "adapted before evaluations", "a choice of λ", "FLAME"),
        *("held-out clients, whose head trains", "Lp-Proj in shards", "a backdoor"),
        *("one diverges, in shards", "one sends nothing", "compressed, one diverges"),
        *("unequal clients", "unequal clients, normalised and forged"),
        *{"private, in buckets", "private, with empty cohorts"} & worlds.SCENARIOS.keys(),
    },
    4: {
        *("Ditto", "Median in shards", "multi-Krum in shards, float32", "forged"),
        *("broken uploads", "all at home in one process", "diverges", "BatchNorm, in shards"),
        *("nothing is sent", "one sends too little"),
    },
}
RUNS = [
    mark_if(name in FURTHER[size], size, name, id=f"{size}-{name}")
    for size, names in NAMES.items()
    for name in names
]


@pytest.fixture(scope="module")
def names(request):
    """The scenarios of the tests that run, by the number of processes."""
    asked = set()
    for item in request.session.items:
        if item.path == request.path and "name" in getattr(item, "fixturenames", ()):
            parameters = item.callspec.params
            name = parameters["name"]
            asked |= {(parameters.get("size", 2), name)}
            asked |= set() if "size" in parameters else {(2, f"{name} in shards")}
    return {size: [name for name in NAMES[size] if (size, name) in asked] for size in NAMES}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("worlds")


def stop_job(folder):
    return {"name": STOPPED, "folder": folder, "rounds": 2}


def resume_job(stopped, processes):
    path = stopped / "run" / "checkpoints" / "last.ckpt"
    return {"name": STOPPED, "folder": stopped / f"resumed by {processes}", "resumes": path}


@pytest.fixture(scope="module")
def one_process(root, names):
    """The outcome in one process, by scenario."""
    worlds.run(**stop_job(root / "stopped by 1"))
    asked = [*names[2], *names[4], STOPPED]
    scenarios = {name: one_process_name(name) for name in asked}
    own = dict.fromkeys(scenarios.values())
    outcomes = {name: worlds.run(name, root / "1" / name) for name in own}
    return {name: outcomes[scenarios[name]] for name in scenarios}


def one_process_name(name):
    """Return the scenario with the same run in one process, which has no shards."""
    gathered = name.removesuffix(" in shards")
    return gathered if gathered in worlds.SCENARIOS else name


@pytest.fixture(scope="module")
def several_processes(root, names, one_process):
    """The outcomes in each of 2 and of 4 processes, by their number."""
    outcomes = {}
    for size in names:
        folder = root / str(size)
        folder.mkdir()
        jobs = {name: {"name": name, "folder": folder / name} for name in names[size]}
        if size == 2:
            jobs["stopped"] = stop_job(root / "stopped by 2")
            jobs["1 to 2"] = resume_job(root / "stopped by 1", 2)
        else:
            jobs["2 to 4"] = resume_job(root / "stopped by 2", 4)
        outcomes[size] = worlds.start(size, size // 2, jobs, folder)
        assert not [failed for outcome in outcomes[size] if (failed := outcome.get("failed"))]
    return outcomes


def assert_close(first, second, tolerance):
    """Compare nests of dicts, lists and tensors."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_close(first[name], second[name], tolerance)
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second):
            assert_close(a, b, tolerance)
    elif isinstance(first, torch.Tensor):
        torch.testing.assert_close(
            first, second, rtol=tolerance, atol=tolerance, equal_nan=True, check_device=False
        )
    else:
        assert first == second


def assert_agree(expected_outcome, processes, tolerance=1e-10):
    """Check that all processes end with equal bits, and with the outcome of one process."""
    size = len(processes)
    for rank, outcome in enumerate(processes):
        for key, expected in expected_outcome.items():
            if key == "held":
                assert outcome[key] == [k for k in expected if k % size == rank], "only its own"
            elif key != "store" or rank == 0:
                assert_close(expected, outcome[key], tolerance)
        for key in outcome.keys() - {"held", "store"}:
            assert_close(processes[0][key], outcome[key], 0.0)


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_several_processes_end_as_one_process(one_process, several_processes, size, name):
    tolerance = 1e-5 if worlds.SCENARIOS[name]["precision"] == "32-true" else 1e-10
    assert_agree(
        one_process[name], [outcome[name] for outcome in several_processes[size]], tolerance
    )


def test_rounds_after_the_first_send_no_pickled_objects(several_processes, names):
    for size, outcomes in several_processes.items():
        counts = {outcome["rounds without objects"] for outcome in outcomes}
        assert len(counts) == 1
        assert min(counts) >= len(names[size])  # a few runs end in their first round


def test_guard_refuses_pickled_objects_after_the_first_round():
    guard = worlds.ObjectGuard(lambda runner: worlds.dist.all_gather_object([None], 1))
    runner = SimpleNamespace()
    run = guard.method()
    with pytest.raises(ValueError, match="process group"):  # the real function
        run(runner)
    with pytest.raises(AssertionError, match="pickled objects"):
        run(runner)
    assert guard.rounds == 0


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_several_processes_write_the_rows_of_one_process(
    one_process, several_processes, root, size, name
):
    expected_folder = root / "1" / one_process_name(name) / "run"
    tables = ("per_client.csv", "per_client_validation.csv", "per_class.csv")
    for file in ("metrics.csv", *tables):
        if name == "diverges":
            assert not (expected_folder / file).exists() or file == "metrics.csv"
            continue
        if name == "own batches" and file == "per_class.csv":  # such data have no classes
            assert not (expected_folder / file).exists()
            continue
        expected, columns = (
            rows(folder / file) for folder in (expected_folder, root / str(size) / name / "run")
        )
        assert expected.keys() == columns.keys()
        for column in expected.keys() - {"time/round"}:
            assert expected[column] == pytest.approx(
                columns[column], rel=1e-5, abs=1e-6, nan_ok=True
            )


def rows(path):
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    return {name: [float(row[name] or "nan") for row in table] for name in table[0]}


@pytest.mark.parametrize(("size", "name"), [run for run in RUNS if run.values[1] == "diverges"])
def test_diverging_client_ends_all_processes_with_the_same_error(
    one_process, several_processes, size, name
):
    expected = one_process[name]["error"]
    assert "round 0 client 5" in expected
    assert [outcome[name]["error"] for outcome in several_processes[size]] == [expected] * size


@exhaustive_but("Krum")
@pytest.mark.parametrize("name", ["Median", "TrimmedMean", "Krum", "FLTrust", "a chain"])
def test_aggregation_in_shards_equals_gathered_aggregation(several_processes, name):
    for outcome in several_processes[2]:
        assert_close(outcome[name]["client"], outcome[f"{name} in shards"]["client"], 1e-12)


def test_stopped_run_resumes_with_any_number_of_processes(one_process, several_processes, root):
    expected = one_process[STOPPED]
    assert_agree(expected, [outcome["1 to 2"] for outcome in several_processes[2]])
    assert_agree(expected, [outcome["2 to 4"] for outcome in several_processes[4]])
    assert_agree(expected, [worlds.run(**resume_job(root / "stopped by 2", 1))])


def test_processes_agree_on_matched_clients(tmp_path):
    """Rows move to other home processes, and a missing client stays in the checkpoint."""
    worlds.run("nine clients", tmp_path / "before", rounds=2)
    last = Path("run") / "checkpoints" / "last.ckpt"
    job = {"name": "seven and three others", "resumes": tmp_path / "before" / last}
    expected = worlds.run(**job, folder=tmp_path / "1")
    jobs = {"matched": {**job, "folder": tmp_path / "2" / "matched"}}
    (tmp_path / "2").mkdir()
    outcomes = worlds.start(2, 1, jobs, tmp_path / "2")
    assert not [failed for outcome in outcomes if (failed := outcome.get("failed"))]
    assert_agree(expected, [outcome["matched"] for outcome in outcomes])
    absent = [
        torch.load(folder / last)["federation"]["absent"]
        for folder in (tmp_path / "1", tmp_path / "2" / "matched")
    ]
    assert_close(*absent, 1e-12)
    assert absent[0]["clients"]["owners"] == '[["0"], ["1"]]'


def test_checkpoint_of_two_processes_equals_that_of_one(several_processes, root):
    first, second = (
        torch.load(root / f"stopped by {n}" / "run" / "checkpoints" / "last.ckpt") for n in (1, 2)
    )
    for federation in (first["federation"], second["federation"]):
        federation.pop("engine")  # how many clients a process has run at a time
        federation["store"] = {
            name: worlds.in_order(rows) for name, rows in federation["store"].items()
        }
    assert_close(first["federation"], second["federation"], 1e-12)
    assert_close(first["state_dict"], second["state_dict"], 1e-12)


# A run from the command line, and its end


CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
UNLOGGED = ("--trainer.logger", "false")  # each process imports W&B otherwise


@pytest.fixture
def start_fit(tmp_path):
    """Start the fit that a user starts; end it with the test."""
    commands = []

    def start(devices, rounds, *more, start_process=ForkedCommand):
        arguments = [
            *("fit", "--config", str(CONFIG), "--trainer.default_root_dir", str(tmp_path)),
            *("--trainer.max_epochs", str(rounds), "--trainer.enable_progress_bar", "false"),
            *("--trainer.check_val_every_n_epoch", "100"),
            *("--federation.engine.name", "one_by_one", *more),
        ]
        if devices > 1:
            arguments += ["--trainer.devices", str(devices), "--trainer.strategy", "ddp"]
        commands.append(start_process(arguments, CONFIG.parent.parent))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


def fork_first_process(arguments, folder):
    """Start the first process as a fork. It starts an interpreter as the second."""
    return ForkedCommand(arguments, folder, forks_others=False)


def wait_for_rounds(root, process):
    """Wait until a checkpoint is written."""
    until = time.monotonic() + 100
    before = {path: path.stat().st_mtime_ns for path in root.glob("*/checkpoints/last.ckpt")}
    while time.monotonic() < until and process.poll() is None:
        for path in root.glob("*/checkpoints/last.ckpt"):
            if before.get(path) != path.stat().st_mtime_ns:
                return
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=1)[0])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_terminated_run_resumes_after_a_kill_with_another_number_of_processes(tmp_path, start_fit):
    """One run in one folder: SIGTERM to two processes, SIGKILL to one of two, one to the end."""
    process = start_fit(2, 100_000, start_process=fork_first_process)
    wait_for_rounds(tmp_path, process)
    process.terminate()
    assert "No checkpoint is written" not in process.communicate(timeout=60)[0]
    (folder,) = tmp_path.iterdir()
    rounds = torch.load(last_checkpoint(folder), weights_only=True)["global_step"]
    assert rows(folder / "metrics.csv")["round"][-1] == rounds - 1, "the round is ended and saved"

    process = start_fit(2, 100_000, "--ckpt_path", "last", *UNLOGGED)
    wait_for_rounds(tmp_path, process)
    (child,) = process.children()
    os.kill(child, signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "error: Expected all 2 processes to go on" in output or f"PID {child}" in output

    rounds = torch.load(last_checkpoint(folder), weights_only=True)["global_step"]
    process = start_fit(1, rounds + 2, "--ckpt_path", "last", *UNLOGGED)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    metrics = rows(folder / "metrics.csv")
    assert metrics["round"] == list(range(rounds + 3))  # the last row is the test's


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_other_processes_end_when_the_first_is_killed(tmp_path, start_fit):
    process = start_fit(2, 100_000, *UNLOGGED)
    wait_for_rounds(tmp_path, process)
    process.kill()
    output = process.communicate(timeout=60)[0]  # until the child has ended
    assert "Expected all 2 processes to go on but process 1 lost touch" in output
    assert output.count("distributed_backend=gloo") == 1


LONG_TEST = (
    *("--model", "pl_fed.clients.Finetuning", "--model.finetune_steps", "300"),
    *("--model.local_epochs", "null", "--model.local_steps", "2"),
    *("--model.optimizer.class_path", "torch.optim.SGD"),
    *("--model.optimizer.init_args.lr", "0.1", "--model.net.class_path", "pl_fed.models.MLP"),
    *("--model.net.init_args.in_features", "64", "--model.net.init_args.hidden", "[32]"),
    *("--model.net.init_args.num_classes", "10", "--data.clients_per_eval_batch", "1"),
)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "lost",
    mark_further(["asked to end", "one is asked to end", "one is killed"], ["one is killed"]),
)
def test_processes_do_not_wait_for_a_lost_one_in_the_test_phase(tmp_path, start_fit, lost):
    process = start_fit(2, 1, *LONG_TEST, *UNLOGGED)
    until, lines = time.monotonic() + 100, 0
    while lines < 1 + 1 and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
        files = [path.read_text().splitlines() for path in tmp_path.glob("*/metrics.csv")]
        lines = max(map(len, files), default=0)
    time.sleep(0.5)
    assert process.poll() is None, "the test phase goes on"
    if lost == "asked to end":
        process.terminate()
    else:
        (child,) = process.children()
        os.kill(child, signal.SIGKILL if lost == "one is killed" else signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0, output
    assert "Traceback" not in output


# Error messages


def test_backend_error_becomes_one_sentence():
    message = r"^Expected all 2 processes to go on but process 1"
    with pytest.raises(LostProcessError, match=message), explain_lost_process(Processes(1, 2)):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def test_time_out_has_a_sentence_that_names_the_option(monkeypatch):
    error = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    message = r"^Expected all 2 processes to answer within .*`trainer\.strategy\.timeout` 10 s but"
    with pytest.raises(LostProcessError, match=message), explain_lost_process(Processes(1, 2)):
        raise error
    message = r"`trainer\.strategy\.timeout` but process 1"  # in collectives after it
    with pytest.raises(LostProcessError, match=message), explain_lost_process(Processes(1, 2)):
        raise RuntimeError("Application timeout caused pair closure")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    message = r"^Expected all 2 processes to meet within the time of `trainer\.strategy\.timeout`"
    with pytest.raises(LostProcessError, match=message), explain_lost_process(Processes(1, 2)):
        raise torch.distributed.DistStoreError("Timed out after 11 seconds waiting for clients.")


@pytest.mark.parametrize("has_new_name", [True, False])
def test_gather_has_no_warning_about_a_name_that_torch_has_changed(monkeypatch, has_new_name):
    def gather(gathered, rows):
        gathered.copy_(torch.cat([rows, rows + 1]))

    old, new = Mock(side_effect=gather), Mock(side_effect=gather)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", old)
    monkeypatch.setattr(torch.distributed, "all_gather_single", new, raising=False)
    if not has_new_name:
        monkeypatch.delattr(torch.distributed, "all_gather_single")
    assert Processes(0, 2).gather(torch.tensor([1.0]), 1).tolist() == [1.0, 2.0]
    assert (old.call_count, new.call_count) == ((0, 1) if has_new_name else (1, 0))


SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


def test_failed_process_ends_those_that_it_has_launched(monkeypatch):
    """One that ends by itself has time to do so; one that hangs is killed, and none is left."""
    monkeypatch.setattr("pl_fed.distributed.processes._ENDING_SECONDS", 1.0)
    children = [subprocess.Popen(SLEEP), subprocess.Popen([sys.executable, "-c", "exit(3)"])]
    launcher = Mock(procs=[*children])
    with pytest.raises(KeyError), end_launched_processes(launcher):
        raise KeyError
    assert launcher.procs == [], "Lightning's observer would kill this process"
    assert [child.wait(20) for child in children] == [-signal.SIGKILL, 3]
    launcher.procs = [subprocess.Popen(SLEEP)]
    with end_launched_processes(launcher):
        pass
    assert launcher.procs[0].poll() is None
    launcher.procs[0].kill()


WAITS = """
import sys, time
import pl_fed.distributed.processes as processes
processes._MEETING_SECONDS, processes._STARTED = 0.5, time.monotonic()  # not that of the server
processes.limit_meeting(processes.Processes(1, 2))
time.sleep(100)
"""


def test_process_ends_if_the_others_do_not_come(tmp_path):
    process = ForkedCommand(["-c", WAITS], tmp_path)
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 1
    assert output.startswith("error: Expected all 2 processes to meet within ")


HANGING = """
import time
import warnings
from pl_fed.clients import Ditto
from pl_fed.distributed import processes

processes._ENDING_SECONDS = 1.0

class Hanging(Ditto):
    def end_round(self, client):
        if self.trainer.global_rank == 1 and self.trainer.current_epoch == 1:
            time.sleep(600)
        return super().end_round(client)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_hanging_process_is_ended_after_the_time_out(tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    arguments = [
        *("fit", "--config", str(CONFIG), "--trainer.default_root_dir", str(tmp_path / "runs")),
        *("--trainer.max_epochs", "2", "--trainer.enable_progress_bar", "false"),
        *("--model", "hanging.Hanging", "--federation.engine.name", "one_by_one"),
        *("--trainer.devices", "2", "--trainer.strategy", "DDPStrategy"),
        *("--trainer.strategy.timeout", "00:00:04", *UNLOGGED),
    ]
    process = ForkedCommand(arguments, tmp_path)
    output = process.communicate(timeout=100)[0]  # until the other has ended
    assert process.returncode == 1
    assert output.count("error: ") == 1
    assert "error: Expected all 2 processes to answer within the time of `trainer.str" in output


def test_other_errors_are_unchanged():
    with pytest.raises(RuntimeError, match=r"^mine"), explain_lost_process(Processes(1, 2)):
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError, match=r"^gloo"), explain_lost_process(Processes()):
        raise RuntimeError("gloo")


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_lost_process_is_one_sentence_in_every_stage(tmp_path, monkeypatch, stage):
    trainer = pl_fed.Trainer(pl_fed.Federation(), run_dir=tmp_path, accelerator="cpu")
    trainer.processes = Processes(1, 2)
    data = FederatedData(Digits(), IID(), 4)
    client = FedAvg(MLP(64, [4], 10), optimizer=sgd(0.1), local_steps=1)

    def raise_connection_error(*_, **__):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer")

    monkeypatch.setattr(lightning.pytorch.Trainer, stage, raise_connection_error)
    with pytest.raises(LostProcessError, match=r"^Expected all 2 processes to go on but process 1"):
        getattr(trainer, stage)(client, datamodule=data)


STARTED = """
import sys, time
from pl_fed.distributed.processes import end_with_launcher
end_with_launcher()
print("started", flush=True)
time.sleep(100)
"""
STARTS = """
import os, signal, time
from pl_fed.distributed.processes import announce_launcher, end_with_launcher
announce_launcher()
if not os.fork():
    end_with_launcher()
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(100)
"""


def test_process_ends_when_its_launcher_is_killed_before_they_meet(tmp_path):
    launcher = ForkedCommand(["-c", STARTS], tmp_path)
    output = launcher.communicate(timeout=60)[0]  # until the other has ended
    assert launcher.returncode == -signal.SIGKILL
    assert output.startswith("error: Expected the process that started this one to go on until all")


def test_launcher_that_ends_right_after_the_meeting(monkeypatch):
    """The lost connection has closed the group before the watch looks for the first time."""
    monkeypatch.setattr(processes, "_have_met", threading.Event())
    monkeypatch.setattr(processes, "_is_alive", lambda _: False)
    monkeypatch.setattr(processes.time, "sleep", lambda _: None)
    messages = []
    monkeypatch.setattr(processes, "_exit_with_error", messages.append)
    processes._wait_for_launcher(1, is_child=False)
    processes.note_meeting()
    processes._wait_for_launcher(1, is_child=False)
    assert "to go on until all have met but" in messages[0]
    assert "to go on until this one has ended but" in messages[1]


def test_process_ends_at_once_if_its_launcher_has_ended(tmp_path, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv("PL_FED_LAUNCHER", str(gone.pid))
    process = ForkedCommand(["-c", STARTED], tmp_path)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert f"(process {gone.pid};" in output


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "start_process",
    [
        pytest.param(ForkedCommand, id="a fork"),
        mark_if(True, fork_first_process, id="an interpreter, which still imports"),
    ],
)
def test_other_processes_do_not_wait_for_one_that_is_killed_at_start_up(start_fit, start_process):
    """The first process is killed as soon as it has started the second."""
    process = start_fit(2, 100_000, *UNLOGGED, start_process=start_process)
    until = time.monotonic() + 100
    while not process.children() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    output = process.communicate(timeout=60)[0]
    assert "error: Expected the process that started this one" in output
    assert "Traceback" not in output


class Other(DDPStrategy):
    """Stands for a strategy that shards models, as DeepSpeed's does."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": Other()}, "`strategy` to be auto or ddp but got Other"),
        ({"strategy": "ddp_spawn"}, "`strategy` to be ddp but got one that spawns"),
        ({"strategy": "ddp", "sync_batchnorm": True}, "`sync_batchnorm` to be False"),
    ],
    ids=["another strategy", "spawn", "sync_batchnorm"],
)
def test_unsupported_strategies_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=f"^Expected trainer argument {message}"):
        pl_fed.Trainer(
            pl_fed.Federation(),
            run_dir=tmp_path,
            accelerator="cpu",
            devices=2,
            logger=False,
            **arguments,
        )


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK"])
def test_first_process_of_another_node_is_not_the_first(monkeypatch, name):
    monkeypatch.delenv("NODE_RANK", raising=False)
    assert is_first_process()
    monkeypatch.setenv(name, "1")
    assert not is_first_process()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_runs_without_a_root_folder_are_under_runs_in_every_process(monkeypatch, tmp_path, rank):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NODE_RANK", rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl_fed.Trainer(pl_fed.Federation(), default_root_dir=None, accelerator="cpu")
    assert trainer.run_dir.relative_to(tmp_path).parts[0] == "runs"
    is_warned = any("NODE_RANK = 1 is that of a process" in str(item.message) for item in caught)
    assert is_warned == (rank == "1"), "one process with the rank of another node"
