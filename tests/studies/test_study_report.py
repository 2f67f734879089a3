"""Report of a study: numbers against hand computations and scipy, open cells, files and page."""

import csv
import itertools
import json
import math
import re
import statistics

import pytest
import scipy.stats
import yaml
from study_processes import run
from tables import table_test

from pl_fed.statistics import correct_by_holm, smallest_difference
from pl_fed.studies import command
from pl_fed.studies.cell_folder import CellFolder, CellRecord, State, write_text
from pl_fed.studies.comparison import arrange, choose_metrics, compare_methods
from pl_fed.studies.pictures import find_front
from pl_fed.studies.readers import StudyError
from pl_fed.studies.report import read_rows
from pl_fed.studies.results import write_results
from pl_fed.studies.study import Study
from pl_fed.studies.tables import escape_latex, make_metric_table, make_test_table

ACCURACY = "test/personal/accuracy"
WORST = f"{ACCURACY}_worst10"
VALUES = {
    ("Ditto", "none"): [0.90, 0.92, 0.94],
    ("Ditto", "labels"): [0.80, 0.81, 0.85],
    ("FedAvg", "none"): [0.80, 0.83, 0.83],
    ("FedAvg", "labels"): [0.60, 0.70, 0.59],
    ("FedRep", "none"): [0.81, 0.82, 0.85],
    ("FedRep", "labels"): [0.61, 0.69, 0.62],
}


def make_study(folder, values=VALUES, status=(), baseline="FedAvg", **changes):
    """Return a study with the table of results of made-up runs.

    Args:
        values: Accuracies by seed of each algorithm and attack.
        status: States of cells without accuracy, by algorithm, attack and seed.
        baseline: The label of `compare.baseline`, or ``None`` for no comparison in the file.
    """
    algorithms = list(dict.fromkeys(key[0] for key in values))
    attacks = list(dict.fromkeys(key[1] for key in values))
    compare = {"metrics": [ACCURACY, WORST], "baseline": {"algorithm": baseline}}
    settings = {
        "name": "made_up",
        "base": ["quickstart"],
        "axes": {
            "algorithm": {
                name: {"model.lam": place + 1.0} for place, name in enumerate(algorithms)
            },
            "attack": {name: {"federation.rate": place} for place, name in enumerate(attacks)},
        },
        "seeds": max(map(len, values.values())),
        "compare": compare if baseline else None,
        "options": {"folder": str(folder)},
    }
    study = Study(**{**settings, **changes})
    states = dict(status)
    rows = []
    for cell in study.cells:
        key = cell.values["algorithm"], cell.values["attack"]
        state = states.get((*key, cell.seed), "done")
        row = {**cell.values, "seed": cell.seed, "status": state}
        if state == "done":
            model = "global" if key[0] == "FedAvg" else "personal"
            value = values[key][cell.seed]
            row |= {f"test/{model}/accuracy": value, f"test/{model}/accuracy_worst10": value / 2}
        rows.append(row)
    write_results(study.folder, rows)
    return study


def compare(study, metric=ACCURACY):
    rows, directions, _ = read_rows(study)
    return compare_methods(
        metric, arrange(study.spec.axes, study.spec.compare, rows), rows, directions
    )


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_means_and_intervals_are_those_of_scipy(tmp_path):
    comparison = compare(make_study(tmp_path))
    entry = comparison.entries["Ditto", "none"]
    assert entry.mean == pytest.approx(0.92)
    half = 4.302652729911275 * 0.02 / math.sqrt(3)  # t of 2 degrees of freedom at 97.5 %
    assert entry.interval.high - entry.interval.estimate == pytest.approx(half)
    for key, values in VALUES.items():
        error = scipy.stats.sem(values)
        ends = scipy.stats.t.interval(0.95, len(values) - 1, statistics.mean(values), error)
        interval = comparison.entries[key].interval
        assert (interval.low, interval.high) == pytest.approx(ends)


def test_differences_are_paired_by_seed_and_corrected_over_the_family(tmp_path):
    comparison = compare(make_study(tmp_path))
    pairs = [("Ditto", "none"), ("Ditto", "labels"), ("FedRep", "none"), ("FedRep", "labels")]
    assert [(item.first, item.condition) for item in comparison.differences] == pairs
    expected = [
        scipy.stats.ttest_rel(VALUES[key], VALUES["FedAvg", key[1]]).pvalue for key in pairs
    ]
    assert [item.p_value for item in comparison.differences] == pytest.approx(expected)
    corrected = correct_by_holm(expected)
    assert [item.corrected for item in comparison.differences] == pytest.approx(corrected)
    first = comparison.differences[0]
    assert first.values == pytest.approx([0.10, 0.09, 0.11])
    assert first.interval.estimate == pytest.approx(0.1)
    assert (first.verdict, comparison.differences[2].verdict) == ("better", "")
    decided = smallest_difference(0.01, 3, alpha=0.05 / 4)
    assert first.smallest == pytest.approx(decided)


def test_equal_differences_of_few_seeds_are_not_certain(tmp_path):
    values = {("Ditto", "none"): [0.5, 0.75], ("FedAvg", "none"): [0.25, 0.5]}
    comparison = compare(make_study(tmp_path, values))
    (difference,) = comparison.differences
    assert difference.values == (0.25, 0.25)
    assert difference.p_value == 0.5  # two of four signs are as extreme
    assert math.isnan(difference.smallest)
    notes = make_metric_table(comparison, "name").notes
    assert any("sign-flip test" in note for note in notes)


def test_smaller_losses_are_better(tmp_path):
    study = make_study(tmp_path)
    rows, _, _ = read_rows(study)
    rows = [
        {name.replace("accuracy", "loss"): value for name, value in row.items()} for row in rows
    ]
    layout = arrange(study.spec.axes, study.spec.compare, rows)
    comparison = compare_methods("test/personal/loss", layout, rows, {})
    assert comparison.differences[0].verdict == "worse"
    assert comparison.find_worst("Ditto").condition == "none"
    assert comparison.find_worst("Ditto").mean == pytest.approx(0.92)


def test_ranks_are_means_over_conditions_within_independent_seeds(tmp_path):
    comparison = compare(make_study(tmp_path))
    ranks = {"Ditto": [1, 1, 1], "FedAvg": [3, 2, 3], "FedRep": [2, 3, 2]}  # without attack
    ranks_under_attack = {"Ditto": [1, 1, 1], "FedAvg": [3, 2, 3], "FedRep": [2, 3, 2]}
    blocks = {m: [(a + b) / 2 for a, b in zip(ranks[m], ranks_under_attack[m])] for m in ranks}
    for method, values in blocks.items():
        assert comparison.find_rank(method) == pytest.approx(statistics.mean(values))
    test = scipy.stats.friedmanchisquare(*blocks.values())
    assert comparison.ranks.friedman.statistic == pytest.approx(test.statistic)
    assert comparison.ranks.friedman.blocks == 3


def test_worst_case_is_the_worst_mean_over_conditions(tmp_path):
    worst = compare(make_study(tmp_path)).find_worst("FedAvg")
    assert (worst.condition, worst.is_bound) == ("labels", False)
    assert worst.mean == pytest.approx(0.63)


def test_a_diverged_run_gives_no_mean_no_test_and_the_last_rank(tmp_path):
    study = make_study(tmp_path, status={("Ditto", "labels", 1): "diverged"})
    comparison = compare(study)
    entry = comparison.entries["Ditto", "labels"]
    assert (entry.mean, entry.diverged) == (None, ("1",))
    assert entry.interval.estimate == pytest.approx(0.825)  # of the two other seeds, for the CSV
    difference = comparison.find_difference("Ditto", "labels")
    assert (difference.diverged, difference.pairs) == (1, 2)
    assert math.isnan(difference.p_value)
    assert not difference.verdict
    assert comparison.tests == 3
    assert comparison.find_worst("Ditto").has_diverged
    ranks = [(1 + 1) / 2, (1 + 3) / 2, (1 + 1) / 2]  # last under attack with seed 1
    assert comparison.find_rank("Ditto") == pytest.approx(statistics.mean(ranks))
    study.report()
    text = (tmp_path / "report/tables/test_personal_accuracy.md").read_text(encoding="utf-8")
    assert "| Ditto | 0.920 ± 0.050 ⁺ | 1 of 3 diverged | diverged |" in text
    assert "1 run diverged. A run that diverged is a result" in text
    (cell,) = read_csv(tmp_path / "report/cells.csv")
    assert (cell["algorithm"], cell["seed"], cell["status"]) == ("Ditto", "1", "diverged")


def test_a_missing_seed_is_counted_and_leaves_pairs_that_both_have(tmp_path):
    study = make_study(tmp_path, status={("FedAvg", "none", 0): "missing"})
    comparison = compare(study)
    difference = comparison.find_difference("Ditto", "none")
    assert difference.values == pytest.approx([0.09, 0.11])
    assert (difference.pairs, difference.unpaired, difference.diverged) == (2, 1, 0)
    expected = scipy.stats.ttest_rel([0.92, 0.94], [0.83, 0.83]).pvalue
    assert difference.p_value == pytest.approx(expected)
    assert (comparison.incomplete_seeds, comparison.ranks.friedman.blocks) == (1, 2)
    page = study.report().read_text(encoding="utf-8")
    assert "18 cells: 17 done, 1 missing." in page
    assert "(2 of 3)" in page
    assert "1 seed with missing runs left out" in page


def test_conditions_without_results_bound_the_worst_case(tmp_path):
    status = {("Ditto", "labels", seed): "failed" for seed in range(3)}
    study = make_study(tmp_path, status=status)
    comparison = compare(study)
    assert comparison.find_worst("Ditto").is_bound
    table = make_metric_table(comparison, "name")
    assert table.rows[0][2:4] == ("no result", "≤ 0.920")
    assert comparison.ranks is None
    assert comparison.incomplete_seeds == 3


def test_two_methods_have_no_ranks(tmp_path):
    values = {key: item for key, item in VALUES.items() if key[0] != "FedRep"}
    study = make_study(tmp_path, values)
    comparison = compare(study)
    assert comparison.ranks is None
    assert comparison.tests == 2
    assert make_metric_table(comparison, "name").header[-1] == "worst case"
    study.report()
    names = {path.name for path in (tmp_path / "report/pictures").iterdir()}
    assert not any(name.startswith("ranks") for name in names)


def test_one_seed_has_neither_intervals_nor_tests(tmp_path):
    study = make_study(tmp_path, {key: item[:1] for key, item in VALUES.items()})
    comparison = compare(study)
    assert comparison.tests == 0
    assert comparison.ranks is None
    table = make_metric_table(comparison, "name")
    assert table.rows[0] == ("Ditto", "0.900", "0.800", "0.800")
    assert any(note.startswith("No test") for note in table.notes)
    study.report()
    rows = read_csv(tmp_path / "report/comparisons.csv")
    assert {row["p_value"] for row in rows} == {""}


def test_without_a_baseline_all_pairs_are_one_family(tmp_path):
    comparison = compare(make_study(tmp_path, baseline=None))
    pairs = {(item.first, item.second) for item in comparison.differences}
    assert pairs == {("FedAvg", "Ditto"), ("FedRep", "Ditto"), ("FedRep", "FedAvg")}
    assert comparison.tests == 6
    table = make_metric_table(comparison, "name")
    assert not any("⁺" in text or "⁻" in text for row in table.rows for text in row)


def test_a_baseline_on_two_axes_makes_methods_of_both(tmp_path):
    plan = {"metrics": [ACCURACY], "baseline": {"algorithm": "FedAvg", "attack": "labels"}}
    comparison = compare(make_study(tmp_path, compare=plan))
    assert comparison.layout.baseline == "FedAvg, labels"
    assert comparison.layout.conditions == ("all",)
    assert len(comparison.differences) == 5


@table_test(
    ["baseline", "message"],
    [
        ({"algorithm": ["FedAvg", "Ditto"]}, "have one label of each axis that it names"),
        ({"seed": 0}, "have one label of each axis that it names"),
    ],
)
def test_a_baseline_is_one_method(tmp_path, baseline, message):
    study = make_study(tmp_path, compare={"metrics": [ACCURACY], "baseline": baseline})
    with pytest.raises(StudyError, match=message):
        study.report()


def test_a_wrong_metric_is_refused_with_the_nearest_name(tmp_path):
    plan = {"metrics": ["test/personal/acuracy"], "baseline": {}}
    with pytest.raises(StudyError, match=r"compare\.metrics.*no finished run has.*accuracy"):
        make_study(tmp_path, compare=plan).report()


def test_without_results_there_is_no_report(tmp_path):
    study = make_study(tmp_path)
    (tmp_path / "results.csv").unlink()
    with pytest.raises(StudyError, match="have a cell with a result but got none of 18"):
        study.report()


def test_default_metrics_are_accuracy_and_its_worst_clients(tmp_path):
    rows, _, _ = read_rows(make_study(tmp_path, baseline=None))
    assert choose_metrics(None, rows) == (ACCURACY, WORST)
    names = ["test/global/loss", "test/global/loss_worst10", "test/global/f1"]
    row = dict.fromkeys([*names, "test/global/f1_worst10"], 0.5)
    assert choose_metrics(None, [{**row, "status": "done"}])[0] == "test/personal/f1"


def test_folders_win_over_an_earlier_table(tmp_path):
    study = make_study(tmp_path)
    cell = study.cells[0]
    folder = CellFolder(study.folder, cell.path)
    record = CellRecord("made_up", cell.name, dict(cell.values), cell.seed, cell.digest)
    folder.write_record(record)
    metrics = {"test": {"personal/accuracy": 0.5}}
    summary = {"stage": "test", "metrics": metrics, "higher_is_better": {"accuracy": True}}
    write_text(folder.path / "summary.json", json.dumps(summary))
    other = CellFolder(study.folder, study.cells[1].path)
    write_text(other.path / "cell.json", json.dumps({**vars(record), "error": "out of memory"}))
    rows, directions, from_table = read_rows(study)
    assert rows[0][ACCURACY] == 0.5
    assert rows[1]["status"] == State.FAILED
    assert from_table == 16
    assert directions == {"accuracy": True}
    study.report()
    (failed,) = read_csv(tmp_path / "report/cells.csv")
    assert failed["error"] == "out of memory"


def test_all_files_are_written_and_replaced(tmp_path):
    study = make_study(tmp_path)
    (tmp_path / "report/tables").mkdir(parents=True)
    (tmp_path / "report/tables/old.csv").write_text("old", encoding="utf-8")
    page = study.report()
    names = {str(path.relative_to(tmp_path / "report")) for path in page.parent.rglob("*.*")}
    stems = ["test_personal_accuracy", "test_personal_accuracy_worst10"]
    pictures = [f"{kind}_{stem}" for kind in ("heat_map", "ranks") for stem in stems]
    pictures.append("front_test_personal_accuracy")
    tables = [*stems, *(f"{stem}_tests" for stem in stems)]
    expected = {f"tables/{stem}.{end}" for stem in tables for end in ("csv", "md", "tex")}
    expected |= {f"pictures/{name}.{end}" for name in pictures for end in ("csv", "png")}
    assert names == expected | {"comparisons.csv", "index.html"}
    first = page.read_bytes()
    assert study.report().read_bytes() == first


def test_latex_has_booktabs_equal_columns_and_no_bare_symbols(tmp_path):
    values = {(f"a_{a} & {a}%", attack): [0.5 + 0.01 * a, 0.6] for a in range(2) for attack in "xy"}
    study = make_study(tmp_path, values, baseline=None)
    study.report()
    text = (tmp_path / "report/tables/test_personal_accuracy.tex").read_text(encoding="utf-8")
    assert text.isascii()
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {3}
    assert r"a\_0 \& 0\% & " in text
    assert r"0.55 $\pm$ 0.64" in text
    assert escape_latex("{~^\\}") == r"\{\textasciitilde{}\textasciicircum{}\textbackslash{}\}"


def test_wide_latex_tables_are_split_and_long_ones_turned(tmp_path):
    values = {
        (f"m{m}", f"c{c}"): [0.5 + 0.01 * m + 0.02 * c, 0.6] for m in range(8) for c in range(9)
    }
    table = make_metric_table(compare(make_study(tmp_path, values, baseline="m0")), "name")
    assert len(table.rows) == 11
    assert table.header[1:] == tuple(f"m{m}" for m in range(8))
    assert table.rows[-2][0] == "worst case"
    assert table.rows[-1][0] == "rank"
    assert table.latex().count(r"\begin{tabular}") == 2


def test_the_table_of_tests_has_each_comparison(tmp_path):
    study = make_study(tmp_path, status={("Ditto", "labels", 1): "diverged"})
    table = make_test_table(compare(study), "name")
    first, second, *_ = table.rows
    assert first[:4] == ("Ditto", "FedAvg", "none", "+0.100 ± 0.025")
    assert second[3:] == ("diverged on 1 seed", "–", "–", "–")


def test_csv_files_hold_the_numbers_of_the_comparison(tmp_path):
    study = make_study(tmp_path)
    study.report()
    comparison = compare(study)
    rows = read_csv(tmp_path / "report/tables/test_personal_accuracy.csv")
    for row in rows:
        entry = comparison.entries[row["algorithm"], row["attack"]]
        assert float(row["mean_of_finished"]) == entry.mean
        assert float(row["low"]) == entry.interval.low
    rows = read_csv(tmp_path / "report/comparisons.csv")
    assert len(rows) == 8  # two metrics
    for row, item in zip(rows, comparison.differences):
        assert (row["method"], row["condition"]) == (item.first, item.condition)
        assert float(row["p_holm"]) == item.corrected
        assert row["verdict"] == item.verdict


def test_the_page_reads_alone_and_runs_one_script(tmp_path):
    text = make_study(tmp_path).report().read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    assert text.count("<script>") == 1
    assert "script-src 'sha256-" in text
    assert "Read by their global model, without a personal one: FedAvg." in text
    assert text.count("data-copy=") == 12  # three for each table
    assert set(re.findall(r'data-copy="([^"]*)"', text)) == set(
        re.findall(r'<pre id="([^"]*)"', text)
    )
    cells = re.findall(r'<td class="number" data-method="(\d)" data-condition="(\d)">', text)
    assert sorted(set(cells)) == sorted(itertools.product("012", "01"))
    assert 'data-hides="1 2">Ditto' in text
    assert "clients of a seed share a model" in text


def test_labels_cannot_add_markup(tmp_path):
    values = {("<script>x", "none"): [0.5, 0.6], ("b", "none"): [0.5, 0.7]}
    text = make_study(tmp_path, values, baseline="b").report().read_text(encoding="utf-8")
    assert "<script>x" not in text
    assert "&lt;script&gt;x" in text


def test_tuning_is_reported_with_budgets_choices_and_edges(tmp_path):
    pytest.importorskip("optuna", reason="`tune` of a study uses it")
    plan = {
        "per": "algorithm",
        "budget": 2,
        "space": {"Ditto": {"model.lam": [0.01, 10, "log"]}, "all": {"model.optimizer.lr": [1, 2]}},
        "sampler": "random",
        "metric": "val/personal/accuracy",
    }
    study = make_study(tmp_path, tune=plan)
    lines = [
        "algorithm,trial,status,val/personal/accuracy,is_chosen,model.lam,model.optimizer.lr",
        "Ditto,0,done,0.9,1,0.0101,1.5",
        "Ditto,1,diverged,-inf,0,1.0,1.2",
        "FedAvg,0,done,0.8,1,,1.5",
    ]
    (tmp_path / "tuning.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    study.report()
    ditto, fedavg = read_csv(tmp_path / "report/tables/tuned.csv")
    assert (ditto["trials"], ditto["diverged"], fedavg["trials"]) == ("2 of 2", "1", "1 of 2")
    assert ditto["searched"] == "model.optimizer.lr: 1 to 2; model.lam: 0.01 to 10 (log)"
    assert ditto["chosen"] == "model.optimizer.lr = 1.5; model.lam = 0.0101"
    assert (ditto["at the edge"], fedavg["at the edge"]) == ("model.lam", "no")


def test_a_front_has_the_points_that_no_other_beats():
    points = {"a": (0.9, 0.5), "b": (0.9, 0.6), "c": (0.7, 0.7), "d": (0.6, 0.65)}
    assert find_front(points) == ["c", "b"]
    assert find_front(points, is_higher=False) == ["d", "a"]


@table_test(["methods", "conditions"], [(4, 25), (100, 1)])
def test_a_hundred_groups_are_drawn(tmp_path, methods, conditions):
    values = {
        (f"m{m}", f"c{c}"): [0.4 + 0.005 * (m + c), 0.5, 0.3 + 0.002 * m * c / 25]
        for m in range(methods)
        for c in range(conditions)
    }
    page = make_study(tmp_path, values, baseline="m0").report()
    assert page.stat().st_size < 2_000_000
    heat_map = read_csv(page.parent / "pictures/heat_map_test_personal_accuracy.csv")
    assert len(heat_map) == methods * (conditions + (conditions > 1))


def test_a_report_of_some_cells_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["study.yaml", "--report", "--only", "algorithm=Ditto"])
    assert stop.value.code == 2
    assert "`report` without `only`" in capsys.readouterr().err


def test_the_command_writes_the_report_and_runs_nothing(tmp_path):
    study = make_study(tmp_path / "made_up", status={("Ditto", "none", 0): "missing"})
    description = {
        "name": "made_up",
        "base": ["quickstart"],
        "axes": {
            axis.name: {label: dict(change.overrides) for label, change in axis.changes.items()}
            for axis in study.spec.axes
        },
        "seeds": 3,
        "compare": {"metrics": [ACCURACY], "baseline": {"algorithm": "FedAvg"}},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(description), encoding="utf-8")
    status, output = run([file, "--folder", study.folder, "--report"], tmp_path)
    assert status == 0, output
    assert "report/index.html" in output
    assert not (study.folder / study.cells[0].path).exists()
