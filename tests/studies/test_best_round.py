"""The best round: every cell tests the models of the round that one validation metric chooses."""

import csv
import json
from dataclasses import asdict

import pytest
import torch
import yaml
from study_processes import run
from tables import table_test

from pl_fed.studies.best_round import BestRound, read_best_round
from pl_fed.studies.cell_folder import OTHER_ROUND, CellRecord, State, write_text
from pl_fed.studies.inspection import check_configs, read_states
from pl_fed.studies.readers import StudyError
from pl_fed.studies.study import Study

STUDY = {
    "name": "best",
    "base": [
        "quickstart",
        {
            "trainer.max_epochs": 8,
            "trainer.logger": False,
            "trainer.check_val_every_n_epoch": 2,
            "data.num_clients": 6,
            "data.batch_size": 100,
            "federation.sampler.cohort_size": 3,
            "model.optimizer.lr": 2.0,  # noisy, so that the last round is not the best
        },
    ],
    "axes": {"algorithm": ["Ditto", "FedAvg"]},
    "seeds": 1,
    "options": {"folder": "study", "workers": 2, "best": "val/personal/accuracy_worst10"},
}


@table_test(
    "value, expected",
    [
        (None, None),
        ("val/global/loss", BestRound("val/global/loss", "min")),
        ("val/personal/accuracy_worst10", BestRound("val/personal/accuracy_worst10", "max")),
        ("val/personal/accuracy_std", BestRound("val/personal/accuracy_std", "min")),
        (
            {"metric": "val/global/skill", "mode": "max"},
            BestRound("val/global/skill", "max"),
        ),
    ],
)
def test_choices(value, expected):
    assert read_best_round("options.best", value) == expected


@table_test(
    "value, match",
    [
        ("test/global/accuracy", "`options.best` to be a metric of the validation"),
        (
            "val/global/skill",
            "metric with a known direction but got val/global/skill: write {metric",
        ),
        ({"metric": "val/global/loss", "mode": "low"}, "`options.best.mode` to be max or min"),
        ({"monitor": "val/global/loss"}, "to have only the keys metric, mode"),
    ],
)
def test_wrong_choices_are_one_sentence(value, match):
    with pytest.raises(StudyError, match=match):
        read_best_round("options.best", value)


def test_finished_cell_of_another_round_is_changed(tmp_path):
    """Its config is the same, so that the comparison of configs alone would accept it."""
    content = {**STUDY, "options": {"folder": str(tmp_path)}}
    last = Study(**content)
    for cell in last.cells:
        record = CellRecord("best", cell.name, dict(cell.values), cell.seed, cell.digest)
        write_text(tmp_path / cell.path / "cell.json", json.dumps(asdict(record)))
        write_text(tmp_path / cell.path / "summary.json", '{"stage": "test"}')
    assert {status.state for status in read_states(tmp_path, last.cells)} == {State.DONE}
    best = Study(**{**content, "options": {**content["options"], **STUDY["options"]}})
    statuses = read_states(tmp_path, best.cells)
    assert {status.state for status in statuses} == {State.CHANGED}

    class Pool:
        def map(self, jobs):
            from pl_fed.studies.jobs import CheckOutcome

            return [(job, CheckOutcome()) for job in jobs]

    checked = check_configs(tmp_path, statuses, Pool())
    assert {(status.state, status.reason) for status in checked} == {(State.CHANGED, OTHER_ROUND)}


@pytest.mark.slow
def test_every_cell_tests_its_best_round(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    status, output = run(["study.yaml"], tmp_path)
    assert status == 0, output
    rounds = []
    for algorithm, model in (("Ditto", "personal"), ("FedAvg", "global")):
        folder = tmp_path / "study" / f"algorithm={algorithm}" / "seed=0"
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        scores = {
            int(row["round"]): float(row[f"val/{model}/accuracy_worst10"])
            for row in rows
            if row[f"val/{model}/accuracy_worst10"]
        }
        best = max(scores, key=scores.get)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["metrics"]["test"]["round"] == best + 1
        assert summary["counts"]["rounds"] in (best + 1, 8)
        rounds.append(best + 1)
        assert json.loads((folder / "cell.json").read_text())["best"] == [
            *("val/personal/accuracy_worst10", "max")
        ]
    assert min(rounds) < 8, "the last round is not always the best"


@pytest.mark.slow
def test_last_checkpoint_knows_the_score_of_its_own_round(tmp_path):
    """Otherwise a resumed run would take a later, worse round for the best one."""
    base = [*STUDY["base"], {"trainer.max_epochs": 3, "model.optimizer.lr": 0.05}]
    base.append({"trainer.check_val_every_n_epoch": 1, "data.batch_size": 10})
    options = {**STUDY["options"], "best": "val/global/loss", "keep_checkpoints": True}
    content = {"base": base, "options": options, "axes": {"algorithm": ["FedAvg"]}, "seeds": 1}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**STUDY, **content}))
    status, output = run(["study.yaml"], tmp_path)
    assert status == 0, output
    folder = tmp_path / "study" / "algorithm=FedAvg" / "seed=0"
    with (folder / "metrics.csv").open(newline="") as file:
        losses = [float(row["val/global/loss"] or "nan") for row in csv.DictReader(file)][:3]
    assert min(losses) == losses[2], "the last round is the best"
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    scores = [state.get("best_model_score") for state in checkpoint["callbacks"].values()]
    assert [float(score) for score in scores if score is not None] == pytest.approx(losses[2:])


@pytest.mark.slow
def test_study_without_a_validation_is_told(tmp_path):
    base = [*STUDY["base"], {"trainer.check_val_every_n_epoch": 50, "trainer.max_epochs": 2}]
    axes = {"algorithm": ["FedAvg"]}
    content = {**STUDY, "base": base, "axes": axes, "seeds": 1}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    status, output = run(["study.yaml"], tmp_path)
    assert status == 1
    assert "Expected argument `options.best` to be a metric of a validation but got" in output
