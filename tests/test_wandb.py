"""An offline run of Weights & Biases holds what ``metrics.csv`` holds, against ``round``."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from pl_fed.cli import main

ROOT = Path(__file__).parent.parent
LAYERS = [
    *("--config", str(ROOT / "configs" / "quickstart.yaml")),
    *("--config", str(ROOT / "configs" / "wandb.yaml")),
]


def short(folder, rounds):
    return [
        *("--trainer.default_root_dir", str(folder), "--trainer.max_epochs", str(rounds)),
        *("--trainer.check_val_every_n_epoch", "2", "--trainer.enable_progress_bar", "false"),
        *("--data.num_clients", "12"),
    ]


def records(run):
    """The records of all offline runs in a run's folder."""
    program = shutil.which("wandb", path=str(Path(sys.executable).parent)) or "wandb"
    found = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        text = subprocess.run(
            [program, "leet", "inspect", "--json", str(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found += [json.loads(line) for line in text.splitlines() if line.strip()]
    return found


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    arguments = ["--trainer.logger.name", "mine", "--trainer.logger.group", "all"]
    main(["fit", *LAYERS, *short(tmp_path, 4), *arguments])
    wandb.finish()
    (folder,) = [path.parent for path in tmp_path.glob("*/config.yaml")]
    return folder


def test_offline_run_equals_metrics_csv(run):
    history = {}
    for record in records(run):
        if record["type"] == "history":
            item = record["history"]["item"]
            history.setdefault(int(item["round"]), {}).update(item)
    with (run / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert sorted(history) == [int(row["round"]) for row in table] == [0, 1, 2, 3, 4]
    for row in table:
        logged = history[int(row["round"])]
        for name, text in row.items():
            if text:
                assert logged[name] == pytest.approx(float(text), rel=1e-6), name
    assert "val/personal/accuracy" in history[3]
    assert "test/per_client.path" in history[4]
    assert sum(history[4]["test/personal/client_accuracy.values"]) == 12


def test_round_is_the_axis_and_the_best_is_kept(run):
    metrics = [record["metric"] for record in records(run) if record["type"] == "metric"]
    last = [metric for metric in metrics if metric.get("glob_name") == "*"][-1]
    assert last["step_metric"] == "round"
    (accuracy,) = [m for m in metrics if m.get("name") == "val/personal/accuracy"]
    assert accuracy["step_metric"] == "round"
    assert accuracy["summary"]["max"]


def test_the_whole_config_is_logged(run):
    configs = [r["config"]["update"] for r in records(run) if r["type"] == "config"]
    merged = {key: value for config in configs for key, value in config.items()}
    assert merged["model"]["init_args"]["lam"] == 0.1
    assert merged["federation"]["sampler"]["init_args"]["cohort_size"] == 10
    (started,) = [r["run"] for r in records(run) if r["type"] == "run"]
    assert (started["project"], started["display_name"], started["run_group"]) == (
        "pl_fed",
        "mine",
        "all",
    )


def test_a_resumed_run_is_the_same_run(run, tmp_path):
    main(["fit", *LAYERS, *short(tmp_path, 6), "--ckpt_path", "last"])
    wandb.finish()
    starts = [record["run"]["run_id"] for record in records(run) if record["type"] == "run"]
    assert len(starts) == 2
    assert len(set(starts)) == 1
    rounds = [
        int(record["history"]["item"]["round"])
        for record in records(run)
        if record["type"] == "history"
    ]
    assert max(rounds) == 6
