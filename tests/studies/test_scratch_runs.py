"""Runs in a local folder of their machine: parcels of files, layers, and checkpoints on the way."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from pl_fed.studies.cell_folder import CellFolder, CellRecord
from pl_fed.studies.jobs import RunJob
from pl_fed.studies.readers import StudyError
from pl_fed.studies.scratch_runs import pack, read_layers, run_in_scratch, unpack
from pl_fed.studies.study import Study

FILES = {"config.yaml": "a: 1", "summary.json": "{}", "checkpoints/last.ckpt": "c", "w/x/y": "z"}


def write(folder, files=FILES):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_parcel_has_the_files_of_a_folder(tmp_path):
    write(tmp_path / "here", {**FILES, "checkpoints/.ckpt.tmp": "half"})
    write(tmp_path / "there", {"config.yaml": "old", "old/file": "old"})
    unpack(pack(tmp_path / "here"), tmp_path / "there")
    assert read(tmp_path / "there") == FILES
    assert not (tmp_path / "there" / "old").exists()
    before, after = ((tmp_path / name / "w/x/y").stat().st_mtime for name in ("here", "there"))
    assert int(before) == after


def test_a_parcel_may_leave_other_files_there(tmp_path):
    write(tmp_path / "here", {"a": "1"})
    write(tmp_path / "there", {"b": "2"})
    unpack(pack(tmp_path / "here"), tmp_path / "there", removes=False)
    assert read(tmp_path / "there") == {"a": "1", "b": "2"}


def test_no_folder_is_an_empty_parcel_that_changes_nothing(tmp_path):
    write(tmp_path / "there")
    assert pack(tmp_path / "missing") == b""
    unpack(b"", tmp_path / "there")
    assert read(tmp_path / "there") == FILES


def test_the_summary_comes_last_and_the_checkpoint_after_other_files(tmp_path, monkeypatch):
    """A kill while files come home must not leave a result, or a checkpoint without its files."""
    write(tmp_path / "here")
    order = []
    replace = type(tmp_path).replace
    monkeypatch.setattr(
        type(tmp_path), "replace", lambda path, to: (order.append(to.name), replace(path, to))
    )
    unpack(pack(tmp_path / "here"), tmp_path / "there")
    assert order[-2:] == ["last.ckpt", "summary.json"]
    assert sorted(order[:-2]) == ["config.yaml", "y"]


def make_job(folder, base, epochs=3, **changes):
    """Return the job of the first cell of a study in a folder."""
    settings = {
        "trainer.max_epochs": epochs,
        "trainer.logger": False,
        "trainer.check_val_every_n_epoch": epochs,
        "data.num_clients": 6,
        "data.batch_size": 100,
        "federation.sampler.cohort_size": 3,
    }
    study = Study("far", [*base, settings], options={"folder": str(folder)}, **changes)
    (cell,) = study.cells
    record = CellRecord("far", cell.name, dict(cell.values), cell.seed, cell.digest)
    return RunJob(str(folder), cell.path, cell.arguments, asdict(record))


def bring_home(job, files, aside):
    cell = CellFolder(Path(job.root), job.path)
    unpack(files, cell.path)
    unpack(aside, cell.aside, removes=False)
    return cell


@pytest.mark.slow
def test_a_run_leaves_no_file_and_reads_no_folder_of_the_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("model: {lam: 3.5}")
    job = make_job(tmp_path / "home" / "far", ["quickstart", "own.yaml"])
    layers = read_layers(job.arguments)
    assert layers == {"own.yaml": "model: {lam: 3.5}"}
    (tmp_path / "own.yaml").unlink()  # the other machine does not have it
    scratch = tmp_path / "scratch"
    outcome, files, aside = run_in_scratch(job, b"", layers, scratch, print, 10.0)
    assert outcome.state == "done", outcome.error
    assert aside == b""
    assert not (tmp_path / "home").exists()
    assert [path for path in read(scratch) if "/.locks/" not in path] == []
    cell = bring_home(job, files, aside)
    assert cell.read_state() == "done"
    assert yaml.safe_load(cell.config.read_text())["model"]["init_args"]["lam"] == 3.5
    assert not cell.has_checkpoint


@pytest.mark.slow
def test_a_killed_run_resumes_from_a_parcel_that_came_home(tmp_path, monkeypatch, caplog):
    """The parcel of a checkpoint on the way is enough, and the numbers stay the same."""
    monkeypatch.chdir(tmp_path)
    saves_each_round = {"class_path": "pl_fed.callbacks.LastCheckpoint", "init_args": {"share": 1}}
    base = ["quickstart", {"trainer.callbacks": [saves_each_round]}]
    job = make_job(tmp_path / "home" / "far", base, epochs=12)
    parcels = []
    whole, files, _ = run_in_scratch(job, b"", {}, tmp_path / "scratch", parcels.append, 0.02)
    assert whole.state == "done"
    assert len(parcels) > 2
    expected = bring_home(job, files, b"").read_summary()["metrics"]
    resumed, files, aside = run_in_scratch(job, parcels[1], {}, tmp_path / "other", print, 10.0)
    assert (resumed.state, aside) == ("done", b"")
    unpack(files, tmp_path / "resumed")
    assert CellFolder(tmp_path, "resumed").read_summary()["metrics"] == expected
    assert "Restored all states from the checkpoint" in caplog.text


@pytest.mark.slow
def test_a_run_of_another_config_comes_home_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home" / "far"
    job = make_job(home, ["quickstart"], epochs=1)
    bring_home(job, *run_in_scratch(job, b"", {}, tmp_path / "scratch", print, 10.0)[1:])
    old = read(home / job.path)
    job = make_job(home, ["quickstart", {"model.lam": 2.5}], epochs=1)
    files = pack(home / job.path)
    outcome, files, aside = run_in_scratch(job, files, {}, tmp_path / "scratch", print, 10.0)
    assert outcome.state == "done"
    assert str(home.parent / "far_aside") in outcome.note
    cell = bring_home(job, files, aside)
    (earlier,) = cell.aside.iterdir()
    assert read(earlier)["per_client.csv"] == old["per_client.csv"]
    assert yaml.safe_load(cell.config.read_text())["model"]["init_args"]["lam"] == 2.5


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    job = RunJob(str(tmp_path / "home"), "seed=0", ["--config", "quickstart"], {})
    write(tmp_path / "here")
    with pytest.raises(StudyError, match=r"`options\.on\.ray\.scratch` to be a folder that each"):
        run_in_scratch(job, pack(tmp_path / "here"), {}, tmp_path / "file", print, 10.0)
