"""The command line: subcommands, configs, overrides, help, user classes, predictions."""

import contextlib
import csv
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import lightning
import pytest
import torch
import yaml
from exhaustive import exhaustive_for
from further_cases import mark_others
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import SIGTERMException

import pl_fed
from pl_fed.callbacks import PerClient
from pl_fed.command import saved_config
from pl_fed.command.fit import _resume_arguments
from pl_fed.command.help_pages import LIGHTNING_OPTIONS
from pl_fed.command.main import main, prepare_output
from pl_fed.command.parser import Parser
from pl_fed.command.run_choice import (
    choose_evaluated_run,
    choose_requeued_run,
    choose_run,
    is_requeued,
)
from pl_fed.command.run_files import write_slurm_job
from pl_fed.command.sections import SectionsCLI
from pl_fed.federation import Federation
from pl_fed.lightning.trainer import Trainer
from pl_fed.loggers import RunCSV
from pl_fed.rounds.round import RoundRunner
from pl_fed.run_folder import lock_run, try_lock

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ["--config", str(ROOT / "configs" / "quickstart.yaml")]


def fit(folder, *extra):
    """Run the quickstart for two rounds, and return the run's folder."""
    before = set(folder.glob("*/config.yaml"))
    main(["fit", *QUICKSTART, *short(folder), *extra])
    (new,) = set(folder.glob("*/config.yaml")) - before
    return new.parent


def short(folder):
    return [
        *("--trainer.default_root_dir", str(folder), "--trainer.max_epochs", "2"),
        *("--trainer.enable_progress_bar", "false", "--data.num_clients", "12"),
        *("--data.batch_size", "50"),  # a fifth of the steps
    ]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of a run of two rounds; tests copy it."""
    return fit(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(tmp_path, finished_run):
    """A copy of that run in ``tmp_path``, with the config that it would have there."""
    copy = Path(shutil.copytree(finished_run, tmp_path / finished_run.name))
    config = (copy / "config.yaml").read_text()
    assert str(finished_run.parent) in config
    (copy / "config.yaml").write_text(config.replace(str(finished_run.parent), str(tmp_path)))
    return copy


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_fit_prints_a_table_and_its_folder(tmp_path, capsys):
    run = fit(tmp_path)
    out = capsys.readouterr().out
    for words in ("global model", "personal model", "mean over clients", "spread", "worst 10 %"):
        assert words in out
    assert str(run) in out
    words = [line.rstrip().split(maxsplit=1) for line in out.splitlines()[:12]]
    parts = dict(pair for pair in words if len(pair) == 2)
    assert parts["algorithm"].startswith("Ditto(lam=0.1, local_epochs=2), MLP (2,410 trained")
    assert parts["rounds"] == "2 rounds, 10 of 12 clients per round (Uniform)"
    assert (parts["attack"], parts["defence"]) == ("none", "none (Mean, equal weights)")
    assert "2 rounds in " in out
    assert out.splitlines()[-1] == f"Next: python -m pl_fed report {run.parent}"
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["0", "1", "2"]
    clients = rows(run / "per_client.csv")
    assert [row["client"] for row in clients] == [str(k) for k in range(12)]
    mean = sum(float(row["personal_accuracy"]) for row in clients) / len(clients)
    tested = float(rows(run / "metrics.csv")[-1]["test/personal/accuracy"])
    assert mean == pytest.approx(tested, abs=1e-6)


def test_later_configs_and_overrides_replace_earlier_values(tmp_path):
    layer = tmp_path / "layer.yaml"
    layer.write_text("model: {init_args: {lam: 0.7}}\ndata: {batch_size: 5}\n")
    run = fit(tmp_path, "--config", str(layer), "--data.batch_size", "6", "--model.lam=0.9")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["lam"] == 0.9
    assert config["model"]["init_args"]["local_epochs"] == 2, "what no layer names stays"
    assert config["data"]["batch_size"] == 6


def test_saved_config_runs_again_with_equal_results(run, tmp_path):
    main(["fit", "--config", str(run / "config.yaml")])
    (again,) = [p.parent for p in tmp_path.glob("*/config.yaml") if p.parent != run]
    assert (again / "per_client.csv").read_text() == (run / "per_client.csv").read_text()


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_validate_and_test_evaluate_the_last_checkpoint(run, tmp_path, capsys, subcommand):
    trained = rows(run / "metrics.csv")
    capsys.readouterr()
    main([subcommand, *QUICKSTART, *short(tmp_path), "--ckpt_path", "last"])
    assert "mean over clients" in capsys.readouterr().out
    new = max(tmp_path.glob("*/metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    if subcommand == "test":
        name = "test/personal/accuracy"
        assert rows(new)[-1][name] == trained[-1][name]


def test_fast_dev_run_leaves_and_prints_no_folder(tmp_path, capsys):
    main(["fit", *QUICKSTART, *short(tmp_path), "--trainer.fast_dev_run", "true"])
    output = capsys.readouterr().out
    assert "mean over clients" in output
    assert "files are in" not in output
    assert not list(tmp_path.iterdir())


def test_torch_warns_of_no_missing_batching_rule(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_output()
        torch.vmap(torch.histc)(torch.zeros(2, 3))
        assert not caught
        warnings.warn("There is a performance drop.", stacklevel=1)
    assert len(caught) == 1


def test_predict_warns_about_untrained_models(tmp_path):
    with pytest.warns(UserWarning, match="predict uses untrained models, because"):
        main(["predict", *QUICKSTART, *short(tmp_path)])


def test_test_of_an_initial_model_does_not_call_it_untrained(tmp_path):
    net = pl_fed.models.MLP(64, [32], 10)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    initial = ["--federation.initial_model", str(tmp_path / "net.pt"), "--model", "FedAvg"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main(["test", *QUICKSTART, *short(tmp_path), *initial])
    assert not [w for w in caught if "uses untrained models" in str(w.message)]


def read_files(folder):
    """Return the content of all files by their path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unfinish(run):
    """Turn a finished run into one that was killed in its test; return its folder as text."""
    (run / "summary.json").unlink()
    return str(run)


def test_refused_resume_changes_no_file(run, tmp_path, capsys):
    more = ["--trainer.max_epochs", "3", "--ckpt_path", unfinish(run)]
    before = read_files(run)
    for other in (["--model.net.hidden", "[16]"], ["--model", "FedAvg"]):
        with pytest.raises(SystemExit):
            main(["fit", *QUICKSTART, *short(tmp_path), *other, *more])
        assert "Expected a checkpoint with the" in capsys.readouterr().err
        assert read_files(run) == before


@exhaustive_for("folder")
@pytest.mark.parametrize("place", ["last", "folder"])
def test_results_of_a_finished_run_stay_unless_it_gets_more_rounds(run, tmp_path, capsys, place):
    before = read_files(run)
    arguments = ["fit", *QUICKSTART, *short(tmp_path)]
    path = ["--ckpt_path", "last" if place == "last" else str(run)]
    for more in ([], ["--trainer.max_epochs", "1"]):
        main([*arguments, *more, *path])  # a command that is repeated until it succeeds
    for more in (["--model.lam", "5"], ["--model.lam", "5", "--trainer.max_epochs", "4"]):
        with pytest.raises(SystemExit):
            main([*arguments, *more, *path])
        error = capsys.readouterr().err
        assert f"{run} (already finished; model.lam 0.1 → 5), so this config trains" in error
    assert read_files(run) == before
    assert [*tmp_path.iterdir()] == [run]
    main([*arguments, "--trainer.max_epochs", "3", *path])
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["0", "1", "2", "3"]


def test_last_is_the_newest_unfinished_run_with_the_same_config(tmp_path, capsys):
    """Each of several stopped seeds continues in its folder; other runs stay as they are."""
    one_by_one = ["--federation.engine.name", "one_by_one"]
    runs = [fit(tmp_path, *one_by_one, "--seed_everything", str(seed)) for seed in (0, 1, 2)]
    results = [(run / "per_client.csv").read_text() for run in runs]
    for run in runs[:2]:
        unfinish(run)
        (run / "per_client.csv").unlink()
    other = read_files(runs[2])
    for seed in (0, 1):
        more = [*one_by_one, "--seed_everything", str(seed), "--ckpt_path", "last"]
        main(["fit", *QUICKSTART, *short(tmp_path), *more])
        assert (runs[seed] / "per_client.csv").read_text() == results[seed]
    assert {*tmp_path.iterdir()} == {*runs}
    assert read_files(runs[2]) == other
    more = ["--seed_everything", "5", "--ckpt_path", "last"]
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *short(tmp_path), *one_by_one, *more])
    error = capsys.readouterr().err
    assert f"{runs[0]} (already finished; seed_everything 0 → 5)" in error
    assert "leave it out to start a new run" in error


def test_repeated_commands_continue_the_run_of_the_first(tmp_path, monkeypatch, caplog):
    """``last`` begins a run where there is none; a requeued job of SLURM needs no ``last``."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    command = [*("--trainer.max_epochs", "1"), *("--trainer.logger", "false")]
    with pytest.warns(UserWarning, match="`ckpt_path` = last finds no run under"):
        run = fit(tmp_path, *command, "--ckpt_path", "last")
    assert yaml.safe_load((run / "config.yaml").read_text())["ckpt_path"] is None
    before = read_files(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    main(["fit", *QUICKSTART, *short(tmp_path), *command])
    assert f"{run} is already finished" in caplog.text
    assert "`trainer.max_time`" in caplog.text, "max_epochs would train no round after a time limit"
    assert read_files(run) == before
    unfinish(run)
    (run / "per_client.csv").unlink()
    main(["fit", *QUICKSTART, *short(tmp_path), *command])
    assert read_files(run)[run / "per_client.csv"] == before[run / "per_client.csv"]
    assert [*tmp_path.iterdir()] == [run]


def test_requeued_job_continues_its_own_unfinished_run(tmp_path, monkeypatch):
    for name, job, lam in (("a", "7", 0.1), ("b", "7", 1), ("c", "8", 0.1)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(f"model: {{lam: {lam}}}")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        write_slurm_job(tmp_path / name)
    chosen = []
    for job, lam in (("7", 0.1), ("7", 1), ("8", 0.1), ("8", 1), ("9", 1)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        run = choose_requeued_run(tmp_path, {"model": {"lam": lam}}, dict)
        chosen.append(run and run.folder.name)
    assert chosen == ["a", "b", "c", None, None]
    for count, requeued in (("", False), ("0", False), ("1", True), ("10", True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert is_requeued() is requeued


def test_last_of_an_evaluation_is_the_run_of_its_training_options(tmp_path):
    """Options of evaluations alone made all runs differ: the newest one was taken, of any λ."""
    config = {"model": {"class_path": "pl_fed.clients.Ditto", "init_args": {"lam": 0.5}}}
    for run, lam in enumerate((0.5, 0.1)):
        saved = {"model": {**config["model"], "init_args": {"lam": lam}}}
        (tmp_path / str(run) / "checkpoints").mkdir(parents=True)
        (tmp_path / str(run) / "config.yaml").write_text(yaml.safe_dump(saved))
        (tmp_path / str(run) / "checkpoints" / "last.ckpt").touch()
        os.utime(tmp_path / str(run) / "checkpoints" / "last.ckpt", (run, run))
    for options in (
        {"data": {"predict_clients": [0, 3], "clients_per_eval_batch": 4}},
        {"federation": {"metrics": {"f1": {"class_path": "F1"}}, "statistics": ["gini"]}},
        {"federation": {"evaluate_clients": 5, "smoothing": {"std": 0.1}}},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chosen = choose_evaluated_run("last", tmp_path, {**config, **options}, lambda it: it)
        assert chosen.folder == tmp_path / "0"
    with pytest.warns(UserWarning, match="another config .model.lam 0.1 → 0.5, data.seed – → 3"):
        choose_evaluated_run("last", tmp_path, {**config, "data": {"seed": 3}}, lambda it: it)


def test_checkpoint_in_a_config_makes_no_other_run(tmp_path):
    """A run that began with a checkpoint has its path in its config; ``last`` may stand in one."""
    model = {"model": {"class_path": "pl_fed.clients.Ditto", "init_args": {"lam": 0.5}}}
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "last.ckpt").touch()
    for saved in (None, "start.ckpt"):
        (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump({**model, "ckpt_path": saved}))
        for path in (None, "last", "other.ckpt", str(tmp_path / "a")):
            for choose in (choose_run, choose_evaluated_run):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    chosen = choose("last", tmp_path, {**model, "ckpt_path": path}, dict)
                assert chosen.folder == tmp_path / "a"


def test_last_beside_other_checkpoints_is_refused(tmp_path, capsys):
    file = tmp_path / "a" / "checkpoints" / "epoch=0.ckpt"
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(SystemExit):
        fit(tmp_path, "--ckpt_path", "last")
    assert f"newest other checkpoint is {file}: set" in capsys.readouterr().err


def test_config_of_an_earlier_version_lacks_new_arguments(run, tmp_path, capsys):
    """Arguments that a run's config lacks have their defaults, at any depth."""
    unfinish(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["federation"]["small_cohort"], config["federation"]["engine"]
    del config["data"]["root_samples"], config["trainer"]["log_every_n_steps"]
    del config["data"]["partitioner"]["init_args"]["whole_test_classes"]
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    arguments = ["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path", "last"]
    with pytest.raises(SystemExit):
        main([*arguments, "--federation.small_cohort", "raise"])
    assert f"{run} (unfinished; federation.small_cohort skip → raise)" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another config")
        main([*arguments, "--trainer.max_epochs", "3"])
    assert {*tmp_path.iterdir()} == {run}
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["0", "1", "2", "3"]
    assert not list(run.glob("config_to_round_*.yaml"))


def test_evaluations_take_the_run_with_their_config(run, tmp_path):
    newer = fit(tmp_path, "--model.lam", "1")
    name = "test/personal/accuracy"
    for arguments, tested in (([], run), (["--model.lam", "1"], newer)):
        before = {*tmp_path.iterdir()}
        main(["test", *QUICKSTART, *short(tmp_path), *arguments, "--ckpt_path", "last"])
        (new,) = {*tmp_path.iterdir()} - before
        assert rows(new / "metrics.csv")[-1][name] == rows(tested / "metrics.csv")[-1][name]
    with pytest.warns(UserWarning, match=r"under another config \(model\.lam 1 → 2\)"):
        main(["test", *QUICKSTART, *short(tmp_path), "--model.lam", "2", "--ckpt_path", str(newer)])


def test_folder_without_a_run_is_refused(run, tmp_path, capsys):
    for folder, remedy in ((run / "checkpoints", f" Give {run} instead."), (tmp_path, "")):
        with pytest.raises(SystemExit):
            main(["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path", str(folder)])
        sentence = f"but got {folder}: a folder without checkpoints/last.ckpt.{remedy}\n"
        assert capsys.readouterr().err.endswith(sentence)


@pytest.mark.parametrize("started", [False, True])
def test_refused_resume_starts_no_wandb_run(run, tmp_path, capsys, started):
    wandb = ["--config", str(ROOT / "configs" / "wandb.yaml")]
    run = fit(tmp_path, *wandb) if started else run
    pytest.importorskip("wandb").finish()
    more = ["--seed_everything", "5", "--trainer.max_epochs", "3", "--ckpt_path", unfinish(run)]
    before = {*run.rglob("*")}
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *wandb, *short(tmp_path), *more])
    assert "Expected a checkpoint with the seed 5 but got one with 0" in capsys.readouterr().err
    assert {*run.rglob("*")} == before


def remove_checkpoint(run):
    """Turn a run into one that was stopped before its first checkpoint."""
    for name in ("checkpoints/last.ckpt", "per_client.csv"):
        (run / name).unlink()
    return run


def test_saved_config_of_a_resumed_run_starts_a_new_run(run, tmp_path):
    main(["fit", *QUICKSTART, *short(tmp_path), "--trainer.max_epochs", "3", "--ckpt_path", "last"])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    main(["fit", "--config", str(run / "config.yaml")])
    (other,) = {*tmp_path.iterdir()} - {run}
    assert [row["round"] for row in rows(other / "metrics.csv")] == ["0", "1", "2", "3"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_failed_resumes_keep_the_config_of_the_finished_rounds(run, tmp_path, capsys):
    before = (run / "config.yaml").read_text()
    more = ["--trainer.max_epochs", "4", "--ckpt_path", unfinish(run), "--model.lam"]
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *short(tmp_path), *more, "1e30"])
    assert "Expected finite losses" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"model\.lam 0\.1 → 0\.05"):
        main(["fit", *QUICKSTART, *short(tmp_path), *more, "0.05"])
    assert (run / "config_to_round_2.yaml").read_text() == before
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["lam"] == 0.05


def test_old_config_resumes_after_a_failed_resume_with_another(run, tmp_path):
    before = (run / "config.yaml").read_text()
    more = ["--trainer.max_epochs", "4", "--ckpt_path"]
    failing = [*more, unfinish(run), "--model.lam", "1e30"]
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *short(tmp_path), *failing])
    main(["fit", *QUICKSTART, *short(tmp_path), *more, "last"])
    assert not (run / "config_to_round_2.yaml").exists()
    assert (run / "config.yaml").read_text() == before.replace("max_epochs: 2", "max_epochs: 4")


@pytest.mark.parametrize("moment", ["dump", "replace"])
def test_config_is_written_whole_or_not_at_all(run, tmp_path, monkeypatch, moment):
    """A run with half a config could not be continued by ``last``."""
    before = (run / "config.yaml").read_text()
    more = ["--trainer.max_epochs", "3", "--ckpt_path", unfinish(run)]

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if moment == "dump":
            patch.setattr(saved_config.SaveAndLogConfig, "_keep_previous", lambda *_: None)
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(os, "replace", fail)
        with pytest.raises(SystemExit):
            main(["fit", *QUICKSTART, *short(tmp_path), *more])
    assert (run / "config.yaml").read_text() == before
    assert not [*run.rglob("*.tmp")]


def test_resume_leaves_a_finished_run_without_checkpoint_alone(run, tmp_path):
    older, newer = run, fit(tmp_path)
    (older / "checkpoints" / "last.ckpt").unlink()
    before = {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}
    main(["fit", *QUICKSTART, *short(tmp_path), "--trainer.max_epochs", "3", "--ckpt_path", "last"])
    assert {path: path.read_bytes() for path in older.rglob("*") if path.is_file()} == before
    assert [row["round"] for row in rows(newer / "metrics.csv")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("started", [False, True])
def test_resume_refuses_a_run_that_another_process_locks(run, tmp_path, capsys, started):
    if started:  # and has no checkpoint yet
        remove_checkpoint(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path", "last"]
    arguments += ["--trainer.max_epochs", "3"]
    with lock_run(run), pytest.raises(SystemExit):
        main(arguments)
    output = capsys.readouterr().err
    assert "Expected the folder of a run that no other process writes into but got" in output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert {*tmp_path.iterdir()} == {run}
    main(arguments)
    assert [row["round"] for row in rows(run / "metrics.csv")][-1] == "3"


def test_resume_with_another_config_warns_and_keeps_both_configs(run, tmp_path):
    before = (run / "config.yaml").read_text()
    more = ["--trainer.max_epochs", "4", "--model.lam", "3", "--ckpt_path", unfinish(run)]
    warning = r"from round 2 on \(trainer\.max_epochs 2 → 4, model\.lam 0\.1 → 3\)"
    with pytest.warns(UserWarning, match=warning):
        main(["fit", *QUICKSTART, *short(tmp_path), *more])
    assert (run / "config_to_round_2.yaml").read_text() == before
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["lam"] == 3
    before = (run / "config.yaml").read_text()
    more[3:] = ["5", "--ckpt_path", unfinish(run)]
    warning = r"The run has no round left, so this config \(model\.lam 3 → 5\) trains nothing"
    with pytest.warns(UserWarning, match=warning):
        main(["fit", *QUICKSTART, *short(tmp_path), *more])
    assert (run / "config.yaml").read_text() == before


def test_run_stopped_before_its_first_checkpoint_restarts_in_its_folder(run, tmp_path):
    options = [
        "--model.lam",
        "1",
        "--federation.engine.name",
        "one_by_one",
    ]  # auto may choose another engine
    older, newer = run, fit(tmp_path, *options)
    expected = (newer / "per_client.csv").read_text()
    remove_checkpoint(newer)
    before = {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="was stopped before its first checkpoint, so it restarts"):
        main(["fit", *QUICKSTART, *short(tmp_path), *options, "--ckpt_path", "last"])
    assert {*tmp_path.iterdir()} == {older, newer}
    assert (newer / "per_client.csv").read_text() == expected
    assert [row["round"] for row in rows(newer / "metrics.csv")] == ["0", "1", "2"]
    assert {path: path.read_bytes() for path in older.rglob("*") if path.is_file()} == before


def test_run_from_a_path_that_is_stopped_before_its_first_checkpoint_restarts_from_it(
    run, tmp_path, monkeypatch, capsys
):
    """Not from round 0, without what the other run has learned; also in a requeued job of SLURM."""
    path, root = str(run / "checkpoints" / "last.ckpt"), tmp_path / "further"
    arguments = ["fit", *QUICKSTART, *short(root), "--trainer.max_epochs", "3"]

    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with monkeypatch.context() as patch:
        patch.setattr(RoundRunner, "run", interrupt)
        with pytest.raises(SystemExit):
            main([*arguments, "--ckpt_path", path])
    assert f"Resume the run from {path}, because it has no" in capsys.readouterr().err
    (further,) = root.iterdir()
    with pytest.warns(UserWarning, match=f"first checkpoint, so it restarts from {path}"):
        main([*arguments, "--ckpt_path", "last"])
    assert [row["round"] for row in rows(further / "metrics.csv")] == ["2", "3"]
    remove_checkpoint(further)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    main([*arguments, "--ckpt_path", path])
    assert [*root.iterdir()] == [further]


DDP = {
    "class_path": "lightning.pytorch.strategies.DDPStrategy",
    "init_args": {"timeout": "0:00:20"},
}


@exhaustive_for("ddp")
@pytest.mark.parametrize("strategy", ["ddp", DDP])
def test_run_without_checkpoint_restarts_with_other_processes(run, tmp_path, strategy):
    run = remove_checkpoint(run)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["trainer"] |= {"devices": 2, "strategy": strategy, "num_nodes": 2}
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.warns(UserWarning, match="was stopped before its first checkpoint"):
        main(["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path", "last"])
    assert [*tmp_path.iterdir()] == [run]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_run_restarts_if_its_own_checkpoint_callback_has_saved_nothing(
    tmp_path, monkeypatch, elsewhere
):
    """It does not if its checkpoints are elsewhere, because some may exist there."""
    saver = "lightning.pytorch.callbacks.ModelCheckpoint"
    arguments = [*QUICKSTART, *short(tmp_path / "runs"), "--trainer.callbacks", saver]
    arguments += ["--trainer.callbacks.save_last", "true", "--trainer.check_val_every_n_epoch", "2"]
    if elsewhere:
        arguments += ["--trainer.callbacks.dirpath", str(tmp_path / "elsewhere")]
    with monkeypatch.context() as patch:
        real = RoundRunner.run

        def interrupt_second_round(self, round, *args, **kwargs):
            if round == 1:
                raise KeyboardInterrupt
            return real(self, round, *args, **kwargs)

        patch.setattr(RoundRunner, "run", interrupt_second_round)
        with pytest.raises(SystemExit):
            main(["fit", *arguments])
    (run,) = (tmp_path / "runs").iterdir()
    if elsewhere:
        with pytest.raises(SystemExit):
            main(["fit", *arguments, "--ckpt_path", "last"])
        return
    with pytest.warns(UserWarning, match="was stopped before its first checkpoint, so it restarts"):
        main(["fit", *arguments, "--ckpt_path", "last"])
    assert [*(tmp_path / "runs").iterdir()] == [run]
    assert (run / "per_client.csv").is_file()
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_resume_skips_unstarted_runs_of_other_configs(run, tmp_path):
    for other in (["--model.lam", "1"], ["--model", "FedAvg"]):
        remove_checkpoint(fit(tmp_path, *other))
    main(["fit", *QUICKSTART, *short(tmp_path), "--trainer.max_epochs", "3", "--ckpt_path", "last"])
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["0", "1", "2", "3"]


def test_terminated_run_exits_with_the_status_of_sigterm(monkeypatch):
    monkeypatch.setattr("pl_fed.command.main.FederatedCLI", Mock(side_effect=SIGTERMException))
    with pytest.raises(SystemExit) as ended:
        main(["fit"])
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("fill", [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)])
def test_lack_of_memory_is_told_in_one_sentence(monkeypatch, capsys, fill):
    """It ended in a traceback."""
    monkeypatch.setattr("pl_fed.command.main.FederatedCLI", lambda _: fill())
    with pytest.raises(SystemExit):
        main(["fit"])
    output = capsys.readouterr().err
    assert output.startswith("error: Expected enough memory for the run but got: ")
    assert output.endswith(
        ": set a smaller `data.batch_size`, `federation.engine.chunk_size` or net.\n"
    )
    assert "test_cli.py" in output, "the line of the user's code"


@pytest.mark.parametrize("subcommand", ["fit", "test", "validate"])
def test_run_folder_is_locked_until_the_last_file_is_written(tmp_path, monkeypatch, subcommand):
    """A second process would write into the files of its test."""
    held = []
    for hook in ("on_test_epoch_end", "on_validation_epoch_end"):
        write = getattr(PerClient, hook)

        def record_lock_and_write(self, *arguments, write=write):
            with try_lock(self.folder) as acquired:
                held.append(not acquired)
            write(self, *arguments)

        monkeypatch.setattr(PerClient, hook, record_lock_and_write)
    main([subcommand, *QUICKSTART, *short(tmp_path)])
    assert held
    assert all(held)
    (run,) = tmp_path.iterdir()
    with try_lock(run) as acquired:
        assert acquired, "the lock is released at the end"


INTERRUPTS = {"Ctrl-C": (KeyboardInterrupt, 130), "SIGTERM": (SIGTERMException, 143)}


@pytest.mark.filterwarnings("ignore:.*was stopped before its first checkpoint")
@pytest.mark.filterwarnings("ignore:.*No checkpoint is written")
@pytest.mark.parametrize(
    ("name", "rounds"),
    mark_others(
        [("Ctrl-C", 0), ("SIGTERM", 1), ("Ctrl-C", 2), ("SIGTERM", 2)],
        ("Ctrl-C", 0),
        ("SIGTERM", 1),
    ),
)
def test_interrupted_run_prints_the_command_that_resumes_it(
    tmp_path, monkeypatch, capsys, name, rounds
):
    kind, code = INTERRUPTS[name]
    real_round, real_test = RoundRunner.run, Federation.evaluate

    def interrupt_method(real, is_time):
        def run(self, first, *arguments, **settings):
            if is_time(first):
                raise kind
            return real(self, first, *arguments, **settings)

        return run

    arguments = ["fit", *QUICKSTART, *short(tmp_path), "--federation.engine.name=one_by_one"]
    with monkeypatch.context() as patch:
        patch.setattr(RoundRunner, "run", interrupt_method(real_round, lambda n: n == rounds))
        patch.setattr(
            Federation, "evaluate", interrupt_method(real_test, lambda part: part == "test")
        )
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert ended.value.code == code
    (run,) = tmp_path.iterdir()
    *_, report, command = capsys.readouterr().err.splitlines()
    begins = "" if rounds else " from round 0, because it has no checkpoint yet"
    assert report == (f"Stopped by {name}. The run's folder is {run}. Resume the run{begins}:")
    assert command.split()[:3] == ["python", "-m", "pl_fed"]
    main(shlex.split(command)[3:])
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["0", "1", "2"]
    assert [*tmp_path.iterdir()] == [run]


def test_resume_command_names_one_checkpoint():
    arguments = ["fit", "--ckpt_path", "a", "--x", "--ckpt_path=b", "--y", "z"]
    expected = ["fit", "--x", "--y", "z", "--ckpt_path", "runs/a b"]
    assert _resume_arguments(arguments, Path("runs/a b")) == expected


@pytest.mark.parametrize("subcommand", ["partition", "report", "export"])
def test_interrupt_without_a_run_prints_no_traceback(monkeypatch, capsys, subcommand):
    for name in ("partition.PartitionCLI", "report.main", "export.ExportCLI"):
        monkeypatch.setattr(f"pl_fed.command.{name}", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        main([subcommand])
    assert ended.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "Stopped by Ctrl-C.\n"


@pytest.mark.parametrize("name", INTERRUPTS)
def test_stop_before_the_first_round_is_reported_and_leaves_no_folder(
    tmp_path, monkeypatch, capsys, name
):
    kind, code = INTERRUPTS[name]
    monkeypatch.setattr(Trainer, "run_settings", Mock(side_effect=kind))
    with pytest.raises(SystemExit) as ended:
        main(["fit", *QUICKSTART, *short(tmp_path)])
    assert ended.value.code == code
    assert capsys.readouterr().err == f"Stopped by {name} before a run started.\n"
    assert not [*tmp_path.iterdir()]


def test_two_interrupts_are_reported_once(tmp_path, monkeypatch, capsys):
    """The first makes Lightning end the run; the second comes while it does."""
    interrupt = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(RoundRunner, "run", interrupt)
        patch.setattr(Trainer, "_teardown", interrupt)
        with pytest.raises(SystemExit) as ended:
            main(["fit", *QUICKSTART, *short(tmp_path)])
    assert ended.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err.count("Stopped by") == 1


def test_full_disk_error_names_the_run_folder(run, tmp_path, monkeypatch, capsys):
    """The error of the system names no file."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(RunCSV, "_replace", Mock(side_effect=full))
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path=last", "--trainer.max_epochs=3"])
    output = capsys.readouterr().err
    assert f"Expected disk space for the files of the run in {run} but got: No space left" in output
    assert f"free disk space and resume from its last checkpoint: --ckpt_path {run}." in output


def test_resume_in_a_read_only_folder_is_refused(run, tmp_path, monkeypatch, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    error = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("pl_fed.arguments.TemporaryFile", Mock(side_effect=error))
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=error))
    with pytest.raises(SystemExit):
        main(["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path=last", "--trainer.max_epochs=3"])
    output = capsys.readouterr().err
    assert f"`run_dir` to be a folder that can be written but got {run}: Read-only file" in output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_run_resumes_with_a_damaged_metrics_file(run, tmp_path):
    content = (run / "metrics.csv").read_bytes()
    (run / "metrics.csv").write_bytes(content[:20] + b"\x95" + content[21:])
    with pytest.warns(UserWarning, match="metrics.csv is damaged"):
        main(["fit", *QUICKSTART, *short(tmp_path), "--ckpt_path=last", "--trainer.max_epochs=3"])
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["2", "3"]
    assert (run / "metrics_damaged_1.csv").is_file()


def test_root_dir_that_is_a_file_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for command in ("fit", "partition"):
        with pytest.raises(SystemExit):
            main([command, *QUICKSTART, "--trainer.default_root_dir", str(file)])
        assert (
            "`trainer.default_root_dir` to be a folder that can be written"
            in capsys.readouterr().err
        )


def test_predict_writes_predictions_of_the_requested_clients(run, tmp_path):
    last = str(run / "checkpoints" / "last.ckpt")
    arguments = [*QUICKSTART, *short(tmp_path), "--ckpt_path", last]
    main(["predict", *arguments, "--data.predict_clients", "[3, 5]"])
    (file,) = tmp_path.glob("*/predictions.csv")
    predictions = rows(file)
    assert {row["client"] for row in predictions} == {"3", "5"}
    for client in ("3", "5"):
        own = [row for row in predictions if row["client"] == client]
        correct = sum(row["prediction"] == row["target"] for row in own) / len(own)
        table = rows(run / "per_client.csv")[int(client)]
        assert correct == pytest.approx(float(table["personal_accuracy"]), abs=1e-6)
        assert all(0.1 <= float(row["probability"]) <= 1 for row in own)


def test_config_takes_classes_from_a_user_file(tmp_path, monkeypatch):
    (tmp_path / "my_ideas.py").write_text(
        "import torch\n"
        "from pl_fed.aggregators import Aggregator\n"
        "from pl_fed.clients import Ditto\n"
        "class Half(Aggregator):\n"
        "    def forward(self, uploads, weights, context):\n"
        "        return uploads.mean(0) / 2\n"
        "    def max_byzantine(self, num_uploads):\n"
        "        return 0\n"
        "class MyDitto(Ditto):\n"
        "    def __init__(self, net: torch.nn.Module, extra: float = 1.0, **kwargs):\n"
        "        super().__init__(net, **kwargs)\n"
        "        self.extra = extra\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        loss = super().training_step(batch, batch_idx)\n"
        "        return {'loss': loss, 'mine': loss.detach() * 0 + self.extra}\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = fit(
        tmp_path,
        *("--model", "my_ideas.MyDitto", "--model.extra", "3", "--model.net", "my_ideas.Net"),
        *("--federation.aggregator", "my_ideas.Half"),
    )
    assert rows(run / "metrics.csv")[0]["train/mine"] == "3"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["class_path"] == "my_ideas.MyDitto"
    assert config["federation"]["aggregator"]["class_path"] == "my_ideas.Half"


def test_run_starts_from_a_checkpoint_of_plain_lightning(tmp_path, monkeypatch):
    (tmp_path / "plain_lit_digits.py").write_text(
        "import torch\n"
        "from lightning import LightningModule\n"
        "class LitDigits(LightningModule):\n"
        "    def __init__(self, width: int = 4):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters()\n"
        "        layers = torch.nn.Linear(64, width), torch.nn.Linear(width, 10)\n"
        "        self.net = torch.nn.Sequential(torch.nn.Flatten(), *layers)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])\n"
        "def trained(path: str) -> LitDigits:\n"
        "    return LitDigits.load_from_checkpoint(path, map_location='cpu')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("plain_lit_digits").LitDigits(width=7)
    trainer = lightning.Trainer(max_epochs=0, logger=False, accelerator="cpu")
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    path = str(tmp_path / "plain.ckpt")
    run = fit(
        tmp_path,
        *("--model", "FedAvg", "--model.net", "plain_lit_digits.trained", "--model.net.path", path),
        *("--model.optimizer.lr", "0", "--trainer.max_epochs", "1"),
    )
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in module.state_dict().items():
        assert torch.equal(saved[f"global_model.{name}"], tensor), "a rate of 0 moves nothing"


def test_print_config_is_yaml_with_all_sections(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *QUICKSTART, "--print_config"])
    assert stopped.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert {"model", "data", "federation", "trainer", "seed_everything"} <= set(config)
    assert config["federation"]["sampler"]["init_args"] == {"cohort_size": 10}


@pytest.mark.parametrize(
    ("arguments", "num_subcommands"), [(["fit", "--help", "all"], 1), (["--version"], 0)]
)
def test_only_the_called_subcommand_gets_the_sections(monkeypatch, arguments, num_subcommands):
    sections = []
    add_class_arguments = Parser.add_class_arguments

    def record_section(self, kind, section, *positional, **settings):
        sections.append(section)
        return add_class_arguments(self, kind, section, *positional, **settings)

    monkeypatch.setattr(SectionsCLI, "_shared_parsers", {})
    monkeypatch.setattr(Parser, "add_class_arguments", record_section)
    with contextlib.suppress(SystemExit):
        main(arguments)
    for section in ("trainer", "data", "federation"):
        assert sections.count(section) == num_subcommands


def test_help_is_readable(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help", "all"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for option in ("adversary.fraction", "adversary.attack", "engine.name", "storage.folder"):
        assert f"  --federation.{option} " in text
    for group in ("The Byzantine clients and", "Options of the engine", "Options for the clients"):
        assert f"\n{group}" in text
    assert "known subclasses: pl_fed.samplers.All" in text
    assert text.count("\n") < 1100, "hundreds of nn.Module classes must not be listed"
    words = " ".join(text.split())
    assert "--trainer.max_epochs MAX_EPOCHS Largest number of communication rounds" in words
    assert (
        "--ckpt_path CKPT_PATH The run that the command continues or evaluates: ``last``" in words
    )
    for option in LIGHTNING_OPTIONS:  # a renamed argument must change its text, too
        assert re.search(rf"  --{re.escape(option)}[ ,]", text), option
    assert "TensorBoardLogger`` if" not in words, "Lightning's text, which is untrue here"


def test_help_names_every_command(capsys):
    commands = ["fit", "validate", "test", "predict", "partition", "report", "export", "list"]
    for arguments in ([], *([command] for command in commands)):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--help"])
        text = capsys.readouterr().out
        assert stopped.value.code == 0
        assert text.startswith("usage: python -m pl_fed")
        assert arguments or all(command in text for command in commands)


def test_own_command_line_has_the_options_of_both_trainers():
    """Lightning's alone were refused: its trainer's arguments are passed on."""
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    names = {action.dest for action in parser._actions}
    options = ("federation", "run_dir", "accelerator", "devices", "max_epochs", "precision")
    assert {f"trainer.{name}" for name in options} <= names


PROGRAM = """
import gc, sys
sys.path.remove("")
from pl_fed.lazy_imports import quick_imports
with quick_imports():
    import pl_fed.command.main
known = {kind.__name__ for kind in gc.get_objects() if isinstance(kind, type)}
print(sorted(set(sys.argv[1].split()) - known))
del sys.argv[1]
import pl_fed.__main__
pl_fed.__main__.main()
"""


def test_console_script_knows_short_names_and_imports_from_the_current_folder(tmp_path):
    """In a process of its own, because other tests have imported the classes in this one."""
    (tmp_path / "mine_only.py").write_text(
        "from pl_fed.clients import FedAvg\n\n\nclass Mine(FedAvg):\n    'Mine: a copy.'\n"
    )
    names = "Yogi MLP Median RandomLabels Shards BySize FashionMNIST Ditto"
    arguments = ["fit", *QUICKSTART, *short(tmp_path), "--model", "mine_only.Mine"]
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, names, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[]"
    assert "mean over clients" in done.stdout
    (config,) = tmp_path.glob("*/config.yaml")
    assert "class_path: mine_only.Mine" in config.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"mine_only.py", config.parent.name}, (
        "a run writes under trainer.default_root_dir only"
    )
