"""Benefit over local training in a study: by cell, from run folders, against the library."""

import csv
import json
from dataclasses import replace

import pytest
from run_folders import read_table, with_changes, write_run, write_table
from study_processes import run
from test_study_report import ACCURACY, compare, make_study

import pl_fed
from pl_fed.studies.benefit import list_clients, make_benefit_table, measure_study
from pl_fed.studies.cell_folder import CellFolder
from pl_fed.studies.comparison import arrange
from pl_fed.studies.report import read_rows

METHODS = ("Local", "Ditto", "FedAvg")
RESULTS = {  # of the clients, by method and seed
    ("Local", 0): (0.5, 0.75, 1.0, 0.25),
    ("Ditto", 0): (0.75, 0.75, 0.5, 0.5),
    ("FedAvg", 0): (0.0, 0.0, 0.0, 1.0),
    ("Local", 1): (0.5, 0.5, 0.5, 0.5),
    ("Ditto", 1): (0.75, 0.25, 0.5, 0.5),
    ("FedAvg", 1): (1.0, 1.0, 1.0, 1.0),
}


@pytest.fixture
def made(tmp_path):
    """A study of two conditions with made-up runs, its rows, and the cells with their folders."""
    values = {(method, attack): [0.5, 0.5] for method in METHODS for attack in ("none", "labels")}
    study = make_study(tmp_path / "study", values, baseline="Local")
    rows, *_ = read_rows(study)
    folders = [CellFolder(study.folder, cell.path) for cell in study.cells]
    cells = list(zip(study.cells, rows, folders))
    for cell, _, folder in cells:
        method = cell.values["algorithm"]
        models = ("global",) if method == "FedAvg" else ("global", "personal")
        changes = {"seed_everything": cell.seed, "model.class_path": f"pl_fed.clients.{method}"}
        accuracy = RESULTS[method, cell.seed]
        write_run(folder.path, with_changes(changes), accuracy=accuracy, models=models)
        summary = {"classes": {"client": f"pl_fed.clients.{method}"}, "seeds": {"data": cell.seed}}
        (folder.path / "summary.json").write_text(json.dumps(summary))
    return study, rows, cells


def measure(made):
    study, rows, cells = made
    layout = arrange(study.spec.axes, study.spec.compare, rows)
    return measure_study(cells, layout, compare(study)), layout


def test_each_method_is_compared_with_local_training_of_its_seed_and_condition(made):
    benefit, layout = measure(made)
    assert (benefit.local, benefit.metric) == ("Local", "accuracy")
    assert len(benefit.by_cell) == 8
    assert benefit.by_cell["Ditto", "none", "0"].gains.tolist() == [0.25, 0, -0.5, 0.25]
    assert benefit.by_cell["FedAvg", "labels", "1"].gains.tolist() == [0.5] * 4
    table = make_benefit_table(benefit, layout)
    assert [row[:3] for row in table.rows] == [
        ("Ditto", "none", "2"),
        ("Ditto", "labels", "2"),
        ("FedAvg", "none", "2"),
        ("FedAvg", "labels", "2"),
    ]
    record = table.records[0]
    assert (record["seeds"], record["clients"], record["mean gain"]) == (2, 8, 0)
    assert record["share that gains"] == pytest.approx((0.5 + 0.25) / 2)
    assert record["largest loss"] == pytest.approx((0.5 + 0.25) / 2)
    assert record["mean loss of these"] == pytest.approx((0.5 + 0.25) / 2)
    assert table.rows[0][4] == "38%"
    record = table.records[2]
    assert record["mean gain"] == pytest.approx((-0.375 + 0.5) / 2)
    assert (record["mean loss of these"], record["largest loss"]) == (0.75, 1), "of the same seed"
    assert all(len(row) == len(table.header) for row in table.rows)
    assert "Ditto" in table.latex()


def test_direction_is_that_of_the_comparison(made):
    study, rows, cells = made
    layout = arrange(study.spec.axes, study.spec.compare, rows)
    lower = replace(compare(study), is_higher_better=False)
    benefit = measure_study(cells, layout, lower)
    assert benefit.by_cell["Ditto", "none", "0"].gains.tolist() == [-0.25, 0, 0.5, -0.25]


def test_table_names_the_model_of_its_gains(made):
    """Local training has no other model than the personal one that clients use."""
    study, _, cells = made
    benefit, layout = measure(made)
    notes = [make_benefit_table(benefit, layout).notes[0]]
    by_global = replace(compare(study), metric="test/global/accuracy")
    notes += make_benefit_table(measure_study(cells, layout, by_global), layout).notes[:1]
    assert [note.partition(" seed: ")[2].partition(". ")[0] for note in notes] == [
        "of its personal model, or of the global one without any",
        "of the global model",
    ]


def test_clients_have_rows_of_their_own(made):
    benefit, layout = measure(made)
    rows = list(list_clients(benefit, made[2], layout))
    assert len(rows) == 32
    first = next(row for row in rows if row["algorithm"] == "Ditto" and row["client"] == 3)
    assert (first["seed"], first["alone"], first["joined"], first["gain"]) == ("0", 0.25, 0.5, 0.25)


def test_runs_of_other_clients_and_without_files_are_counted(made):
    folders = {(c.values["algorithm"], c.values["attack"], c.seed): f.path for c, _, f in made[2]}
    rows = read_table(folders["Ditto", "none", 0] / "per_client.csv")
    write_table(
        folders["Ditto", "none", 0] / "per_client.csv",
        [row | {"test_samples": 5} for row in rows],
    )
    (folders["FedAvg", "none", 1] / "config.yaml").write_text("[broken")
    cell, row, folder = made[2][-1]
    made[2][-1] = (cell, row | {"status": "diverged"}, folder)
    benefit, layout = measure(made)
    assert len(benefit.by_cell) == 5
    assert make_benefit_table(benefit, layout).notes[-1] == (
        "Runs that are left out: 1 without files, 1 of other clients than local training, 1 that"
        " diverged."
    )


@pytest.mark.parametrize("method", ["Local", "Ditto"])
def test_all_figures_of_a_method_are_of_the_seeds_of_both(made, method):
    for place, (cell, row, folder) in enumerate(made[2]):
        if cell.values["algorithm"] == method and cell.seed == 1:
            made[2][place] = (cell, row | {"status": "diverged"}, folder)
    benefit, layout = measure(made)
    record = make_benefit_table(benefit, layout).records[0]
    assert (record["seeds"], record["mean gain"], record["largest loss"]) == (1, 0, 0.5)


def test_study_without_local_training_has_no_benefit(made):
    for _, _, folder in made[2]:
        (folder.path / "summary.json").unlink()
    assert measure(made)[0] is None


@pytest.mark.slow
def test_report_of_a_study_has_the_gains(tmp_path):
    tiny = {"trainer.max_epochs": 2, "trainer.logger": False, "data.num_clients": 6}
    study = {
        "name": "gains",
        "base": ["quickstart", {**tiny, "federation.sampler.cohort_size": 3}],
        "axes": {"algorithm": ["Local", "Ditto"]},
        "seeds": 2,
        "compare": {"metrics": [f"{ACCURACY}_worst10"], "baseline": {"algorithm": "Local"}},
        "options": {"folder": "study", "workers": 1},
    }
    (tmp_path / "gains.yaml").write_text(json.dumps(study))
    run(["gains.yaml"], tmp_path)
    run(["gains.yaml", "--report"], tmp_path)
    folder = tmp_path / "study"
    with (folder / "report/tables/benefit.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    ditto, local = (folder / f"algorithm={name}" for name in ("Ditto", "Local"))
    expected = [
        pl_fed.measure_benefit(ditto / f"seed={seed}", local / f"seed={seed}") for seed in (0, 1)
    ]
    assert float(row["share that gains"]) == pytest.approx(
        sum(item.share_gaining for item in expected) / 2
    )
    assert "who should join?" in (folder / "report/index.html").read_text(encoding="utf-8")
    assert (folder / "report/tables/benefit_clients.csv").is_file()
