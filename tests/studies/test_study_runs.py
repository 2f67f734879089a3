"""Runs of studies: whole, shared, resumed and isolated, with one table at the end."""

import csv
import json
import random
import re
import shutil
import signal
import time

import pytest
import yaml
from exhaustive import exhaustive_for
from forked_processes import children
from run_folders import write_table
from study_processes import StudyCommand, run

import pl_fed
from pl_fed.files import try_lock
from pl_fed.studies.cell_folder import LOCKS, CellFolder
from pl_fed.studies.results import RESULTS

pytestmark = pytest.mark.slow

TINY = {
    "trainer.max_epochs": 3,
    "trainer.logger": False,
    "trainer.check_val_every_n_epoch": 2,
    "data.num_clients": 6,
    "data.batch_size": 100,
    "federation.sampler.cohort_size": 3,
}
STUDY = {
    "name": "tiny",
    "base": ["quickstart", TINY],
    "axes": {"algorithm": ["Ditto", "FedAvg"]},
    "seeds": 3,
    "options": {"folder": "study", "workers": 2},
}
PARTS = """
import os, signal, time, warnings
import numpy as np
import torch
from pl_fed.clients import Ditto, FedAvg

class Careless(Ditto):
    "Careless: changes settings of the whole process."
    def begin(self, client):
        super().begin(client)
        os.environ["PL_FED_CARELESS"] = "1"
        warnings.simplefilter("ignore")
        np.seterr(all="raise")
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")

    def teardown(self, stage):
        super().teardown(stage)
        if stage == "test":
            torch.set_default_dtype(torch.float64)

class Deadly(FedAvg):
    "Deadly: kills its process in its first attempts, as often as the environment says."
    def begin(self, client):
        super().begin(client)
        with open("deaths.txt", "a+") as file:
            file.seek(0)
            if len(file.read()) < int(os.environ["DEATHS"]):
                file.write("x")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def write_study(folder, name="study.yaml", **changes):
    """Write a study file with changed values, and return its name."""
    (folder / name).write_text(yaml.safe_dump({**STUDY, **changes}))
    (folder / "parts.py").write_text(PARTS)
    return name


def read_results(folder):
    with (folder / RESULTS).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study that ran without a disturbance."""
    folder = tmp_path_factory.mktemp("finished")
    status, output = run([write_study(folder)], folder)
    assert status == 0, output
    assert "6 done. The results are in study/results.csv." in output
    return folder


def test_finished_study_has_a_folder_and_a_row_for_each_cell(finished):
    rows = read_results(finished / "study")
    assert [(row["algorithm"], row["seed"], row["status"]) for row in rows] == [
        (algorithm, str(seed), "done") for algorithm in ("Ditto", "FedAvg") for seed in range(3)
    ]
    assert len({row["test/global/loss"] for row in rows}) == 3, "one net for both algorithms"
    for row in rows:
        folder = finished / "study" / f"algorithm={row['algorithm']}" / f"seed={row['seed']}"
        record = json.loads((folder / "cell.json").read_text())
        assert record["values"] == {"algorithm": row["algorithm"]}
        assert not (folder / "checkpoints").exists()
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["seed_everything"] == int(row["seed"])
        summary = pl_fed.read_run(folder).summary
        assert float(row["test/global/loss"]) == summary["metrics"]["test"]["global/loss"]
        assert "Seed set to" in (folder / "log.txt").read_text()
    assert not any(name.startswith("seconds/") for name in rows[0])


def test_cell_equals_a_run_of_its_own(finished, tmp_path):
    """A cell is the run of ``python -m pl_fed fit`` with its config, in every printed digit."""
    from pl_fed.command.fit import FederatedCLI

    cell = finished / "study/algorithm=Ditto/seed=2"
    arguments = ["fit", "--config", str(cell / "config.yaml")]
    own = FederatedCLI([*arguments, f"--trainer.default_root_dir={tmp_path}"]).run_dir
    for name in ("per_client.csv", "per_class.csv"):
        assert (cell / name).read_bytes() == (own / name).read_bytes()
    metrics = [json.loads((run / "summary.json").read_text())["metrics"] for run in (cell, own)]
    assert metrics[0] == metrics[1]


def test_second_start_runs_nothing_and_needs_no_worker(finished, capsys):
    before = (finished / "study" / RESULTS).read_bytes()
    status, output = run(["study.yaml"], finished)
    assert status == 0
    assert output.splitlines() == [
        "tiny: 6 cells, 6 of them with results",
        "6 done. The results are in study/results.csv.",
    ]
    assert (finished / "study" / RESULTS).read_bytes() == before


def test_killed_study_continues_to_the_same_table(finished, tmp_path):
    """SIGKILL at random moments; the workers end, too."""
    draws = random.Random(0)
    write_study(tmp_path)
    kills = 0
    for _ in range(2):
        command = StudyCommand(["study.yaml"], tmp_path)
        workers = command.wait_for(lambda command=command: children(command))
        until = time.monotonic() + draws.uniform(0.1, 1.0)
        while command.is_running and time.monotonic() < until:
            time.sleep(0.01)
        if not command.is_running:
            break
        command.signal(signal.SIGKILL)
        command.wait()
        kills += 1
        until = time.monotonic() + 20
        while any(map(is_alive, workers)):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert kills, "the study was not killed"
    status, output = run(["study.yaml"], tmp_path)
    assert status == 0, output
    table = (tmp_path / "study" / RESULTS).read_bytes()
    assert table == (finished / "study" / RESULTS).read_bytes()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_two_starts_at_once_share_the_cells(finished, tmp_path):
    write_study(tmp_path, options={"folder": "study", "workers": 1})
    commands = [StudyCommand(["study.yaml"], tmp_path) for _ in range(2)]
    outputs = []
    for command in commands:
        status, output = command.wait()
        assert status == 0, output
        outputs.append(re.findall(r"\] (.+): done in \d", output))
    assert sorted(outputs[0] + outputs[1]) == [
        f"algorithm={name},seed={seed}" for name in ("Ditto", "FedAvg") for seed in range(3)
    ]
    assert all(outputs), "each start ran a cell"
    table = (tmp_path / "study" / RESULTS).read_bytes()
    assert table == (finished / "study" / RESULTS).read_bytes()


def test_diverged_cell_is_a_result_and_failed_cells_fail_twice(tmp_path):
    write_study(
        tmp_path,
        axes={
            "algorithm": {
                "Ditto": {},
                "diverging": {"model.optimizer.lr": 1e9},
                "unfit": {"model.net.in_features": 63},
            }
        },
        seeds=1,
    )
    status, output = run(["study.yaml"], tmp_path)
    assert status == 1
    assert "algorithm=Ditto,seed=0: done" in output
    assert "algorithm=diverging,seed=0: diverged" in output
    assert output.count("algorithm=unfit,seed=0: failed in") == 2
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert (
        "Expected all cells to end but got 1 that failed twice, first algorithm=unfit" in sentence
    )
    assert "`model.net` to take inputs of shape" in sentence
    assert "Traceback" not in output
    log = tmp_path / "study/algorithm=unfit/seed=0/log.txt"
    assert "Traceback" in log.read_text()
    rows = {row["algorithm"]: row for row in read_results(tmp_path / "study")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "Ditto": "done",
        "diverging": "diverged",
        "unfit": "failed",
    }
    status, output = run(["study.yaml", "--status"], tmp_path)
    assert status == 0
    header, total, *_ = output.splitlines()
    assert header.split() == ["cells", "done", "diverged", "failed"]
    assert total.split() == ["all", "cells", "3", "1", "1", "1"]
    status, output = run(["study.yaml"], tmp_path)
    assert status == 1
    assert "3 cells, 2 of them with results" in output
    assert "diverged in" not in output


@exhaustive_for("2-failed")
@pytest.mark.parametrize(("deaths", "state"), [(1, "done"), (2, "failed")])
def test_killed_worker_is_replaced_and_its_cell_is_tried_again(tmp_path, deaths, state):
    axes = {"algorithm": {"deadly": {"model": "parts.Deadly"}, "FedAvg": {"model": "FedAvg"}}}
    write_study(tmp_path, axes=axes, seeds=1, options={"folder": "study", "workers": 1})
    status, output = run(["study.yaml"], tmp_path, DEATHS=str(deaths))
    assert status == (state == "failed")
    assert "[again] algorithm=deadly,seed=0: failed: its process was killed" in output
    rows = {row["algorithm"]: row for row in read_results(tmp_path / "study")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "deadly": state,
        "FedAvg": "done",
    }
    if state == "done":
        assert rows["deadly"]["test/global/loss"] == rows["FedAvg"]["test/global/loss"]


def test_stopped_study_says_how_to_go_on(tmp_path):
    lengths = {"first": {}, "then long": {"trainer.max_epochs": 100_000}}
    write_study(tmp_path, axes={"length": lengths}, seeds=1)
    command = StudyCommand(["study.yaml", "--workers", "1"], tmp_path)
    command.wait_for(lambda: "done in" in command.output)
    workers = children(command)
    assert len(workers) == 1
    command.signal(signal.SIGINT)
    status, output = command.wait(timeout=10)
    assert status == 130
    assert not any(map(is_alive, workers))
    assert re.search(r"Stopped by Ctrl-C: \d done.*Go on with:\n  .* study study.yaml", output)
    assert "Traceback" not in output


def test_changed_config_runs_anew_and_keeps_the_old_run(tmp_path):
    write_study(tmp_path, seeds=1)
    assert run(["study.yaml"], tmp_path)[0] == 0
    before = (tmp_path / "study/algorithm=Ditto/seed=0/per_client.csv").read_bytes()
    base = ["quickstart", {**TINY, "model.local_epochs": 1}]
    axes = {"algorithm": {"Ditto": {}, "FedAvg": {"model": "FedAvg", "model.local_epochs": 2}}}
    write_study(tmp_path, seeds=1, base=base, axes=axes)
    status, output = run(["study.yaml", "--status"], tmp_path)
    assert status == 0
    assert "Ditto,seed=0: changed (model.local_epochs 2 → 1)" in output
    assert "FedAvg,seed=0: changed" not in output, "the complete config is the same"
    status, output = run(["study.yaml"], tmp_path)
    assert status == 0, output
    assert "[2/2] algorithm=Ditto,seed=0: done" in output
    assert "the earlier run is in" in output
    assert "FedAvg,seed=0" not in output
    (old,) = (tmp_path / "study_aside/algorithm=Ditto/seed=0").iterdir()
    assert (old / "per_client.csv").read_bytes() == before
    assert (tmp_path / "study/algorithm=Ditto/seed=0/per_client.csv").read_bytes() != before


@pytest.mark.exhaustive  # test_study_report.py asks the same of a table
def test_other_forms_of_a_layer_hide_no_results_from_the_report(tmp_path):
    (tmp_path / "own.yaml").write_text("model: {local_epochs: 1}\n")
    write_study(tmp_path, seeds=1, base=["quickstart", "own.yaml", TINY])
    assert run(["study.yaml"], tmp_path)[0] == 0
    (tmp_path / "own.yaml").write_text("# a comment\nmodel:\n  local_epochs: 1\n")
    status, output = run(["study.yaml", "--report"], tmp_path)
    assert status == 0, output
    page = (tmp_path / "study/report/index.html").read_text(encoding="utf-8")
    assert "2 cells: 2 done." in page


def test_settings_of_a_run_do_not_reach_the_next_one(finished, tmp_path):
    """Runs after a careless one equal runs alone, bit for bit; also in a fresh fork each."""
    axes = {"algorithm": {"Careless": {"model": "parts.Careless"}, "Ditto": {}}}
    expected = {(row["algorithm"], row["seed"]): row for row in read_results(finished / "study")}
    for runs_per_worker in (50, 1):  # all runs in one fork, or each in its own
        options = {"folder": f"study_{runs_per_worker}", "workers": 1}
        options |= {"runs_per_worker": runs_per_worker}
        write_study(tmp_path, axes=axes, seeds=1, options=options)
        status, output = run(["study.yaml"], tmp_path)
        assert status == 0, output
        order = re.findall(r"\] algorithm=(\w+),seed=", output)
        assert order == ["Careless", "Ditto"]
        for row in read_results(tmp_path / options["folder"]):
            if row["algorithm"] != "Careless":
                own = expected[row["algorithm"], row["seed"]]
                assert row | {"config_digest": own["config_digest"]} == own, "in other words"


def test_again_prints_old_results_beside_new_ones(finished):
    folder = finished / "study"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.csv")}
    status, output = run(["study.yaml", "--again", "seed=1,algorithm=Ditto"], finished)
    assert status == 0, output
    rows = [line.split() for line in output.splitlines() if line.startswith("test/")]
    assert len(rows) > 10
    for _, old, new, change in rows:
        assert old == new
        assert float(change) == 0
    place = re.search(r"The new run is in (.+)\.$", output, re.MULTILINE)[1]
    assert (finished / place / "summary.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.csv")} == before


def test_only_and_dry_run(finished, tmp_path):
    write_study(tmp_path)
    only = ["--only", "algorithm=Ditto", "--only", "seed=0", "--only", "seed=2"]
    status, output = run(["study.yaml", "--dry_run", *only], tmp_path)
    assert status == 0, output
    assert output.splitlines() == [
        "algorithm=Ditto,seed=0: missing",
        "algorithm=Ditto,seed=2: missing",
        "2 cells, 2 of them to run: the time is unknown until a cell is done.",
    ]
    assert not (tmp_path / "study" / "algorithm=Ditto").exists()
    assert run(["study.yaml", *only], tmp_path)[0] == 0
    states = [row["status"] for row in read_results(tmp_path / "study")]
    assert states == ["done", "missing", "done", "missing", "missing", "missing"]
    status, output = run(["study.yaml", "--dry_run"], tmp_path)
    assert re.search(r"6 cells, 4 of them to run: about \d.* on 2 workers\.$", output)


def test_invalid_cell_is_found_before_the_first_run(tmp_path):
    axes = {"algorithm": {"Ditto": {}, "typo": {"model.lamm": 1}, "other": {"model.lamm": 2}}}
    for change, sentence in [
        (
            axes["algorithm"]["typo"],
            "hold only options of pl_fed.clients.Ditto but got `lamm` (did",
        ),
        ({"model": "Dito"}, "Expected argument `model`"),
        ({"model.lam": "much"}, "`model.lam` to be of type float but got much"),
        ({"trainer.devices": 2}, "`trainer.devices` of a study's run to be 1 but got devices 2"),
        ({"federation.adversary.fraction": 3}, "`federation.adversary.fraction`"),
        ({"federation.adversary.attack": "SignFlipping"}, "be given with the attack SignFlipping"),
    ]:
        write_study(tmp_path, axes={"algorithm": {"Ditto": {}, "odd": change, "too": change}})
        status, output = run(["study.yaml"], tmp_path)
        assert status == 1
        (error, *hints) = output.splitlines()[1:]
        assert error.startswith("error: In the cells algorithm=odd (and 1 more): Expected"), output
        assert sentence in error
        assert all(hint.startswith("hint: ") for hint in hints)
        assert not (tmp_path / "study").exists()
    status, output = run(["study.yaml", "--only", "algorithm=Ditto", "--only", "seed=0"], tmp_path)
    assert status == 0, "the other cells do not matter"


def test_checkpoints_stay_on_request(tmp_path):
    options = {"folder": "study", "workers": 1, "keep_checkpoints": True}
    write_study(tmp_path, seeds=1, axes={}, options=options)
    assert run(["study.yaml"], tmp_path)[0] == 0
    assert (tmp_path / "study/seed=0/checkpoints/last.ckpt").is_file()
    assert not CellFolder(tmp_path / "study", "seed=0").is_locked


def test_a_part_of_a_study_keeps_the_rows_of_an_earlier_table(finished, tmp_path, monkeypatch):
    """Committed results need no folders."""
    monkeypatch.chdir(tmp_path)
    rows = read_results(finished / "study")
    (tmp_path / "study").mkdir()
    write_table(tmp_path / "study" / "results.csv", [r for r in rows if r["seed"] != "2"])
    shutil.copytree(finished / "study/algorithm=Ditto", tmp_path / "study/algorithm=Ditto")
    study = pl_fed.Study(**STUDY)
    study.run(only=["algorithm=Ditto"])
    after = read_results(tmp_path / "study")
    assert [r["status"] for r in after] == ["done"] * 5 + ["missing"]
    assert [r["test/global/loss"] for r in after[:5]] == [r["test/global/loss"] for r in rows[:5]]


def test_table_is_written_by_one_start_at_a_time(finished, monkeypatch):
    """A start that reads the states of cells while another one ends would write old ones."""
    monkeypatch.chdir(finished)
    held = []

    def write_alone(folder, rows):
        with try_lock(folder / LOCKS / RESULTS) as is_free:
            held.append(not is_free)

    monkeypatch.setattr(pl_fed.studies.study, "write_results", write_alone)
    pl_fed.Study(**STUDY).run()
    assert held == [True]


def test_results_from_python(finished, monkeypatch):
    monkeypatch.chdir(finished)
    study = pl_fed.Study.from_file("study.yaml")
    rows = study.rows()
    assert [row["status"] for row in rows] == ["done"] * 6
    assert rows[0]["seconds/total"] > 0
    assert rows[0]["counts/rounds"] == 3
    assert study.run() == rows
    assert pl_fed.Study(**STUDY).rows() == rows
    frame = pytest.importorskip("pandas") and study.results()
    means = frame.groupby("algorithm")["test/global/loss"].mean()
    assert means["Ditto"] == means["FedAvg"] > 0


def test_recorded_cells_are_not_run_and_are_compared_with_new_runs(finished, tmp_path):
    """Five rows of another folder's table, with two of its numbers; the sixth cell is missing."""
    columns = ["algorithm", "seed", "status", "test/global/loss", "test/global/accuracy"]
    rows = read_results(finished / "study")
    with (tmp_path / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows([*rows[:5], {**rows[5], "status": "failed"}])
    file = write_study(tmp_path, options={**STUDY["options"], "recorded": "table.csv"})
    status, output = run([file, "--status"], tmp_path)
    assert status == 0, output
    assert output.splitlines()[:2] == [
        "                  cells  recorded  missing",
        "all cells             6         5        1",
    ]
    status, output = run([file], tmp_path)
    assert "[6/6] algorithm=FedAvg,seed=2: done" in output
    assert "1 done, 5 recorded" in output
    after = read_results(tmp_path / "study")
    assert [[row[name] for name in columns] for row in after] == [
        [row[name] for name in columns] for row in rows
    ]
    assert not (tmp_path / "study/algorithm=Ditto").exists()
    status, output = run([file, "--again", "algorithm=FedAvg,seed=1"], tmp_path)
    assert status == 0, output
    (line,) = (line for line in output.splitlines() if line.startswith("test/global/loss "))
    assert line.split()[1:3] == [f"{float(rows[4]['test/global/loss']):.6g}"] * 2
    (tmp_path / "table.csv").write_text("algorithm,loss\n")
    status, output = run([file, "--status"], tmp_path)
    assert status == 1
    assert "`options.recorded` to be a table with the columns seed and status but got" in output
    (tmp_path / "table.csv").unlink()
    status, output = run([file, "--status"], tmp_path)
    assert status == 1
    assert "`options.recorded` to be a table of results but got table.csv: there is no" in output
