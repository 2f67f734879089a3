"""The studies that come with pl_fed run, and loggers learn the labels of a cell."""

import os
from itertools import combinations, product
from pathlib import Path

import pytest
import yaml
from exhaustive import exhaustive_but
from made_data import write_mnist
from study_processes import run
from wandb_records import read_records

from pl_fed.studies.cells import expand
from pl_fed.studies.spec import read_spec_file
from pl_fed.studies.yaml_texts import load_study

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
TINY = {
    "trainer.max_epochs": 1,
    "trainer.check_val_every_n_epoch": 1,
    "data.num_clients": 6,
    "data.batch_size": 100,
    "federation.sampler.cohort_size": 3,
}


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_study_is_named_like_its_file(path):
    spec = read_spec_file(path)
    assert spec.name == path.stem
    assert path.read_text().startswith(f"# python -m pl_fed study configs/studies/{path.name}\n")
    assert len(expand(spec)) > 1


@pytest.mark.slow
@exhaustive_but("stragglers")
@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_study_runs(path, tmp_path):
    """One round of one seed: the first condition, and those that differ from it in one label.

    A tuned study has two labels of each axis.
    """
    study = load_study(path.read_text())
    study |= {"base": [*study["base"], TINY], "seeds": 1}
    study["axes"] = {name: keep_rounds(labels) for name, labels in study["axes"].items()}
    if "tune" in study:
        study["axes"] = {name: take_two(labels) for name, labels in study["axes"].items()}
        study["tune"] |= {"budget": 1, "seeds": 1}
    study["leave_out"] = [*study.get("leave_out", ()), *differ_in_two(study["axes"])]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    write_mnist(tmp_path, "FashionMNIST")  # random, 20 samples for each of 100 clients
    status, output = run(["study.yaml"], tmp_path, PL_FED_DATA=str(tmp_path))
    assert status == 0, output
    cells = expand(read_spec_file(tmp_path / "study.yaml"))
    assert output.splitlines()[-1].startswith(f"{len(cells)} done.")


def keep_rounds(labels):
    """Return the labels of an axis without their numbers of rounds."""
    if isinstance(labels, list):
        return labels
    return {
        label: {name: value for name, value in changes.items() if name != "trainer.max_epochs"}
        if isinstance(changes, dict)
        else changes
        for label, changes in labels.items()
    }


def take_two(labels):
    return labels[:2] if isinstance(labels, list) else dict([*labels.items()][:2])


def differ_in_two(axes):
    """Return the pairs of labels of two axes of which none is the first."""
    further = {name: [*labels][1:] for name, labels in axes.items()}
    return [
        {first: a, second: b}
        for first, second in combinations(axes, 2)
        for a, b in product(further[first], further[second])
    ]


@pytest.mark.slow
def test_loggers_learn_study_cell_and_labels(tmp_path):
    """For W&B a study is a group, a cell is a run, and labels are part of the config."""
    loggers = [
        {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"project": "p"}},
        {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": {"save_dir": "."},
        },
    ]
    study = {
        "name": "logged_study",
        "base": ["quickstart", TINY, {"trainer.logger": loggers}],
        "axes": {"condition": {"under test": {}, "other": {}}, "model.lam": [0.5]},
        "options": {"workers": 1, "folder": "study"},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    # an earlier test in this process may have left the address of W&B's service
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_SERVICE": ""}
    status, output = run(["study.yaml"], tmp_path, **environment)
    assert status == 0, output
    cells = sorted((tmp_path / "study").glob("condition=*/seed=0"))
    assert len(cells) == 2
    for cell, condition in zip(cells, ("other", "under test"), strict=True):
        labels = {"study": "logged_study", "condition": condition, "model.lam": "0.5"}
        records = read_records(cell)
        (logged_run,) = [record["run"] for record in records if record["type"] == "run"]
        assert logged_run["run_group"] == "logged_study"
        assert logged_run["display_name"] == f"condition={condition},model.lam=0.5,seed=0"
        assert labels.items() <= read_wandb_config(records).items()
        (hparams,) = cell.rglob("hparams.yaml")
        logged = yaml.safe_load(hparams.read_text())
        assert labels.items() <= logged.items()
        assert logged["seed_everything"] == 0
        events = [path.read_bytes() for path in cell.rglob("events.out.tfevents.*")]
        assert any(b"test/personal/accuracy" in content for content in events)
        assert os.path.getsize(cell / "log.txt")


def read_wandb_config(records):
    """Return the config of the records of a run."""
    config = {}
    for record in records:
        if record["type"] == "config":
            config |= record["config"]["update"]
    return config
