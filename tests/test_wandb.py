"""An offline run of Weights & Biases holds the numbers of ``metrics.csv`` by ``round``."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import wandb
import yaml
from forked_processes import ForkedCommand
from jsonargparse import Namespace
from PIL import Image
from wandb_records import read_records

from pl_fed.callbacks.wandb_report import WandbReport
from pl_fed.command.main import main
from pl_fed.command.run_files import place_logger
from pl_fed.reports.configs import group_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
MODELS = ("global", "personal", "hybrid")
LAYERS = [
    *("--config", str(ROOT / "configs" / "quickstart.yaml")),
    *("--config", str(ROOT / "configs" / "wandb.yaml")),
    *("--config", str(ROOT / "configs" / "label_poisoning.yaml")),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Let W&B write offline runs, as the command line does by default."""
    monkeypatch.delenv("WANDB_MODE", raising=False)


def short(folder, rounds):
    return [
        *("--trainer.default_root_dir", str(folder), "--trainer.max_epochs", str(rounds)),
        *("--trainer.check_val_every_n_epoch", "2", "--trainer.enable_progress_bar", "false"),
        *("--data.num_clients", "12", "--data.batch_size", "50"),
        *("--federation.engine.name", "one_by_one"),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of four rounds; no test changes it."""
    root = tmp_path_factory.mktemp("run")
    arguments = ["--trainer.logger.name", "mine", "--trainer.logger.group", "all"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        patch.delenv("WANDB_API_KEY", raising=False)
        main(["fit", *LAYERS, *short(root, 4), *arguments])
        wandb.finish()
    (folder,) = [path.parent for path in root.glob("*/config.yaml")]
    return folder


@pytest.fixture
def without_pictures(monkeypatch):
    """Let runs end without their pictures, which take half of the time of a short run."""
    monkeypatch.setattr(WandbReport, "on_test_end", lambda *_: None)


@pytest.fixture(scope="module")
def run_records(run):
    """The records of that run."""
    return read_records(run)


def test_offline_run_equals_metrics_csv(run, run_records):
    history = {}
    for record in run_records:
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
    for name in ("test/personal/client_accuracy", "val/personal/client_accuracy"):
        last = history[4 if name.startswith("test") else 3]
        assert sum(last[f"{name}.values"]) == 10, "two of twelve clients are Byzantine"
    assert "test/per_class.path" in history[4]
    (file,) = run.glob(f"wandb/offline-run-*/files/{history[4]['test/per_client.path']}")
    table = json.loads(file.read_text())
    assert {"byzantine", "personal_accuracy"} <= {*table["columns"]}
    assert all(isinstance(cell, int | float) for row in table["data"] for cell in row)
    pictures = {name.split(".")[0] for name in history[4] if name.startswith("report/")}
    kinds = [f"{k}_{m}" for k in ("curves", "clients", "classes") for m in MODELS]
    assert pictures == {f"report/{name}" for name in [*kinds, "train_loss", "time"]}
    for name in pictures:
        (picture,) = run.glob(f"wandb/offline-run-*/files/{history[4][f'{name}.path']}")
        assert min(Image.open(picture).size) > 150


def test_round_is_the_axis_and_the_summary_keeps_the_best(run_records):
    metrics = [record["metric"] for record in run_records if record["type"] == "metric"]
    last = [metric for metric in metrics if metric.get("glob_name") == "*"][-1]
    assert last["step_metric"] == "round"
    (accuracy,) = [m for m in metrics if m.get("name") == "val/personal/accuracy"]
    assert accuracy["step_metric"] == "round"
    assert accuracy["summary"]["max"]


def test_fit_continues_if_a_picture_cannot_be_drawn(tmp_path, monkeypatch):
    def fails(groups):
        raise RuntimeError("a table of another kind")

    monkeypatch.setattr("pl_fed.reports.clients.draw_distributions", fails)
    with pytest.warns(UserWarning, match="could not be drawn: RuntimeError.'a table of"):
        main(["fit", *LAYERS, *short(tmp_path, 1)])
    wandb.finish()
    (folder,) = [path.parent for path in tmp_path.glob("*/config.yaml")]
    assert (folder / "per_client.csv").is_file()


def test_every_base_config_logs_to_wandb():
    configs = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")]
    loggers = [
        c["trainer"]["logger"] for c in configs if "default_root_dir" in c.get("trainer", {})
    ]
    assert len(loggers) > 10
    assert {logger["class_path"] for logger in loggers} == {"lightning.pytorch.loggers.WandbLogger"}


@pytest.mark.usefixtures("without_pictures")
def test_quickstart_logs_offline_without_a_line_and_a_refused_fit_leaves_no_folder(tmp_path, capfd):
    quickstart = ["fit", "--config", "quickstart", *short(tmp_path / "fit", 1)]
    main(quickstart)
    assert "wandb" not in capfd.readouterr().err
    assert wandb.run is None, "the run is finished"
    (folder,) = (tmp_path / "fit").iterdir()
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    refused = [*short(tmp_path / "refused", 1), "--federation.sampler.cohort_size", "50"]
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", *refused])
    assert not list((tmp_path / "refused").iterdir())
    without = ["--trainer.logger", "false", *short(tmp_path / "without", 1)]
    main(["fit", "--config", "quickstart", *without])
    (folder,) = (tmp_path / "without").iterdir()
    assert not (folder / "wandb").exists()
    assert (folder / "metrics.csv").is_file()


def test_complete_config_is_logged(run_records):
    configs = [r["config"]["update"] for r in run_records if r["type"] == "config"]
    merged = {key: value for config in configs for key, value in config.items()}
    assert merged["model"]["init_args"]["lam"] == 0.1
    assert merged["federation"]["sampler"]["init_args"]["cohort_size"] == 10
    (started,) = [r["run"] for r in run_records if r["type"] == "run"]
    assert (started["project"], started["display_name"], started["run_group"]) == (
        "pl_fed",
        "mine",
        "all",
    )


def group_of(run):
    (started,) = [record["run"] for record in read_records(run) if record["type"] == "run"]
    return started.get("run_group")


@pytest.mark.usefixtures("without_pictures")
def test_runs_that_differ_only_in_the_seed_share_a_group(tmp_path):
    groups = {}
    for name, changes in {
        "first": ["--trainer.enable_model_summary", "false"],
        "second": ["--seed_everything", "5", "--data.seed", "3"],
        "other": ["--model.lam", "0.7"],
    }.items():
        main(["fit", *LAYERS, *short(tmp_path / name, 1), "--data.batch_size", "50", *changes])
        wandb.finish()
        (folder,) = [path.parent for path in (tmp_path / name).glob("*/config.yaml")]
        groups[name] = group_of(folder)
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        assert groups[name] == group_name(saved), "as a report would name it"
    assert groups["first"] == groups["second"] != groups["other"]
    assert groups["first"].startswith("Ditto-")


def test_group_of_the_user_takes_precedence(tmp_path, monkeypatch):
    config = Namespace(
        class_path="lightning.pytorch.loggers.WandbLogger",
        init_args=Namespace(group="mine", id=None, save_dir="."),
    )
    place_logger(config, tmp_path, "Ditto-0")
    assert config.init_args.group == "mine"
    config.init_args.group = None
    monkeypatch.setenv("WANDB_RUN_GROUP", "of the environment")
    place_logger(config, tmp_path, "Ditto-0")
    assert config.init_args.group is None, "W&B reads it from the environment"


@pytest.mark.parametrize("saved", [b"", b"\xff", b"a/b", b"12ab\n"])
def test_damaged_id_of_a_run_is_replaced(tmp_path, saved):
    """A kill or a full disk may leave an empty file; W&B ended each resume with a traceback."""
    (tmp_path / "wandb_run_id").write_bytes(saved)
    ids = []
    for _ in range(2):
        config = Namespace(
            class_path="lightning.pytorch.loggers.WandbLogger",
            init_args=Namespace(group="mine", id=None, save_dir="."),
        )
        place_logger(config, tmp_path)
        ids.append(config.init_args.id)
    assert ids[0] == ids[1]
    assert ids[0] == "12ab" or (len(ids[0]) == 8 and saved != b"12ab\n")


def test_sweep_sets_the_ids_of_its_runs(tmp_path, monkeypatch):
    """In a new process, as the agent starts it, because wandb reads its environment once."""
    variables = {"WANDB_SWEEP_ID": "abcd", "WANDB_RUN_ID": "of-the-agent", "WANDB_MODE": "offline"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = ForkedCommand(["fit", *LAYERS, *short(tmp_path, 1)], ROOT)
    output = command.communicate(timeout=100)[0]
    assert command.returncode == 0, output
    (folder,) = [path.parent for path in tmp_path.glob("*/config.yaml")]
    (started,) = [r["run"] for r in read_records(folder) if r["type"] == "run"]
    assert started["run_id"] == "of-the-agent"
    assert not (folder / "wandb_run_id").exists()


@pytest.fixture
def run_copy(run, tmp_path):
    """A copy of that run, to resume and to test."""
    return shutil.copytree(run, tmp_path / run.name)


@pytest.mark.usefixtures("without_pictures")
def test_resumed_run_is_the_same_run(run_copy, tmp_path):
    main(["fit", *LAYERS, *short(tmp_path, 6), "--ckpt_path", "last"])
    wandb.finish()
    logged = read_records(run_copy)
    starts = [record["run"]["run_id"] for record in logged if record["type"] == "run"]
    assert len(starts) == 2
    assert len(set(starts)) == 1
    rounds = [
        int(record["history"]["item"]["round"]) for record in logged if record["type"] == "history"
    ]
    assert max(rounds) == 6


def test_results_of_a_tested_checkpoint_follow_its_rounds(run_copy, tmp_path):
    main(["test", *LAYERS, *short(tmp_path, 4), "--ckpt_path", "last"])
    wandb.finish()
    (tested,) = [path.parent for path in tmp_path.glob("*/metrics.csv") if path.parent != run_copy]
    logged = [r["history"]["item"] for r in read_records(tested) if r["type"] == "history"]
    assert any(name.startswith("test/per_client") for item in logged for name in item)
    assert {int(item["round"]) for item in logged} == {4}
