"""``python -m pl_fed report``, as a user calls it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import write_run

from pl_fed.command.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
FIT = [
    *("fit", "--config", str(ROOT / "configs" / "quickstart.yaml")),
    *("--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "1"),
    *("--trainer.enable_progress_bar", "false", "--data.num_clients", "10"),
    *("--federation.engine.name", "one_by_one", "--data.batch_size", "50"),
]

UNWRITABLE = "Expected argument `out` to be a folder that can be written but got"


def test_report_groups_two_seeds_of_the_quickstart(tmp_path, capsys):
    """Two seeds are one group. Its numbers are the means of the final results of the fits."""
    for seed in ("0", "1"):
        folders = ("--trainer.default_root_dir", str(tmp_path / "runs"))
        main([*FIT, *folders, "--seed_everything", seed])
    capsys.readouterr()
    main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert str(tmp_path / "out" / "report.html") in out
    assert err == ""
    with (tmp_path / "out" / "accuracy_spread.csv").open(newline="") as file:
        points = {row["model"]: row for row in csv.DictReader(file)}
    assert set(points) == {"personal", "global", "hybrid"}
    tested = []
    for path in (tmp_path / "runs").glob("*/metrics.csv"):
        with path.open(newline="") as file:
            tested.append(list(csv.DictReader(file))[-1])
    for model, row in points.items():
        mean = sum(float(row[f"test/{model}/accuracy"]) for row in tested) / 2
        assert float(row["accuracy"]) == pytest.approx(mean, abs=1e-5)
        assert row["runs"] == "2"
    assert (tmp_path / "out" / "classes_hybrid.png").is_file()
    assert "2 seeds" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_report_imports_no_training_code(tmp_path):
    write_run(tmp_path / "runs" / "a")
    script = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['report', 'runs']\n"
        "runpy.run_module('pl_fed', run_name='__main__', alter_sys=True)\n"
        "heavy = {'torch', 'lightning', 'wandb', 'sklearn', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "The report is runs/report/report.html; its pictures and tables are beside it.",
        "[]",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "it writes nowhere else"


def program(folder, *arguments):
    command = [sys.executable, "-m", "pl_fed", "report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_unfinished_runs_are_drawn_and_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", tested=False, rounds=3)
    (write_run(tmp_path / "b") / "metrics.csv").unlink()
    main(["report", ".", "--out", "out"])
    assert capsys.readouterr().err.splitlines() == [
        "note: b: no metrics.csv, so no round was run.",
        "note: a: unfinished.",
    ]
    assert (tmp_path / "out" / "curves_personal.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "Expected argument `runs` to be folders but got nowhere."),
        (["file"], "Expected argument `runs` to be folders but got file."),
        (["empty"], "Expected argument `runs` to be folders of runs, with a metrics.csv,"),
        (["begun"], "Expected argument `runs` to hold fits but got begun: no metrics.csv"),
        (["a", "begun"], "Expected argument `runs` to hold fits but got begun: no metrics.csv"),
        (["a", "--out", "file"], f"{UNWRITABLE} file: Not a directory."),
        (["a", "--out", "file/x/y"], f"{UNWRITABLE} file/x/y: Not a directory."),
        (["a", "--out", "/proc/x"], f"{UNWRITABLE} /proc/x: "),
        ([], "Expected argument `runs` to be set but got none."),
        (["a", "--to", "b"], "Expected only options that --help lists but got --to"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (write_run(tmp_path / "begun") / "metrics.csv").unlink()
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    assert stopped.value.code in (1, 2)
    text = capsys.readouterr().err
    assert text.startswith(f"error: {words}")
    assert text.count("\n") == 1
    assert not (tmp_path / "runs").exists(), "it is said before anything is written"


def test_program_exits_with_the_same_sentence(tmp_path):
    done = program(tmp_path, "nowhere")
    assert (done.returncode, done.stderr) == (
        1,
        "error: Expected argument `runs` to be folders but got nowhere.\n",
    )


def test_help_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "usage: python -m pl_fed report [--out FOLDER] RUN [RUN ...]" in text
