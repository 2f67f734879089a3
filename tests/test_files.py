"""Files that are replaced as a whole, also on a full disk."""

import errno
import os
import sys
import threading
from dataclasses import asdict
from unittest.mock import Mock

import pytest
from run_folders import write_run

from pl_fed.command.messages import describe_file_error
from pl_fed.command.report import main as report
from pl_fed.files import replace_file, try_lock, wait_for_lock
from pl_fed.loggers import RunCSV
from pl_fed.reports import page
from pl_fed.studies.cell_folder import LOG, CellFolder, CellRecord, State
from pl_fed.studies.cell_run import run_cell
from pl_fed.studies.command import main as study
from pl_fed.studies.jobs import RunJob
from pl_fed.studies.pool import Pool
from pl_fed.studies.study import Study
from pl_fed.studies.worker import do_job


def write_half(path, is_shared):
    with replace_file(path, is_shared) as temporary:
        temporary.write_text("sec")
        raise OSError("full")


@pytest.mark.parametrize("is_shared", [False, True])
def test_file_is_replaced_whole_or_not_at_all(tmp_path, is_shared):
    path = tmp_path / "made" / "a.csv"
    with replace_file(path, is_shared) as temporary:
        temporary.write_text("first")
        assert not path.exists()
    with pytest.raises(OSError, match="full"):
        write_half(path, is_shared)
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["a.csv"]


def test_processes_share_no_temporary_file(tmp_path, monkeypatch):
    names = []
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        with replace_file(tmp_path / "a.csv", is_shared=True) as temporary:
            temporary.write_text("")
            names.append(temporary)
    assert len({*names}) == 2


def test_lock_is_waited_for(tmp_path):
    path, order = tmp_path / "made" / "lock", []

    def write_last():
        with wait_for_lock(path):
            order.append("last")

    thread = threading.Thread(target=write_last)
    with wait_for_lock(path):
        thread.start()
        thread.join(0.06)
        order.append("first")
    thread.join()
    assert order == ["first", "last"]
    with try_lock(path) as is_free:
        assert is_free


@pytest.fixture
def full_disk(monkeypatch):
    """A disk without space for files that are replaced."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "replace", Mock(side_effect=full))


def run_on_a_full_disk(folder):
    """Run a cell, and check that its error names its folder in one sentence."""
    record = CellRecord("s", folder.name, {}, 0, "digest", "")
    words = ["--config=quickstart", "--trainer.max_epochs=1", "--trainer.logger=false"]
    outcome = run_cell(RunJob(str(folder.parent), folder.name, words, asdict(record)))
    assert outcome.state is State.FAILED
    assert outcome.error == (
        f"OSError: Expected disk space for the files of the run in {folder} but got: No space left"
        " on device: free disk space and start the study again"
    )
    return outcome


def test_run_of_a_study_fails_on_a_full_disk_and_its_worker_goes_on(tmp_path, full_disk):
    run_on_a_full_disk(tmp_path / "seed=0")
    assert not [*tmp_path.rglob("*.tmp")]


@pytest.mark.slow
def test_run_without_space_for_its_log_names_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "seed=0"
    folder.mkdir()
    (folder / LOG).symlink_to("/dev/full")
    for number, name in enumerate(("stdout", "stderr"), 1):  # pytest has replaced those of fits
        monkeypatch.setattr(sys, name, os.fdopen(number, "w", closefd=False))
    places = [os.fstat(number).st_ino for number in (1, 2)]
    outcome = run_on_a_full_disk(folder)
    assert CellFolder(tmp_path, folder.name).read_record().error == outcome.error
    assert [os.fstat(number).st_ino for number in (1, 2)] == places


@pytest.mark.slow
def test_run_whose_training_fills_the_disk_names_its_folder(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(RunCSV, "_replace", Mock(side_effect=full))
    run_on_a_full_disk(tmp_path / "seed=0")


@pytest.mark.parametrize("options", [[], ["--report"]])
def test_study_on_a_full_disk_ends_in_a_sentence(tmp_path, monkeypatch, full_disk, capsys, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text("{name: s, base: quickstart, options: {folder: out}}")
    monkeypatch.setattr(Study, "run", lambda self, *_: self._describe())
    monkeypatch.setattr(Study, "report", Study._describe)
    with pytest.raises(SystemExit) as ended:
        study(["s.yaml", *options])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: Expected disk space for the files of the study in out but got: No space left on"
        " device: free disk space and repeat the command: runs that have ended stay.\n"
    )


def test_report_on_a_full_disk_ends_in_a_sentence(tmp_path, monkeypatch, capsys):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(page, "write", Mock(side_effect=full))
    with pytest.raises(SystemExit) as ended:
        report([str(write_run(tmp_path / "a")), "--out", str(tmp_path / "out")])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"error: Expected disk space for the report in {tmp_path / 'out'} but got: No space left on"
        " device: free disk space and repeat the command.\n"
    )


def test_file_that_cannot_move_is_described_by_its_place(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(IsADirectoryError) as error, replace_file(tmp_path / "a.csv") as temporary:
        temporary.write_text("a")
    expected = f"Expected to read or write {tmp_path / 'a.csv'} but got: Is a directory."
    assert describe_file_error(error.value) == expected


class PoolInThisProcess(Pool):
    """A pool of one worker: this process."""

    def __init__(self):
        self.job = None

    def __exit__(self, *_):
        pass

    @property
    def idle(self):
        return [] if self.job else [self]

    @property
    def jobs(self):
        return [self.job] if self.job else []

    def give(self, job):
        self.job = job

    def wait(self, seconds):
        job, self.job = self.job, None
        return [(job, do_job(job))] if job else []


def refuse_study(*options):
    with pytest.raises(SystemExit) as ended:
        study(["s.yaml", *options])
    assert ended.value.code == 1


@pytest.fixture
def study_folder(tmp_path, monkeypatch):
    """The folder of a study of one cell that has not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text("{name: s, base: quickstart, options: {folder: out}}")
    monkeypatch.setattr(Study, "open_pool", lambda *_: PoolInThisProcess())
    return tmp_path / "out"


def test_study_in_the_place_of_a_file_is_refused(study_folder, capsys):
    study_folder.touch()
    refuse_study()
    message = "error: Expected argument `options.folder` to be a folder that can be written but got"
    assert capsys.readouterr().err == f"{message} out: Not a directory.\n"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--again", "seed=0"]], ids=["run", "again"])
def test_run_in_the_place_of_a_file_fails_with_a_sentence(study_folder, capsys, options):
    if options:
        place = study_folder.with_name("out_again")
    else:
        study_folder.mkdir()
        place = study_folder / "seed=0"
    place.touch()
    refuse_study(*options)
    error = capsys.readouterr().err
    assert "Error: Expected to read or write out" in error
    assert "[Errno" not in error
    assert "log.txt" not in error
