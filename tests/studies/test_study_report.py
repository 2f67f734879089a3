"""Report of a study: numbers against hand computations and scipy, open cells, files and page."""

import csv
import html
import itertools
import json
import math
import re
import statistics
from dataclasses import replace

import pytest
import scipy.stats
import yaml
from further_cases import mark_others
from run_folders import with_changes, write_run
from study_processes import run
from tables import table_test

from pl_fed.command.shipped_configs import find_configs
from pl_fed.reports.picture import MARKERS, line_style
from pl_fed.statistics import correct_by_holm, smallest_difference
from pl_fed.studies import command
from pl_fed.studies.cell_folder import CellFolder, CellRecord, State, write_text
from pl_fed.studies.comparison import arrange, choose_metrics, compare_methods
from pl_fed.studies.fronts import draw_fronts, find_front, render_fronts
from pl_fed.studies.heat_map import list_fields
from pl_fed.studies.pictures import draw_pictures
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
    rows, directions, *_ = read_rows(study)
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
    rows, *_ = read_rows(study)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_seeds_without_any_result_are_left_out_of_ranks(tmp_path):
    for count, complete in ((1, 2), (2, None)):
        status = {(*key, seed): "missing" for key in VALUES for seed in range(count)}
        comparison = compare(make_study(tmp_path, status=status))
        assert comparison.incomplete_seeds == count
        assert (comparison.ranks and comparison.ranks.friedman.blocks) == complete
    assert "fewer than two seeds are complete. 2 seeds with" in " ".join(
        make_metric_table(comparison, "name").notes
    )


def test_conditions_without_results_bound_the_worst_case(tmp_path):
    status = {("Ditto", "labels", seed): "failed" for seed in range(3)}
    study = make_study(tmp_path, status=status)
    comparison = compare(study)
    assert comparison.find_worst("Ditto").is_bound
    table = make_metric_table(comparison, "name")
    assert table.rows[0][2:4] == ("no result", "≤ 0.920")
    assert comparison.ranks is None
    assert comparison.incomplete_seeds == 3


@pytest.mark.slow
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


@pytest.mark.slow
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
    rows, *_ = read_rows(make_study(tmp_path, baseline=None))
    assert choose_metrics(None, rows) == (ACCURACY, WORST)
    names = ["test/global/loss", "test/global/loss_worst10", "test/global/f1"]
    row = dict.fromkeys([*names, "test/global/f1_worst10"], 0.5)
    assert choose_metrics(None, [{**row, "status": "done"}])[0] == "test/personal/f1"


@pytest.mark.slow
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
    rows, directions, from_table, _ = read_rows(study)
    assert rows[0][ACCURACY] == 0.5
    assert rows[1]["status"] == State.FAILED
    assert from_table == 16
    assert directions == {"accuracy": True}
    study.report()
    (failed,) = read_csv(tmp_path / "report/cells.csv")
    assert failed["error"] == "out of memory"


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert escape_latex("θ₁ ≥ ω, λ ≠ 2") == r"$\theta$$_1$ $\ge$ $\omega$, $\lambda$ $\ne$ 2"


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_comparisons_of_a_single_method_are_a_header(tmp_path):
    study = make_study(tmp_path / "one", {("Ditto", "none"): [0.9, 0.8]}, baseline=None)
    study.report()
    header, *rows = (tmp_path / "one/report/comparisons.csv").read_text().splitlines()
    assert not rows
    make_study(tmp_path / "all").report()
    assert (tmp_path / "all/report/comparisons.csv").read_text().splitlines()[0] == header


def test_a_metric_over_trained_clients_is_that_over_all_if_each_took_part(tmp_path):
    values = {("Ditto", "none"): [0.9, 0.8], ("FedAvg", "none"): [0.7, 0.6]}
    study = make_study(tmp_path, values)
    rows = [row | {"counts/untrained": 0} for row in study.rows()]
    rows[0] |= {"counts/untrained": 2, f"{ACCURACY}_trained": 0.95}
    layout = arrange(study.spec.axes, study.spec.compare, rows)
    for metric, share in ((f"{ACCURACY}_trained", 1), (f"{ACCURACY}_trained_worst10", 2)):
        entries = compare_methods(metric, layout, rows, {}).entries
        assert entries["FedAvg", "none"].values == {"0": 0.7 / share, "1": 0.6 / share}
    rows[1].pop("counts/untrained")
    entry = compare_methods(f"{ACCURACY}_trained", layout, rows, {}).entries["Ditto", "none"]
    assert (entry.values, entry.unfinished) == ({"0": 0.95}, {"1": "no value"})


@pytest.mark.slow
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
    fields = re.findall(r'color:#\w+" data-method="(\d)" data-condition="(\d)">\.\d+<', text)
    assert sorted(fields) == sorted([*itertools.product("012", "01")] * 2)  # of two metrics
    facets = re.findall(r'class="facet" data-condition="(\d)">(.*?)</figure>', text, re.DOTALL)
    assert [place for place, _ in facets] == ["0", "1"]
    for _, facet in facets:
        assert re.findall(r'<g transform="[^"]*" data-method="(\d)"', facet) == ["0", "1", "2"]
    assert 'data-hides="1 2">Ditto' in text
    assert "clients of a seed share a model" in text


@pytest.mark.parametrize("private", mark_others([0, 1, 2, 3], 0, 3))
@pytest.mark.slow
def test_budgets_of_private_runs_add_up(tmp_path, private):
    """The page gave accuracies of private cells, and no guarantee of them together."""
    study = make_study(tmp_path)
    first, second, *_ = study.cells
    paths = [first.path, second.path, "tuning/algorithm=Ditto/trial=0/seed=1000000"]
    config = with_changes({"federation.privacy": {"delta": 0.01}})
    for number, path in enumerate(paths):
        extra = {"privacy/epsilon": 1.5 + number} if number < private else {}
        write_run(study.folder / path, config, extra=extra)
    text = html.unescape(study.report().read_text(encoding="utf-8"))
    sentences = re.findall(r"\d private runs read one data set.*?ε = [\d.]+ at δ = [\d.]+", text)
    assert len(sentences) == (private > 1)
    if sentences:
        assert sentences[0].startswith(f"{private} private runs")
        assert sentences[0].endswith({2: "ε = 4 at δ = 0.02", 3: "ε = 7.5 at δ = 0.03"}[private])
        assert "Private runs without a folder are not in these sums." in text


@pytest.mark.slow
def test_labels_cannot_add_markup(tmp_path):
    values = {("<script>x", "none"): [0.5, 0.6], ("b", "none"): [0.5, 0.7]}
    text = make_study(tmp_path, values, baseline="b").report().read_text(encoding="utf-8")
    assert "<script>x" not in text
    assert "&lt;script&gt;x" in text


@pytest.mark.slow
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


@pytest.mark.exhaustive
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


@pytest.mark.slow
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


# Statistics


def test_ranks_within_a_seed_are_those_of_mean_ranks(tmp_path):
    """A seed is one block: methods are ranked by their mean ranks over conditions."""
    values = {
        ("A", "x"): [0.9, 0.9, 0.9],
        ("A", "y"): [0.7, 0.7, 0.7],
        ("B", "x"): [0.8, 0.8, 0.8],
        ("B", "y"): [0.9, 0.9, 0.9],
        ("C", "x"): [0.7, 0.7, 0.7],
        ("C", "y"): [0.8, 0.8, 0.8],
    }
    comparison = compare(make_study(tmp_path, values, baseline="A"))
    # mean ranks over conditions are 2, 1.5 and 2.5; their ranks in each seed are 2, 1 and 3
    assert [comparison.find_rank(method) for method in "ABC"] == [2, 1, 3]
    notes = " ".join(make_metric_table(comparison, "name").notes)
    assert (
        "Rank: average over 3 seeds, 1 for the best. Within a seed, methods are ranked by" in notes
    )


@table_test("value", [math.inf, -math.inf, math.nan])
def test_a_metric_that_is_not_finite_is_a_diverged_run(tmp_path, value):
    """To leave it out would favour the method that has it."""
    values = {**VALUES, ("Ditto", "none"): [0.90, value, 0.94]}
    comparison = compare(make_study(tmp_path, values))
    entry = comparison.entries["Ditto", "none"]
    assert (entry.mean, entry.diverged, entry.unfinished) == (None, ("1",), {})
    assert math.isnan(comparison.find_difference("Ditto", "none").p_value)
    assert comparison.find_worst("Ditto").has_diverged
    table = make_metric_table(comparison, "name")
    assert table.rows[0][1] == "1 of 3 diverged"


def test_a_finished_run_without_the_metric_is_said(tmp_path):
    plan = {"metrics": ["test/hybrid/accuracy"], "baseline": {"algorithm": "FedAvg"}}
    study = make_study(tmp_path, compare=plan)
    rows, *_ = read_rows(study)
    rows = [
        {**row, "test/hybrid/accuracy": 0.5} if row["algorithm"] == "FedAvg" else row
        for row in rows
    ]
    layout = arrange(study.spec.axes, study.spec.compare, rows)
    comparison = compare_methods("test/hybrid/accuracy", layout, rows, {})
    table = make_metric_table(comparison, "name")
    assert table.rows[0][1] == "no value"
    assert "12 finished runs without a value of this metric." in table.notes


def test_methods_and_conditions_have_the_order_of_their_axes(tmp_path):
    values = {(a, c): [0.5, 0.6] for a in "abc" for c in "xyz"}
    left_out = [{"algorithm": "a", "attack": "x"}, {"algorithm": "b", "attack": "x"}]
    layout = compare(make_study(tmp_path, values, baseline="a", leave_out=left_out)).layout
    assert layout.conditions == ("x", "y", "z")
    axes = make_study(tmp_path, values, baseline="a", leave_out=left_out).spec.axes
    rows = [{"attack": "x", "algorithm": "c", "seed": "0"}, {"attack": "y", "algorithm": "a"}]
    assert arrange(axes, None, rows).methods == ("a", "c")


def test_a_declared_direction_wins_over_a_guess(tmp_path):
    metric = "test/personal/skill"
    study = make_study(tmp_path, compare={"metrics": [{"metric": metric, "mode": "min"}]})
    rows, *_ = read_rows(study)
    rows = [{n.replace("accuracy", "skill"): v for n, v in row.items()} for row in rows]
    layout = arrange(study.spec.axes, study.spec.compare, rows)
    with pytest.raises(StudyError, match=r"`compare\.metrics` to be a metric with a known dir"):
        compare_methods(metric, layout, rows, {})
    comparison = compare_methods(metric, layout, rows, {}, study.spec.compare.directions)
    assert not comparison.is_higher_better
    assert comparison.find_worst("Ditto").condition == "none"


def test_a_metric_twice_is_refused(tmp_path):
    with pytest.raises(StudyError, match=r"`compare\.metrics` to have each metric once but got"):
        make_study(tmp_path, compare={"metrics": [ACCURACY, ACCURACY]})


# Labels


@table_test("label", ["worst case", "rank", "all", "diverged"])
@pytest.mark.slow
def test_labels_that_are_words_of_the_report(tmp_path, label):
    values = {
        (m, c): [0.5 + 0.1 * place, 0.6] for place, m in enumerate("abc") for c in ("x", label)
    }
    study = make_study(tmp_path, values, baseline="a")
    comparison = compare(study)
    table = make_metric_table(comparison, "name")
    assert table.header == ("algorithm", "x", label, "worst case", "rank")
    assert len(table.rows[0]) == 5
    page = study.report()
    heat_map = read_csv(page.parent / "pictures/heat_map_test_personal_accuracy.csv")
    assert len(heat_map) == 3 * 3
    rows = read_csv(page.parent / "comparisons.csv")
    assert {row["condition"] for row in rows} == {"x", label}


def test_axes_named_like_columns_keep_their_labels(tmp_path):
    axes = {"algorithm": {"a": {"model.lam": 1.0}, "b": {}}, "rank": {"4": {}, "8": {"x": 1}}}
    plan = {"metrics": [ACCURACY], "baseline": {"algorithm": "a"}}
    study = Study("s", ["quickstart"], axes, 2, compare=plan, options={"folder": str(tmp_path)})
    rows = [{**c.values, "seed": c.seed, "status": "done", ACCURACY: 0.5} for c in study.cells]
    rows[0]["status"] = "failed"
    write_results(study.folder, rows)
    study.report()
    table = read_csv(tmp_path / "report/tables/test_personal_accuracy.csv")
    assert [row["rank"] for row in table] == ["4", "8", "4", "8"]
    assert "rank_" in table[0]


def test_labels_with_commas_are_not_mixed_up(tmp_path):
    """The names of "x" with "y, z" and of "x, y" with "z" would both be "x, y, z"."""
    axes = {
        "algorithm": {"a": {"model.lam": 1.0}, "b": {}},
        "first": {"x": {}, "x, y": {"x": 1}},
        "second": {"z": {}, "y, z": {"y": 1}},
    }
    plan = {"metrics": [ACCURACY], "baseline": {"algorithm": "a", "first": "x, y"}}
    study = Study("s", ["quickstart"], axes, 2, compare=plan, options={"folder": str(tmp_path)})
    rows = [
        {**c.values, "seed": c.seed, "status": "done", ACCURACY: place / 100}
        for place, c in enumerate(study.cells)
    ]
    write_results(study.folder, rows)
    comparison = compare(study)
    assert comparison.layout.baseline == "a, (x, y)"
    assert len(comparison.entries) == 8
    without_baseline = arrange(study.spec.axes, None, rows)
    assert without_baseline.conditions == ("x, z", "x, (y, z)", "(x, y), z", "(x, y), (y, z)")


def test_latex_rows_that_begin_with_brackets_or_stars_are_text(tmp_path):
    """After a line break, LaTeX reads them as its arguments."""
    values = {(label, "none"): [0.5, 0.6] for label in ("[64, 32]", "*", "b")}
    table = make_metric_table(compare(make_study(tmp_path, values, baseline="b")), "name")
    rows = [line for line in table.latex().splitlines() if line.endswith(r"\\")]
    assert rows[1].startswith("{[}64, 32{]} &")
    assert rows[2].startswith("{*} &")
    assert not any(row.startswith(("[", "*")) for row in rows)


@pytest.mark.slow
def test_rows_of_two_methods_are_hidden_with_both_alone(tmp_path):
    """Without a baseline, a method may be the second one in all its comparisons."""
    text = make_study(tmp_path, baseline=None).report().read_text(encoding="utf-8")
    places = set(re.findall(r'<tr data-method="(\d \d)" data-condition', text))
    assert places == {"1 0", "2 0", "2 1"}


# Tables that were written earlier


def test_the_table_of_a_half_finished_study_is_no_result(tmp_path):
    """A table has rows of cells that were missing; they are not results without a folder."""
    status = {("Ditto", "none", 0): "missing", ("Ditto", "none", 1): "running"}
    study = make_study(tmp_path, status={**status, ("Ditto", "none", 2): "failed"})
    rows, _, from_table, _ = read_rows(study)
    assert [row["status"] for row in rows[:3]] == ["missing", "missing", "failed"]
    assert from_table == 16


def make_table_with_digests(folder, **changes):
    """Return a study of one axis without folders, whose table has hashes of its configs."""
    options = {"folder": str(folder)}
    axes = {"algorithm": {"Ditto": {"model": "Ditto"}, "FedAvg": {"model": "FedAvg"}}}
    study = Study("table", ["quickstart"], axes, seeds=2, options=options, **changes)
    result = {"test/round": 7, "test/global/accuracy": 0.5}
    rows = [
        {**cell.labels, "status": "done", "config_digest": cell.config_digest, **result}
        for cell in study.cells
    ]
    write_results(folder, rows)
    return study


@pytest.mark.slow
def test_a_row_of_another_config_is_no_result(tmp_path):
    """Only the two cells of the algorithm that changed are missing, and the report says why."""
    study = make_table_with_digests(tmp_path)
    assert len({cell.config_digest for cell in study.cells}) == 2, "seeds have no part in it"
    changed = {"Ditto": {"model": "Ditto", "model.lam": 2}, "FedAvg": {"model": "FedAvg"}}
    other = Study(
        "table", ["quickstart"], {"algorithm": changed}, 2, options={"folder": tmp_path.as_posix()}
    )
    rows, _, from_table, outdated = read_rows(other)
    assert [row["status"] for row in rows] == ["missing", "missing", "done", "done"]
    assert (from_table, outdated) == (2, 2)
    text = other.report().read_text(encoding="utf-8")
    assert "2 cells have no folder here, and a row of another config in results.csv" in text


def test_a_run_copies_rows_of_another_config_aside(tmp_path):
    """The run of one algorithm, whose cells are done, leaves the rows of the other one out."""
    folder = tmp_path / "study"
    make_table_with_digests(folder)
    earlier = (folder / "results.csv").read_bytes()
    axes = {
        "algorithm": {"Ditto": {"model": "Ditto", "model.lam": 2}, "FedAvg": {"model": "FedAvg"}}
    }
    study = Study("table", ["quickstart"], axes, 2, options={"folder": str(folder)})
    for cell in study.cells[2:]:
        own = CellFolder(folder, cell.path)
        own.write_record(CellRecord("table", cell.name, cell.values, cell.seed, cell.digest))
        write_text(own.path / "summary.json", json.dumps({"stage": "test"}))
    rows = study.run(only=["algorithm=FedAvg"])
    assert [row["status"] for row in rows] == ["missing", "missing", "done", "done"]
    (aside,) = (tmp_path / "study_aside").iterdir()
    assert aside.read_bytes() == earlier
    study.run(only=["algorithm=FedAvg"])
    assert len([*(tmp_path / "study_aside").iterdir()]) == 1


def test_a_run_copies_rows_of_removed_labels_aside(tmp_path):
    """Without their folders, the table is all that is left of them."""
    folder = tmp_path / "study"
    make_table_with_digests(folder)
    earlier = (folder / "results.csv").read_bytes()
    options = {"folder": str(folder), "recorded": str(folder / "results.csv")}
    axes = {"algorithm": {"FedAvg": {"model": "FedAvg"}}}
    for _ in range(2):
        rows = Study("table", ["quickstart"], axes, 2, options=options).run()
        assert [row["test/round"] for row in rows] == [7, 7]
        (aside,) = (tmp_path / "study_aside").iterdir()
        assert aside.read_bytes() == earlier


def test_the_result_of_a_cell_that_a_kill_left_unfinished_stays_beside_the_study(tmp_path):
    """The row of a committed table was replaced by one without numbers, and no copy was kept."""
    folder, cells = tmp_path / "study", "algorithm,seed,status,loss\nDitto,0,done,0.5\n"
    axes = {"algorithm": {"Ditto": {"model": "Ditto"}, "FedAvg": {"model": "FedAvg"}}}
    options = {"folder": str(folder), "recorded": str(tmp_path / "recorded.csv")}
    (tmp_path / "recorded.csv").write_text(cells)
    (folder / "algorithm=FedAvg" / "seed=0").mkdir(parents=True)
    (folder / "results.csv").write_text(f"{cells}FedAvg,0,done,0.25\n")
    Study("table", ["quickstart"], axes, 1, options=options).run(only=["algorithm=Ditto"])
    assert "FedAvg,0,missing,\n" in (folder / "results.csv").read_text()
    (aside,) = (tmp_path / "study_aside").iterdir()
    assert "FedAvg,0,done,0.25\n" in aside.read_text()


def test_rows_of_a_table_without_folders_are_written_again_with_the_same_bytes(tmp_path):
    study = make_table_with_digests(tmp_path)
    before = (tmp_path / "results.csv").read_bytes()
    assert [row["test/round"] for row in study.rows()] == [7] * 4
    assert [row["seed"] for row in study.rows()] == [0, 1] * 2, "integers, as those of folders"
    write_results(tmp_path, study.rows())
    assert (tmp_path / "results.csv").read_bytes() == before


def test_a_row_survives_another_name_of_a_layer_and_other_comments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = make_table_with_digests(tmp_path)
    text = find_configs()["quickstart"].read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(f"# mine\n{text}", encoding="utf-8")
    axes = {"algorithm": {"Ditto": {"model": "Ditto"}, "FedAvg": {"model": "FedAvg"}}}
    other = Study("table", ["mine.yaml"], axes, 2, options={"folder": str(tmp_path)})
    assert other.cells[0].digest != study.cells[0].digest
    assert [row["status"] for row in read_rows(other)[0]] == ["done"] * 4


def test_rows_of_a_tuned_study_without_its_trials_are_results(tmp_path):
    """Without its trials, nobody knows the chosen values, so that no hash can differ."""
    tune = {
        "per": "algorithm",
        "budget": 3,
        "sampler": "grid",
        "space": {"Ditto": {"model.lam": [1, 2, 3]}},
        "metric": "val/personal/accuracy",
    }
    make_table_with_digests(tmp_path)
    study = Study(
        "table",
        ["quickstart", {"trainer.max_epochs": 2}],
        {"algorithm": {"Ditto": {"model": "Ditto"}, "FedAvg": {"model": "FedAvg"}}},
        2,
        options={"folder": str(tmp_path)},
        tune=tune,
    )
    rows, _, from_table, outdated = read_rows(study)
    assert [row["status"] for row in rows] == ["done", "done", "missing", "missing"]
    assert (from_table, outdated) == (2, 2), "FedAvg has no space, so that its config is known"


@table_test(
    "text",
    [
        "algorithm,attack,status\nDitto,none,done\n",
        "algorithm,attack,seed,status\nDitto,none,0,perfect\n",
        "algorithm,attack,seed,status,x\nDitto,none,0,done,much\n",
        "algorithm,attack,seed\nDitto,none,0\n",
    ],
)
def test_a_damaged_table_is_one_sentence(tmp_path, text):
    study = make_study(tmp_path)
    (tmp_path / "results.csv").write_text(text, encoding="utf-8")
    with pytest.raises(
        StudyError, match=r"Expected the study's results\.csv to (be a table|have states)"
    ):
        study.report()


def test_labels_survive_the_table(tmp_path):
    values = {(label, "none"): [0.5, 0.6] for label in ("=1+1", "'quoted", "-x", "b")}
    rows, _, from_table, _ = read_rows(make_study(tmp_path, values, baseline="b"))
    assert from_table == 8
    assert [row["algorithm"] for row in rows[::2]] == ["=1+1", "'quoted", "-x", "b"]


@pytest.mark.slow
def test_a_table_of_another_tuning_is_left_out(tmp_path):
    pytest.importorskip("optuna", reason="`tune` of a study uses it")
    plan = {
        "per": "algorithm",
        "budget": 2,
        "space": {"Ditto": {"model.lam": [0.01, 10]}},
        "metric": "val/personal/accuracy",
    }
    study = make_study(tmp_path, tune=plan)
    lines = "algorithm,trial,status,val/personal/loss,is_chosen,model.mu\nDitto,0,done,0.9,1,0.1\n"
    (tmp_path / "tuning.csv").write_text(lines, encoding="utf-8")
    text = study.report().read_text(encoding="utf-8")
    assert "no tuning.csv of all its arguments yet" in text


@pytest.mark.slow
def test_a_grid_has_as_many_trials_as_combinations(tmp_path):
    plan = {
        "per": "algorithm",
        "budget": 20,
        "sampler": "grid",
        "space": {"Ditto": {"model.lam": [1, 2, 3]}, "FedAvg": {"model.lam": [1, 2]}},
        "metric": "val/personal/accuracy",
    }
    study = make_study(tmp_path, tune=plan)
    lines = ["algorithm,trial,status,val/personal/accuracy,is_chosen,model.lam"]
    lines += [f"Ditto,{n},done,0.{n},{int(n == 2)},{n + 1}" for n in range(3)]
    (tmp_path / "tuning.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    study.report()
    ditto, fedavg = read_csv(tmp_path / "report/tables/tuned.csv")
    assert (ditto["trials"], fedavg["trials"]) == ("3 of 3", "0 of 2")
    lines += [f"FedAvg,{n},missing,,0,{n + 1}" for n in range(2)]  # proposed, and not run yet
    (tmp_path / "tuning.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    study.report()
    assert read_csv(tmp_path / "report/tables/tuned.csv")[1]["trials"] == "0 of 2"


@pytest.mark.slow
def test_trials_of_another_space_are_no_trials_of_the_plan(tmp_path):
    """The table named the new space beside the trials and the choice of the old one."""
    plan = {
        "per": "algorithm",
        "budget": 2,
        "sampler": "grid",
        "space": {"Ditto": {"model.lam": [3, 4]}},  # 1 and 2 in tuning.csv
        "metric": "val/personal/accuracy",
    }
    study = make_study(tmp_path, tune=plan)
    lines = ["algorithm,trial,status,val/personal/accuracy,is_chosen,model.lam"]
    lines += [f"Ditto,{n},done,0.{n + 1},{n},{n + 1}" for n in range(2)]
    (tmp_path / "tuning.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "tuning" / "algorithm=Ditto" / "trial=000").mkdir(parents=True)
    study.report()
    (row,) = read_csv(tmp_path / "report/tables/tuned.csv")
    assert (row["trials"], row["chosen"]) == ("0 of 2", "nothing yet")


# Pictures


def test_a_method_has_one_colour_in_all_pictures(tmp_path):
    comparison = compare(make_study(tmp_path))
    pictures = {picture.name.split("_")[0]: picture for picture in draw_pictures([comparison])}
    ranks = pictures["ranks"].figure.axes[0]
    points = [line for line in ranks.lines if line.get_marker() in [*MARKERS]]
    order = [row["method"] for row in pictures["ranks"].rows]
    expected = {m: line_style(place) for place, m in enumerate(comparison.layout.methods)}
    assert order != list(comparison.layout.methods)
    for method, line in zip(order, points, strict=True):
        assert line.get_color() == expected[method]["color"]
        assert line.get_marker() == expected[method]["marker"]
    worst = compare(make_study(tmp_path), WORST)
    legend = draw_fronts(comparison, worst).figure.legends[0]
    colours = {t.get_text(): h.get_color() for t, h in zip(legend.texts, legend.legend_handles)}
    assert colours == {method: style["color"] for method, style in expected.items()}
    for method, style in expected.items():
        assert f'fill="{style["color"]}"/></svg> {method}<' in render_fronts(comparison, worst)


@table_test(
    ["values", "texts"],
    [
        ([0.5, 0.0, 0.9996], [".500", "0.000", "1.000"]),
        ([3e7, 2.5, 12.0], ["3.0e7", "2", "12"]),
        ([2e-5, 1e-5, 0.0], ["2.0e−5", "1.0e−5", "0.0e0"]),
        ([-0.5, 0.25, 0.0], ["−0.500", ".250", "0.000"]),
    ],
)
def test_numbers_of_a_heat_map_fit_their_fields(tmp_path, values, texts):
    table = {(m, "none"): [value, value] for m, value in zip("abc", values)}
    fields = list_fields(compare(make_study(tmp_path, table, baseline="a")))
    assert [fields[method, "none"].text for method in "abc"] == texts


def test_points_without_a_worst_tenth_are_counted(tmp_path):
    means, worst = (compare(make_study(tmp_path), metric) for metric in (ACCURACY, WORST))
    entry = replace(worst.entries["Ditto", "none"], values={})
    worst = replace(worst, entries={**worst.entries, ("Ditto", "none"): entry})
    assert (
        draw_fronts(means, worst).note
        == "1 point is missing: a run diverged, or none has a result."
    )


@pytest.mark.slow
def test_each_column_of_panels_has_numbers_below_it(tmp_path):
    values = {("a", f"c{c}"): [0.5 + 0.01 * c, 0.6] for c in range(8)}
    study = make_study(tmp_path, values, baseline="a")
    figure = draw_fronts(compare(study), compare(study, WORST)).figure
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == 8
    for axes in panels[2:]:  # six in a row
        assert any(label.get_visible() for label in axes.get_xticklabels())


@pytest.mark.slow
def test_one_method_of_one_seed_is_reported(tmp_path):
    study = make_study(tmp_path, {("a", "x"): [0.5], ("a", "y"): [0.6]}, baseline="a")
    text = study.report().read_text(encoding="utf-8")
    assert "No test: it needs two methods" in text
    assert "Paired comparisons" not in text


@pytest.mark.slow
@pytest.mark.parametrize("end", ["aside", "again"])
def test_budgets_of_runs_beside_the_folder_of_a_study_count(tmp_path, end):
    """A changed config moved private runs aside, and the page forgot what they had spent."""
    study = make_study(tmp_path / "study")
    cell = study.cells[0].path
    config = with_changes({"federation.privacy": {"delta": 0.01}})
    write_run(study.folder / cell, config, extra={"privacy/epsilon": 1.5})
    write_run(tmp_path / f"study_{end}" / cell / "20261201", config, extra={"privacy/epsilon": 2.5})
    text = html.unescape(study.report().read_text(encoding="utf-8"))
    assert re.search(r"2 private runs read one data set.*?ε = 4 at δ = 0\.02", text)
