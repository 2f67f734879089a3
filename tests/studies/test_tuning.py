"""Tuning: equal budgets, proposals that repeat, and the best trial of each label."""

import csv
import json
import math
from dataclasses import asdict, replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from study_processes import run
from tables import table_test

from pl_fed.studies import command, tuning
from pl_fed.studies.cell_folder import CellFolder, CellRecord, State, write_text
from pl_fed.studies.plans import Choices, Interval
from pl_fed.studies.readers import StudyError
from pl_fed.studies.search import GENERATION, is_at_edge, propose
from pl_fed.studies.spec import read_spec
from pl_fed.studies.study import Study
from pl_fed.studies.trials import FIRST_SEED
from pl_fed.studies.tuning import TABLE, Tuner
from pl_fed.text import read_csv

pytest.importorskip("optuna", reason="`tune` of a study uses it")

LR = [0.001, 1.0, "log"]
PLAN = {
    "per": "algorithm",
    "on": {"attack": "none"},
    "budget": 12,
    "space": {"Ditto": {"model.lam": [0.01, 10, "log"]}, "all": {"model.optimizer.lr": LR}},
    "metric": "val/personal/accuracy",
    "seeds": 2,
}
STUDY = {
    "name": "tuned",
    "base": ["quickstart"],
    "axes": {
        "algorithm": ["Ditto", "FedAvg"],
        "attack": {"none": {}, "labels": ["label_poisoning"]},
    },
    "seeds": 2,
}


def spec_of(folder, **changes):
    plan = {**PLAN, **changes}
    return read_spec({**STUDY, "tune": plan, "options": {"folder": str(folder)}})


def score_by_distance(values, seed):
    """A score with its best at lr = 0.1 and λ = 1, and a little less for odd seeds."""
    distance = abs(math.log10(values["model.optimizer.lr"]) + 1)
    distance += abs(math.log10(values.get("model.lam", 1)))
    return 1 - distance / 10 - 0.001 * (seed % 2)


class Runs:
    """Pretends to run cells: writes the files of finished runs, and counts them."""

    def __init__(self, monkeypatch, score=score_by_distance):
        self.score = score
        self.ran = []
        self.stops_after = math.inf
        monkeypatch.setattr(tuning, "Execution", self.build)
        monkeypatch.setattr(tuning, "check_configs", lambda root, statuses, pool: statuses)

    def build(self, study, root, statuses, keep_checkpoints, report):
        self.study, self.root, self.statuses, self.report = study, root, statuses, report
        return self

    def run(self, pool):
        for status in self.statuses:
            if len(self.ran) >= self.stops_after:
                raise KeyboardInterrupt
            self.run_cell(status.cell)

    def run_cell(self, cell):
        self.ran.append(cell.name)
        folder = CellFolder(self.root, cell.path)
        labels, is_tested = dict(cell.values), cell.is_tested
        record = CellRecord(self.study, cell.name, labels, cell.seed, cell.digest, tested=is_tested)
        score = self.score(cell.change.overrides, cell.seed)
        if isinstance(score, str):
            record = replace(record, error=score)
        write_text(folder.path / "cell.json", json.dumps(asdict(record)))
        if isinstance(score, str):
            return
        model = "global" if cell.values["algorithm"] == "FedAvg" else "personal"
        summary = {
            "stage": "fit",
            "metrics": {"val": {"round": 3, f"{model}/accuracy": score}},
            "higher_is_better": {"accuracy": True},
        }
        if score == -math.inf:
            summary = {"stage": "fit", "diverged": "in round 1", "metrics": {}}
        write_text(folder.path / "summary.json", json.dumps(summary))


class NoPool:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def tune(spec, labels=("Ditto", "FedAvg")):
    tuner = Tuner(spec)
    tuner.run(NoPool, labels, lambda event: None)
    return tuner


def test_each_label_has_the_same_budget_on_seeds_of_its_own(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    tuner = tune(spec_of(tmp_path))
    assert len(runs.ran) == len(set(runs.ran)) == 2 * 12 * 2 == tuner.count_runs(tuner.labels)
    for label, paths in (
        ("Ditto", {"model.lam", "model.optimizer.lr"}),
        ("FedAvg", {"model.optimizer.lr"}),
    ):
        trials = [item.trial for item in tuner.trials[label]]
        assert [trial.number for trial in trials] == [*range(12)]
        assert all(trial.values.keys() == paths for trial in trials)
        seeds = {cell.seed for trial in trials for cell in trial.cells}
        assert seeds == {FIRST_SEED, FIRST_SEED + 1}
        assert {c.values["attack"] for trial in trials for c in trial.cells} == {"none"}


@pytest.mark.slow
def test_best_mean_score_is_chosen_and_final_cells_have_its_values(tmp_path, monkeypatch):
    Runs(monkeypatch)
    spec = spec_of(tmp_path)
    tuner = tune(spec)
    for label, values in tuner.chosen().items():
        scores = [score_by_distance(item.trial.values, 0) for item in tuner.trials[label]]
        assert score_by_distance(values, 0) == max(scores)
        assert tuner.best(label).score == pytest.approx(max(scores) - 0.0005)
    study = Study.from_spec(spec)
    assert len(study.cells) == 8
    for cell in study.cells:
        values = tuner.chosen()[cell.values["algorithm"]]
        assert cell.change.overrides.items() >= values.items()
        assert cell.seed < FIRST_SEED


@pytest.mark.parametrize("stop", [1, 9, 25, 47])
@pytest.mark.slow
def test_interrupted_tuning_goes_on_to_the_same_table(tmp_path, monkeypatch, stop):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Runs(monkeypatch)
    tune(spec_of(whole))
    runs = Runs(monkeypatch)
    runs.stops_after = stop
    with pytest.raises(KeyboardInterrupt):
        tune(spec_of(parts))
    tuner = Tuner(spec_of(parts))
    tuner.read()
    assert tuner.chosen() == {"Ditto": {}, "FedAvg": {}} or stop == 47
    runs.stops_after = math.inf
    tune(spec_of(parts))
    assert len(runs.ran) == 48, "nothing is run twice"
    assert (parts / TABLE).read_bytes() == (whole / TABLE).read_bytes()


@pytest.mark.slow
def test_labels_can_be_tuned_one_after_the_other(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    first = tune(spec_of(tmp_path), ["Ditto"])
    assert len(runs.ran) == 24
    assert first.chosen()["FedAvg"] == {}
    second = tune(spec_of(tmp_path))
    assert len(runs.ran) == 48
    assert second.chosen()["Ditto"] == first.chosen()["Ditto"]


@pytest.mark.slow
def test_dry_run_tells_of_the_runs_of_the_tuning(tmp_path, monkeypatch, capsys):
    """It counted the cells alone, though the tuning takes more runs than they do."""
    Runs(monkeypatch)
    monkeypatch.setattr(command, "needs_check", lambda statuses: False)
    spec = spec_of(tmp_path)
    for labels, only, last in (
        ([], [], "The tuning comes first, with 48 further runs."),
        (["Ditto"], [], "The tuning comes first, with 24 further runs."),
        ([], ["algorithm=Ditto"], "4 cells, 4 of them to run: the time is unknown until "),
    ):
        if labels:
            tune(spec, labels)
        command._show_plan(Study.from_spec(spec), only, 1)
        assert capsys.readouterr().out.splitlines()[-1].startswith(last)


@pytest.mark.slow
def test_tpe_learns_from_scores(tmp_path, monkeypatch):
    """Later trials are nearer to the best values than random ones."""
    Runs(monkeypatch)
    means = {}
    for sampler in ("tpe", "random"):
        tuner = tune(spec_of(tmp_path / sampler, sampler=sampler, budget=40, seeds=1))
        scores = [item.score for item in tuner.trials["Ditto"]]
        means[sampler] = sum(scores[20:]) / 20
    assert means["tpe"] > means["random"] + 0.05


@pytest.mark.slow
def test_failed_and_diverged_trials_are_never_chosen(tmp_path, monkeypatch):
    def score(values, seed):
        rate = values["model.optimizer.lr"]
        if rate > 0.1:
            return -math.inf
        return "OSError: no data" if rate > 0.03 else rate

    Runs(monkeypatch, score)
    tuner = tune(spec_of(tmp_path, sampler="random"))
    states = {item.state for item in tuner.trials["FedAvg"]}
    assert states == {State.DONE, State.DIVERGED, State.FAILED}
    for label, values in tuner.chosen().items():
        rates = [item.trial.values["model.optimizer.lr"] for item in tuner.trials[label]]
        assert values["model.optimizer.lr"] == max(rate for rate in rates if rate <= 0.03)
    with (tmp_path / TABLE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["is_chosen"] for row in rows].count("1") == 2
    assert {row["status"] for row in rows} == {"done", "diverged", "failed"}


@pytest.mark.slow
def test_label_whose_trials_all_fail_is_an_error(tmp_path, monkeypatch):
    Runs(monkeypatch, lambda values, seed: "OSError: no data")
    with pytest.raises(StudyError, match=r"a trial of algorithm=\w+ that ends but all 12 failed"):
        tune(spec_of(tmp_path))


@pytest.mark.slow
def test_smaller_is_better_for_a_loss(tmp_path, monkeypatch):
    class Losses(Runs):
        def run_cell(self, cell):
            super().run_cell(cell)
            path = CellFolder(self.root, cell.path).path / "summary.json"
            summary = json.loads(path.read_text())
            score = score_by_distance(cell.change.overrides, cell.seed)
            metrics = summary["metrics"]["val"]
            model = "personal" if "personal/accuracy" in metrics else "global"
            metrics[f"{model}/loss"] = -score
            path.write_text(json.dumps(summary))

    Losses(monkeypatch)
    by_accuracy = tune(spec_of(tmp_path / "accuracy"))
    by_loss = tune(spec_of(tmp_path / "loss", metric="val/personal/loss"))
    for label in ("Ditto", "FedAvg"):
        assert by_accuracy.best(label).score == pytest.approx(-by_loss.best(label).score)


@pytest.mark.slow
def test_a_metric_over_trained_clients_is_that_over_all_if_each_took_part(tmp_path, monkeypatch):
    class Trained(Runs):
        def run_cell(self, cell):
            super().run_cell(cell)
            path = CellFolder(self.root, cell.path).path / "summary.json"
            summary = json.loads(path.read_text())
            path.write_text(json.dumps(summary | {"counts": {"untrained": 0}}))

    Trained(monkeypatch)
    by_trained = tune(spec_of(tmp_path / "trained", metric="val/personal/accuracy_trained"))
    by_all = tune(spec_of(tmp_path / "all"))
    assert by_trained.best("Ditto").score == by_all.best("Ditto").score


@table_test(
    "changes, match",
    [
        ({"metric": "val/personal/f1"}, "`tune.metric` to be a metric of the last validation"),
        ({"metric": "val/personal/accuracy_best"}, "which algorithm=Ditto.* does not have"),
    ],
)
def test_missing_metric_is_said_after_the_first_run(tmp_path, monkeypatch, changes, match):
    class Reporting(Runs):
        def run_cell(self, cell):
            super().run_cell(cell)
            status = next(s for s in self.statuses if s.cell is cell)
            self.report(tuning.Event(replace(status, state=State.DONE)))

    runs = Reporting(monkeypatch)
    with pytest.raises(StudyError, match=match):
        tune(spec_of(tmp_path / changes["metric"], **changes))
    assert len(runs.ran) == 1


@pytest.mark.slow
def test_unknown_direction_is_refused(tmp_path, monkeypatch):
    class Unknown(Runs):
        def run_cell(self, cell):
            super().run_cell(cell)
            path = CellFolder(self.root, cell.path).path / "summary.json"
            summary = json.loads(path.read_text())
            summary["metrics"]["val"] = {"personal/skill": 1.0, "global/skill": 1.0}
            summary["higher_is_better"] = {"skill": None}
            path.write_text(json.dumps(summary))

    class Unlisted(Unknown):
        """The metric of a user's callback: the task has none of its own."""

        def run_cell(self, cell):
            super().run_cell(cell)
            path = CellFolder(self.root, cell.path).path / "summary.json"
            summary = json.loads(path.read_text())
            path.write_text(json.dumps({**summary, "higher_is_better": {}}))

    Unlisted(monkeypatch)
    with pytest.raises(StudyError, match=r"`tune\.metric` to be a metric with a known direction"):
        tune(spec_of(tmp_path / "unlisted", metric="val/personal/skill"))
    Unknown(monkeypatch)
    with pytest.raises(StudyError, match=r"`tune\.metric` to be a metric with a known direction"):
        tune(spec_of(tmp_path, metric="val/personal/skill"))
    metric = {"metric": "val/personal/skill", "mode": "min"}
    tuner = tune(spec_of(tmp_path, metric=metric))
    assert tuner.best("Ditto").score == 1.0


@pytest.mark.slow
def test_undefined_scores_are_the_worst(tmp_path, monkeypatch):
    """A finished run whose model is NaN has ``null`` in its summary."""

    class Undefined(Runs):
        def run_cell(self, cell):
            super().run_cell(cell)
            path = CellFolder(self.root, cell.path).path / "summary.json"
            summary = json.loads(path.read_text())
            if cell.trial % 2:
                metrics = summary["metrics"]["val"]
                summary["metrics"]["val"] = dict.fromkeys(metrics)
            path.write_text(json.dumps(summary))

    Undefined(monkeypatch)
    tuner = tune(spec_of(tmp_path))
    for label in ("Ditto", "FedAvg"):
        scores = [item.score for item in tuner.trials[label]]
        assert [score == -math.inf for score in scores] == [False, True] * 6
        assert tuner.best(label).trial.number % 2 == 0


def test_space_leaves_the_arguments_of_other_axes_alone(tmp_path):
    axes = {"algorithm": ["Ditto", "FedAvg"], "lr": {"small": {"model.optimizer.lr": 0.01}}}
    for path in ("model.optimizer.lr", "model.init_args.optimizer.init_args.lr"):
        plan = {**PLAN, "on": {}, "space": {"all": {path: LR}}}
        with pytest.raises(StudyError, match=r"`tune\.space\.all` to leave .* the axis lr sets"):
            read_spec({**STUDY, "axes": axes, "tune": plan})


@pytest.mark.slow
def test_diverged_trials_of_a_loss_stay_the_worst(tmp_path, monkeypatch):
    """Also those of a whole generation, after which nothing but the name tells the direction."""

    class Losses(Runs):
        def run_cell(self, cell):
            super().run_cell(cell)
            path = CellFolder(self.root, cell.path).path / "summary.json"
            summary = {"stage": "fit", "diverged": "in round 1", "metrics": {}}
            if cell.trial >= GENERATION:
                metrics = {"personal/loss_worst10": 2.0 - cell.trial / 10}
                metrics |= {name.replace("personal", "global"): v for name, v in metrics.items()}
                summary = {"stage": "test", "metrics": {"val": metrics}}
                summary["higher_is_better"] = {"loss": False}
            path.write_text(json.dumps(summary))

    Losses(monkeypatch)
    tuner = tune(spec_of(tmp_path, metric="val/personal/loss_worst10"))
    for label in ("Ditto", "FedAvg"):
        assert [item.score for item in tuner.trials[label][:GENERATION]] == [math.inf] * GENERATION
        assert tuner.best(label).trial.number == 11


def test_labels_of_the_table_are_no_formulas(tmp_path, monkeypatch):
    Runs(monkeypatch)
    axes = {"algorithm": {"=1+1": {}, "FedAvg": {"model": "FedAvg"}}, "attack": {"none": {}}}
    plan = {**PLAN, "budget": 1, "space": {"all": {"model.optimizer.lr": LR}}}
    study = {**STUDY, "axes": axes, "tune": plan, "options": {"folder": str(tmp_path)}}
    tune(read_spec(study), ["=1+1", "FedAvg"])
    assert "\n'=1+1,0,done" in (tmp_path / TABLE).read_text()
    assert [row["algorithm"] for row in read_csv(tmp_path / TABLE)] == ["=1+1", "FedAvg"]


@table_test(
    "changes, match",
    [
        ({"sampler": "grid"}, "lists of values for `tune.sampler: grid`"),
        (
            {"sampler": "grid", "space": {"all": {"model.lam": [0.1, 1, 2, 3]}}, "budget": 3},
            "`tune.budget` to be at least 4",
        ),
    ],
)
def test_plans_that_cannot_be_carried_out(tmp_path, changes, match):
    with pytest.raises(StudyError, match=match):
        Tuner(spec_of(tmp_path, **changes))


def test_seeds_of_the_study_are_not_those_of_the_tuning(tmp_path):
    spec = read_spec({**STUDY, "seeds": [0, FIRST_SEED], "tune": PLAN})
    with pytest.raises(StudyError, match="`seeds` to leave the seeds from 1000000 on"):
        Tuner(spec)


def test_grid_tries_all_combinations(tmp_path, monkeypatch):
    space = {"all": {"model.optimizer.lr": [0.01, 0.1]}, "Ditto": {"model.lam": [0.1, 1, 10]}}
    runs = Runs(monkeypatch)
    tuner = tune(spec_of(tmp_path, sampler="grid", space=space, seeds=1))
    assert len(runs.ran) == 2 * 3 + 2 == tuner.count_runs(tuner.labels)
    assert tuner.count_runs(["FedAvg"]) == 2, "as --only algorithm=FedAvg says"
    assert tuner.chosen() == {
        "Ditto": {"model.optimizer.lr": 0.1, "model.lam": 1},
        "FedAvg": {"model.optimizer.lr": 0.1},
    }
    assert tuner.warnings() == []


def test_choice_at_the_edge_of_its_space_is_a_warning(tmp_path, monkeypatch):
    space = {"all": {"model.optimizer.lr": [0.001, 0.01, 0.1]}}
    Runs(monkeypatch)
    tuner = tune(spec_of(tmp_path, sampler="grid", space=space, seeds=1))
    assert len(tuner.warnings()) == 2
    assert (
        "algorithm=Ditto: the chosen model.optimizer.lr = 0.1 lies at the edge"
        in (tuner.warnings()[0])
    )


def test_trials_that_tie_are_a_warning(tmp_path, monkeypatch):
    """The first of seven learning rates was chosen, because FedAvg's worst 10 % had 0 in all."""
    Runs(monkeypatch, lambda overrides, seed: 0.0)
    space = {"all": {"model.optimizer.lr": [0.001, 0.01, 0.1]}}
    tuner = tune(spec_of(tmp_path, sampler="grid", space=space, seeds=1))
    first, second = tuner.warnings()
    assert "algorithm=Ditto: all 3 trials have a score of 0.0 by val/personal/accuracy, so" in first
    assert "algorithm=FedAvg" in second


@given(st.floats(0, 1))
def test_edges_are_outer_twentieths(share):
    for scale, value in (("linear", 2 + 3 * share), ("log", 10 ** (4 * share - 2))):
        ends = (2, 5) if scale == "linear" else (0.01, 100)
        expected = share < 0.0499 or share > 0.9501
        if 0.0499 < share < 0.0501 or 0.9499 < share < 0.9501:
            continue
        assert is_at_edge(value, Interval(*ends, scale)) is expected
    assert not is_at_edge("a", Choices(("a", "b", "c")))


def test_trials_of_a_generation_do_not_know_each_other():
    plan = read_spec({**STUDY, "tune": PLAN}).tune
    space = {"model.lam": Interval(0.01, 10, "log"), "model.local_epochs": Interval(1, 8, "int")}
    first = propose(plan, space, True, [])
    assert len(first) == GENERATION
    second = propose(plan, space, True, [[0.1, 0.2, None, -math.inf, 0.3]])
    assert second == propose(plan, space, True, [[0.1, 0.2, None, -math.inf, 0.3]])
    last = propose(plan, space, True, [[0.0] * 5, [0.0] * 5])
    assert len(last) == 2, "the budget is 12"
    assert propose(plan, space, True, [[0.0] * 5, [0.0] * 5, [0.0] * 2]) == []
    for values in first + second + last:
        assert 0.01 <= values["model.lam"] <= 10
        assert values["model.local_epochs"] in range(1, 9)


@pytest.mark.slow
def test_journal_is_a_study_of_optuna(tmp_path, monkeypatch):
    import optuna
    from optuna.storages.journal import JournalFileBackend

    Runs(monkeypatch)
    tuner = tune(spec_of(tmp_path))
    path = tmp_path / "tuning" / "algorithm=Ditto.optuna.log"
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    loaded = optuna.load_study(study_name="tuned: algorithm=Ditto", storage=storage)
    assert len(loaded.trials) == 12
    assert loaded.best_params == tuner.chosen()["Ditto"]


def test_labels_whose_cells_are_all_recorded_are_not_tuned(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    rows = [("Ditto", a, seed) for a in ("none", "labels") for seed in (0, 1)]
    table = tmp_path / "earlier.csv"
    lines = ["algorithm,attack,seed,status", *(f"{n},{a},{seed},done" for n, a, seed in rows)]
    table.write_text("\n".join(lines))
    spec = read_spec(
        {
            **STUDY,
            "tune": PLAN,
            "options": {"folder": str(tmp_path / "study"), "recorded": str(table)},
        }
    )
    study = Study.from_spec(spec)
    assert study.list_labels_to_tune() == ["FedAvg"]
    monkeypatch.setattr(study, "open_runners", lambda workers: NoPool())
    study.tune(only=["algorithm=Ditto"])
    assert runs.ran == []
    study.tune()
    assert len(runs.ran) == 12 * 2
    assert all("algorithm=FedAvg" in name for name in runs.ran)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.slow
def test_a_killed_tuning_leaves_no_checkpoints_of_finished_trials(tmp_path, monkeypatch, keeps):
    """A kill may come after the last file of a trial, and before the end of its checkpoints."""
    runs = Runs(monkeypatch)
    options = {"folder": str(tmp_path), "keep_checkpoints": keeps}
    study = Study.from_spec(read_spec({**STUDY, "tune": PLAN, "options": options}))
    monkeypatch.setattr(study, "open_runners", lambda workers: NoPool())
    study.tune()
    checkpoint = study.folder / study.tuner.trials["Ditto"][3].trial.cells[1].path / "checkpoints"
    checkpoint.mkdir()
    count = len(runs.ran)
    study.tune()
    assert len(runs.ran) == count
    assert checkpoint.exists() == keeps


@pytest.mark.slow
def test_tuned_study_from_the_command_line(tmp_path):
    content = {
        **STUDY,
        "base": [
            "quickstart",
            {
                "trainer.max_epochs": 2,
                "trainer.check_val_every_n_epoch": 1,
                "trainer.logger": False,
                "data.num_clients": 6,
                "data.batch_size": 100,
                "federation.sampler.cohort_size": 3,
            },
        ],
        "axes": {"algorithm": ["Ditto", "FedAvg"]},
        "tune": {**PLAN, "on": {}, "budget": 2, "seeds": 1},
        "options": {"folder": "study", "workers": 2},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    status, output = run(["study.yaml"], tmp_path)
    assert status == 0, output
    assert "tuned: tuning by val/personal/accuracy, 4 runs in all" in output
    assert "tuned: 4 cells, 0 of them with results" in output
    with (tmp_path / "study" / TABLE).open(newline="") as file:
        chosen = [row for row in csv.DictReader(file) if row["is_chosen"] == "1"]
    for row in chosen:
        assert f"algorithm={row['algorithm']}: model.optimizer.lr = " in output
        config = yaml.safe_load(
            (tmp_path / "study" / f"algorithm={row['algorithm']}/seed=0/config.yaml").read_text()
        )
        rate = config["model"]["init_args"]["optimizer"]["init_args"]["lr"]
        assert rate == float(row["model.optimizer.lr"])
    runs = {
        path: json.loads(path.read_text()) for path in (tmp_path / "study").rglob("summary.json")
    }
    stages = {(("tuning" in path.parts), run["stage"]) for path, run in runs.items()}
    assert stages == {(True, "fit"), (False, "test")}, "trials are never tested"
    before = (tmp_path / "study" / "results.csv").read_bytes()
    status, output = run(["study.yaml"], tmp_path)
    assert (status, "done in" in output) == (0, False), output
    assert (tmp_path / "study" / "results.csv").read_bytes() == before
