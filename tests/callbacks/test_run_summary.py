"""The file ``summary.json``, and the function that reads a run."""

import csv
import json
import math
import re
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from small_federations import Given, Only, classes, mlp, sections, seeded, sgd

import pl_fed
from pl_fed import reports
from pl_fed.attacks import RandomLabels, SignFlipping
from pl_fed.callbacks.run_summary import read_history, summarize_attack, write_json
from pl_fed.callbacks.versions import read_commit
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import Arrays, FederatedData
from pl_fed.loggers import RunCSV
from pl_fed.rounds.broken_clients import NonFiniteLossError
from pl_fed.studies.cell_folder import iterate_numbers
from pl_fed.tasks import Regression

SIZES = [20, 30, 25, 15, 35]


def fit(folder, rounds=2, ckpt_path=None, lr=0.1, **options):
    """Train 5 clients of which 0 to 3 take part; return the trainer and the arguments of a test."""
    client = Ditto(seeded(mlp), optimizer=sgd(lr))
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Only(0, 1, 2, 3), seed=7, **sections(engine="one_by_one", **options)),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FederatedData(Given(classes(SIZES)), batch_size=5, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(client, data, ckpt_path=ckpt_path)
    return trainer, client, data


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def read(folder):
    text = (folder / "summary.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse_constant)


def last_row(folder, prefix):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(f"{prefix}/global/loss")]
    return {
        name.removeprefix(f"{prefix}/"): float(value)
        for name, value in rows[-1].items()
        if name.startswith(prefix) and value
    }


@pytest.mark.slow
def test_summary_of_a_fit_and_its_test(tmp_path):
    trainer, client, data = fit(tmp_path, attack=RandomLabels(), ids=[1])
    summary = read(tmp_path)
    assert summary["stage"] == "fit"
    assert summary["metrics"]["test"] == {}
    assert summary["metrics"]["val"] == {"round": 1, **last_row(tmp_path, "val")}
    trainer.test(client, data, verbose=False)
    summary = read(tmp_path)
    assert summary["stage"] == "test"
    assert summary["metrics"]["test"] == {"round": 2, **last_row(tmp_path, "test")}
    assert summary["metrics"]["val"] == {"round": 1, **last_row(tmp_path, "val")}
    assert summary["counts"] == {
        "rounds_without_step": 0,
        "clients": 5,
        "benign": 4,
        "byzantine": 1,
        "untrained": 1,
        "cohort": 4,
        "rounds": 2,
        "upload_bytes": 4 * (5 * 4 + 5 + 3 * 5 + 3),
        "download_bytes": 4 * (5 * 4 + 5 + 3 * 5 + 3),
        "bytes_up": 2 * 4 * 4 * (5 * 4 + 5 + 3 * 5 + 3),  # of two cohorts of four clients
        "bytes_down": 2 * 4 * 4 * (5 * 4 + 5 + 3 * 5 + 3),
        "uploads_forged": 0,
        "uploads_clipped": 0,
        "uploads_dropped": 0,
        "uploads_rejected": 0,
    }
    assert summary["seeds"]["data"] == 3
    assert summary["seeds"]["federation"] == 7
    assert summary["config"] == "python_config.yaml"
    assert summary["classes"]["client"] == "pl_fed.clients.Ditto"
    assert summary["classes"]["attack"] == "pl_fed.attacks.RandomLabels"
    assert summary["classes"]["aggregator"] is None
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["versions"]["pl_fed"] == pl_fed.__version__
    assert (summary["device"], summary["processes"]) == ("cpu", 1)
    seconds = summary["seconds"]
    assert 0 < seconds["start_up"] < seconds["total"]
    assert seconds["rounds"] == pytest.approx(2 * seconds["per_round"])
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
def test_resumed_run_counts_the_rounds_before(tmp_path):
    options = {"attack": SignFlipping(), "ids": [1, 2]}
    fit(tmp_path, **options)
    assert read(tmp_path)["counts"]["uploads_forged"] == 4
    fit(tmp_path, rounds=3, ckpt_path="last", **options)
    counts = read(tmp_path)["counts"]
    assert (counts["rounds"], counts["uploads_forged"]) == (3, 6)


@pytest.mark.slow
def test_fit_without_a_round_left_keeps_the_summary_of_the_test(tmp_path):
    trainer, client, data = fit(tmp_path)
    trainer.test(client, data, verbose=False)
    before, rows = read(tmp_path), (tmp_path / "metrics.csv").read_bytes()
    trainer, client, data = fit(tmp_path, ckpt_path="last")
    assert before["stage"] == "test"
    assert read(tmp_path) == before
    assert (tmp_path / "metrics.csv").read_bytes() == rows
    trainer.test(client, data, verbose=False)
    assert read(tmp_path)["metrics"] == before["metrics"]
    assert (tmp_path / "metrics.csv").read_bytes() == rows
    (tmp_path / "summary.json").unlink()
    fit(tmp_path, ckpt_path="last")
    assert read(tmp_path)["stage"] == "fit"


@pytest.mark.slow
def test_run_that_fails_has_no_summary_of_its_earlier_part(tmp_path):
    class Failing(SignFlipping):
        def forge(self, honest, own, context):
            if context.round == 2:
                raise OSError("disk")
            return super().forge(honest, own, context)

    fit(tmp_path, attack=Failing(), ids=[1])
    with pytest.raises(OSError, match="disk"):
        fit(tmp_path, rounds=3, ckpt_path="last", attack=Failing(), ids=[1])
    assert not (tmp_path / "summary.json").exists()


def test_undefined_numbers_are_null(tmp_path):
    write_json(tmp_path / "summary.json", {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": None}})
    assert read(tmp_path) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


@pytest.mark.slow
def test_metrics_that_are_nan_in_the_last_evaluation_are_null(tmp_path):
    """``metrics.csv`` lacks them, and an earlier value is not the present one."""
    trainer, client, data = fit(tmp_path)
    assert read(tmp_path)["metrics"]["val"]["global/loss"] > 0
    with torch.no_grad():
        for parameter in client.global_model.parameters():
            parameter.fill_(math.nan)
    trainer.test(client, data)
    test = read(tmp_path)["metrics"]["test"]
    assert test["global/loss"] is None
    assert test["personal/loss"] > 0
    row = dict(iterate_numbers({"test": test}, reads_undefined=True))
    assert math.isnan(row["test/global/loss"])
    assert "test/global/loss" not in dict(iterate_numbers({"test": test}))


@pytest.mark.slow
def test_variance_that_is_too_large_for_float32(tmp_path):
    """Targets of 2^61 and 2^62 and a net of zeros have losses of 2^122 and 2^124."""
    owner = torch.tensor([0, 0, 0, 1, 1, 1])
    targets = 2.0 ** (61 + owner[:, None])
    split = torch.tensor([0, 1, 2] * 2)
    data = FederatedData(Given(Arrays(torch.zeros(6, 1), targets, owner, split)), batch_size=1)
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    federation = pl_fed.Federation(seed=0, **sections(engine="one_by_one"))
    trainer = pl_fed.Trainer(
        federation, run_dir=tmp_path, max_epochs=1, accelerator="cpu", enable_progress_bar=False
    )
    client = FedAvg(net, task=Regression(), optimizer=sgd(0.0))
    trainer.fit(client, data)
    trainer.test(client, data)
    spread = (2.0**124 - 2.0**122) / 2
    for name, value in {"loss_std": spread, "loss_var": spread**2}.items():
        assert trainer.callback_metrics[f"test/global/{name}"].item() == value
        assert last_row(tmp_path, "test")[f"global/{name}"] == pytest.approx(value, rel=1e-8)
        assert read(tmp_path)["metrics"]["test"][f"global/{name}"] == pytest.approx(value, rel=1e-8)


@pytest.mark.slow
def test_dry_run_writes_no_summary(tmp_path):
    client = Ditto(mlp(), optimizer=sgd())
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Only(0)), run_dir=tmp_path, fast_dev_run=True, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(client, FederatedData(Given(classes(SIZES)), batch_size=5, seed=3))
    assert not (tmp_path / "summary.json").exists()


def test_history_of_a_run_without_rounds_is_empty(tmp_path):
    assert read_history(tmp_path / "metrics.csv") == {
        "test": {},
        "val": {},
        "uploads": {},
        "attack": {},
        "backdoor": {},
        "seconds": [],
        "timed": [],
        "small_cohorts": 0,
    }


@pytest.mark.slow
def test_sums_over_all_rounds_are_null_without_the_rows_of_all_rounds(tmp_path):
    options = {"adversary": pl_fed.Adversary(SignFlipping(), 0.2)}
    first, *_ = fit(tmp_path / "first", rounds=1, **options)
    checkpoint = first.run_dir / "checkpoints" / "last.ckpt"
    whole = read(tmp_path / "first")
    fit(tmp_path / "new", rounds=2, ckpt_path=checkpoint, **options)
    part = read(tmp_path / "new")
    names = ("rounds_without_step", *(f"uploads_{name}" for name in ("forged", "rejected")))
    assert part["counts"]["rounds"] == 2
    assert [part["counts"][name] for name in names] == [None] * 3
    assert [whole["counts"][name] is None for name in names] == [False] * 3
    assert part["seconds"]["rounds"] is None
    assert whole["attack"]
    assert not part["attack"]


def test_attack_is_measured_over_all_rounds(tmp_path):
    names = ("attackers", "flagged", "flagged_attackers", "attack_distance", "attack_cosine")
    head = ",".join(["round", *(f"train/{name}" for name in names)])
    rows = ("0,,,,,", "1,2,4,1,3,0.5", "2,2,0,0,inf,", "3,1,1,1,5,-0.5")
    (tmp_path / "metrics.csv").write_text("\n".join([head, *rows, ""]))
    history = read_history(tmp_path / "metrics.csv")
    assert summarize_attack(history["attack"]) == {
        "detection_precision": 2 / 5,
        "detection_recall": 2 / 5,
        "attack_distance": 4,
        "attack_cosine": 0,
    }
    assert summarize_attack({"attackers": [2], "flagged": [0]}) == {"detection_recall": 0}
    assert summarize_attack({}) == {}


def test_success_of_a_validation_behind_the_fit_is_that_of_its_last_round(tmp_path):
    """The row of round 3, without a time, is a validation of the last model."""
    rows = ["0,1,0.5", "1,1,", "2,1,0.75", "3,,0.75", "1,,0.5"]

    def read_success():
        text = "\n".join(["round,time/round,val/global/backdoor_success", *rows, ""])
        (tmp_path / "metrics.csv").write_text(text)
        return read_history(tmp_path / "metrics.csv")["backdoor"]["global"]

    assert read_success() == {0: 0.5, 2: 0.75}
    rows[1:] = ["1,1,", "1,,0.5", "2,,0.75"]
    assert read_success() == {0: 0.5, 1: 0.75}, "model 0 is known, and model 1 is not"
    rows[:] = ["0,,0.5", "1,1,0.25", "2,,0.75"]
    assert read_success() == {0: 0.5, 1: 0.25, 2: 0.75}, "every second round is logged"


def test_rounds_without_a_step_are_counted(tmp_path):
    content = "round,train/cohort,train/small_cohort\n0,2,1\n1,8,\n2,0,1\n"
    (tmp_path / "metrics.csv").write_text(content)
    assert read_history(tmp_path / "metrics.csv")["small_cohorts"] == 2


def git(folder, *arguments):
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
def test_commit_of_a_checkout(tmp_path):
    assert read_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "First")
    git(tmp_path, "tag", "v1")
    read_commit.cache_clear()
    clean = read_commit(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    assert read_commit(tmp_path) is clean, "git runs once in a process"
    read_commit.cache_clear()
    (tmp_path / "code.py").write_text("2")
    assert read_commit(tmp_path) == {"commit": clean["commit"], "dirty": True}
    read_commit.cache_clear()


@pytest.mark.slow
def test_readme_of_reports_names_all_files_columns_and_keys(tmp_path):
    text = (Path(reports.__file__).parent / "README.md").read_text(encoding="utf-8")
    trainer, client, data = fit(tmp_path, attack=RandomLabels(), ids=[1])
    trainer.test(client, data, verbose=False)
    summary = read(tmp_path)
    names = {*summary, *summary["counts"], *summary["seconds"], *summary["seeds"]}
    for path in tmp_path.glob("*.csv"):
        header = path.read_text().splitlines()[0].split(",")
        columns = [name.rpartition("/")[2] for name in header]
        names |= {re.sub(r"^(global|personal|hybrid)", "", name) for name in columns}
    names |= {path.name for path in tmp_path.iterdir()}
    assert {name for name in names if name not in text} == set()


# pl_fed.read_run


@pytest.mark.slow
def test_run_is_read_as_arrays(tmp_path):
    trainer, client, data = fit(tmp_path)
    trainer.test(client, data, verbose=False)
    run = pl_fed.read_run(str(tmp_path))
    assert run.config["model"]["class_path"] == "pl_fed.clients.Ditto"
    assert run.metrics["round"].tolist() == [0, 1, 2]
    losses = run.metrics["test/global/loss"]
    assert np.isnan(losses).tolist() == [True, True, False]
    clients = run.clients["global_loss"]
    assert losses[2] == pytest.approx(clients.mean(), rel=1e-6)
    assert run.clients["owner"].tolist() == ["0", "1", "2", "3", "4"]
    assert run.clients["rounds"].tolist() == [2, 2, 2, 2, 0]
    assert set(run.classes["class"]) <= {0, 1, 2}
    assert run.summary["metrics"]["test"]["global/loss"] == losses[2]
    for name in ("metrics.csv", "per_client.csv", "per_class.csv"):  # saved by a spreadsheet
        text = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    saved = pl_fed.read_run(tmp_path)
    for table in ("metrics", "clients", "classes"):
        np.testing.assert_equal(getattr(saved, table), getattr(run, table))
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"summary\.json to hold a JSON object but got none"):
        pl_fed.read_run(tmp_path)


@pytest.mark.slow
def test_a_finished_run_that_goes_on_is_unfinished_before_its_test_is_removed(
    tmp_path, monkeypatch
):
    """Otherwise a kill between the two would leave a finished run without results of its test."""
    trainer, client, data = fit(tmp_path)
    trainer.test(client, data, verbose=False)
    keep, stages = RunCSV.keep, []

    def keep_and_look(logger, rounds=None, warns=False):
        stages.append((tmp_path / "summary.json").exists())
        keep(logger, rounds, warns)

    monkeypatch.setattr(RunCSV, "keep", keep_and_look)
    fit(tmp_path, rounds=3, ckpt_path="last")
    assert stages == [False]


@pytest.mark.slow
def test_run_without_a_test_has_no_clients(tmp_path):
    fit(tmp_path)
    (tmp_path / "summary.json").unlink()
    run = pl_fed.read_run(tmp_path)
    assert (run.clients, run.classes, list(run.summary)) == ({}, {}, ["metrics"])
    assert run.summary["metrics"]["val"]["global/loss"] == run.metrics["val/global/loss"][-1]


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`folder` to be a run's folder, .* but got"):
        pl_fed.read_run(tmp_path)


@pytest.mark.slow
def test_summary_of_a_fit_that_diverges_says_so(tmp_path):
    with pytest.raises(NonFiniteLossError):
        fit(tmp_path, lr=1e30)
    summary = read(tmp_path)
    assert summary["stage"] == "fit"
    assert summary["diverged"].startswith("Expected finite losses but in round")
    fit(tmp_path)
    assert read(tmp_path)["diverged"] is None
