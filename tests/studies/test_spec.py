"""Study files: each mistake is one sentence, and values are read as the author wrote them."""

import copy
import re

import pytest
import yaml

from pl_fed.studies.axes import SHORT_NAMES, read_axes
from pl_fed.studies.cells import expand
from pl_fed.studies.metrics import find_direction
from pl_fed.studies.plans import Choices, Interval
from pl_fed.studies.readers import StudyError
from pl_fed.studies.results import read_table
from pl_fed.studies.spec import read_spec, read_spec_file
from pl_fed.studies.yaml_texts import load_study

DITTO = {"class_path": "pl_fed.clients.Ditto", "init_args": {"lam": 1}}
STUDY = {
    "name": "attacks",
    "base": ["quickstart", {"trainer.max_epochs": 3}],
    "axes": {
        "algorithm": {"ditto": "ditto", "fedavg": ["fedavg", {"model.local_steps": 2}]},
        "attack": {"none": {}, "labels": ["label_poisoning"]},
        "aggregator": ["Mean", "Median"],
    },
    "seeds": 2,
    "leave_out": [{"attack": "none", "aggregator": "Median"}],
    "tune": {
        "per": "algorithm",
        "on": {"attack": "none"},
        "budget": 4,
        "space": {"ditto": {"model.lam": [0.1, 1, "log"]}, "all": {"model.task": ["a", "b"]}},
        "metric": "val/personal/accuracy",
    },
    "compare": {"metrics": ["test/global/accuracy"], "baseline": {"algorithm": "fedavg"}},
}

MISTAKES = {  # path of the value → wrong value, a part of the sentence
    "name": [
        (None, "`name` to be a text but got nothing"),
        ("a/b", "`name` to have only letters, digits, _, . and - but got a/b"),
    ],
    "bases": [
        (["quickstart"], "only the keys name, base, axes, seeds,"),
        (1, "did you mean base?"),
    ],
    "base": [
        (["quickstrat"], "`base` to name configs but got quickstrat: there is no such file"),
        (["quickstrat"], "(did you mean quickstart?)"),
        (3, "`base` to be names of configs, values of arguments by their paths, or both but got 3"),
        ({"seed_everything": 3}, "got seed_everything: set the study's `seeds`"),
        ({"trainer": {"default_root_dir": "x"}}, "set `options.folder`"),
        (
            {"model lam": 3},
            "`base` to have paths of arguments, such as model.lam, but got model lam",
        ),
        ({"model.lam": float("nan")}, "`base.model.lam` to be a number but got NaN"),
    ],
    "axes": [
        (["algorithm"], "`axes` to be a mapping but got [algorithm]"),
        (
            {"seed": [1]},
            "letters, digits, _, . and -, other than seed, status, cell, config_digest",
        ),
        ({"a b": [1]}, "but got a b"),
        ({"lambda": [1, 2]}, "`axes.lambda` to be a mapping of labels, or to be named by the path"),
        ({"lr": [1], "model.optimizer.lr": [2]}, "which lr=1 and model.optimizer.lr=2 both set"),
        (
            {"algorithm": [DITTO], "lam": [2]},
            "got model.lam, which algorithm=Ditto(lam=1) and lam=2",
        ),
    ],
    "axes.algorithm": [
        ({}, "`axes.algorithm` to have at least one value but got an empty mapping"),
        ({"x": ["dito"]}, "`axes.algorithm.x` to name configs but got dito"),
        ({"x": 1}, "`axes.algorithm.x` to be names of configs"),
        ({"x": {}, "X": {}}, "labels that differ in more than case but got x and X"),
        ({" ": {}}, "labels of printable text but got ' '"),
    ],
    "axes.aggregator": [
        ([], "`axes.aggregator` to have at least one value but got an empty list"),
        (["Mean", "Mean"], "each value once but got Mean: leave one of them out"),
        ([{"x": 1}], "be values of an argument but got a mapping of x: write a mapping of labels"),
        ("Mean", "`axes.aggregator` to be a mapping but got Mean"),
    ],
    "seeds": [
        (0, "`seeds` to be an integer of at least 1 but got 0"),
        (True, "but got true"),
        ([1, 1], "`seeds` to have each seed once but got 1"),
        ([-1], "`seeds` to be an integer of at least 0 but got -1"),
        ([2**32], "`seeds` to be integers of at most 4294967295"),
        ([], "`seeds` to have at least one value but got an empty list"),
    ],
    "leave_out": [
        (
            [{"atack": "none"}],
            "name axes of the study (algorithm, attack, aggregator, seed) but got",
        ),
        ([{"atack": "none"}], "atack (did you mean attack?)"),
        ([{"attack": "non"}], "`leave_out[0].attack` to be one of none, labels but got non"),
        ([{}], "`leave_out[0]` to name at least one axis but got an empty mapping"),
        ([3], "`leave_out[0]` to be a mapping of axes to labels but got 3"),
        (
            [{"attack": "none"}, {"seed": 7}],
            "`leave_out[1]` to match at least one cell but got seed=7",
        ),
        ([{"seed": [0, 1]}], "`leave_out` to leave at least one cell"),
    ],
    "options": [
        ({"worker": 1}, "(did you mean workers?)"),
        ({"workers": 0}, "`options.workers` to be an integer of at least 1 but got 0"),
        ({"keep_checkpoints": "yes"}, "`options.keep_checkpoints` to be true or false but got yes"),
        ({"folder": ""}, "`options.folder` to be a text"),
    ],
    "tune.per": [
        ("lr", "`tune.per` to be one of the axes algorithm, attack, aggregator but got lr")
    ],
    "tune.budget": [(0, "`tune.budget` to be an integer of at least 1 but got 0")],
    "tune.sampler": [("tpo", "`tune.sampler` to be one of grid, random, tpe but got tpo")],
    "tune.metric": [("test/global/loss", "a metric of the validation, such as val/global/loss")],
    "tune.on": [({"attack": "x"}, "`tune.on.attack` to be one of none, labels but got x")],
    "tune.space": [
        ({}, "`tune.space` to have at least one label with arguments"),
        ({"dito": {}}, "`tune.space` to have only the keys ditto, fedavg, all but got dito"),
        ({"all": {"model.lam": [2, 1]}}, "`tune.space.all.model.lam` to have bounds low < high"),
        ({"all": {"model.lam": [0, 1, "log"]}}, "to have bounds 0 < low < high"),
    ],
    "compare.metrics": [(["accuracy"], "`compare.metrics` to be metrics such as test/personal")],
    "compare.baseline": [({"algorithm": "x"}, "`compare.baseline.algorithm` to be one of ditto,")],
}


def changed(path, value):
    """Return the study with one value replaced."""
    study = copy.deepcopy(STUDY)
    *sections, name = path.split(".")
    place = study
    for section in sections:
        place = place[section]
    place[name] = value
    return study


@pytest.mark.parametrize("path", MISTAKES)
def test_mistake_is_one_sentence(path):
    for value, part in MISTAKES[path]:
        with pytest.raises(StudyError) as caught:
            expand(read_spec(changed(path, value)))
        sentence = str(caught.value)
        assert part in sentence, value
        assert sentence.startswith("Expected argument `")
        assert sentence.endswith(".")
        assert "\n" not in sentence


def test_study_is_read():
    spec = read_spec(STUDY)
    assert spec.seeds == (0, 1)
    assert [axis.labels for axis in spec.axes] == [
        ("ditto", "fedavg"),
        ("none", "labels"),
        ("Mean", "Median"),
    ]
    assert spec.tune.space == {
        "ditto": {"model.lam": Interval(0.1, 1.0, "log")},
        "all": {"model.task": Choices(("a", "b"))},
    }
    assert str(spec.folder) == "runs/attacks"
    assert len(expand(spec)) == 2 * (2 * 2 - 1) * 2


def test_number_of_a_selection_is_a_label_in_any_form():
    study = {"name": "numbers", "base": "quickstart"}
    spec = read_spec({**study, "axes": {"lr": [1.0, 0.5]}, "leave_out": [{"lr": 1.0}]})
    assert {cell.values["lr"] for cell in expand(spec)} == {"0.5"}
    spec = read_spec({**study, "axes": {"x": {"1.0": {}, "1": {}}}, "leave_out": [{"x": 1.0}]})
    assert {cell.values["x"] for cell in expand(spec)} == {"1"}, "a label as it stands comes first"
    text = "{axes: {x: {1e-3: {}, 0.10: {}, 20.0: {}, 3: {}}}, leave_out: [{x: [1e-3, 0.10, 20]}]}"
    spec = read_spec({**study, **load_study(text)})
    assert {cell.values["x"] for cell in expand(spec)} == {"3"}


TEXT = """
name: texts
base: quickstart
axes:
  attack: {on: {}, no: {model.lam: 1e-3}, 0.1: {}, null: {}}
  lr: [1e-1, 1, off, true, null]
leave_out: [{attack: [no, null], lr: [off, true, null]}]
"""


def test_labels_are_texts(tmp_path):
    """YAML 1.1 would make truth values of on, off and no, and a text of 1e-3."""
    (tmp_path / "study.yaml").write_text(TEXT)
    spec = read_spec_file(tmp_path / "study.yaml")
    attack, lr = spec.axes
    assert attack.labels == ("on", "no", "0.1", "null")
    assert lr.labels == ("0.1", "1", "off", "true", "null")
    assert attack.changes["no"].overrides == {"model.lam": 0.001}
    assert [word for label in lr.labels for word in lr.changes[label].words()] == [
        f"--model.optimizer.lr={value}" for value in ("0.1", "1", "off", "true", "null")
    ]
    assert len(expand(spec)) == 4 * 5 - 2 * 3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: a\nname: b", "`name` appears twice in one section (lines 1 and 2)"),
        ("axes: {attack: {x: {}, x: {}}}", "`x` appears twice in one section"),
        ("- a", "to be a file with the keys name, base,"),
        ("", "to be a file with the keys"),
        ("a: [", "(line 1)"),
        ("a: &x [*x]", "an anchor contains itself"),
    ],
)
def test_broken_file_is_one_sentence(tmp_path, text, part):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(StudyError, match="Expected argument `study` to be a file") as caught:
        read_spec_file(path)
    assert part in str(caught.value)


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(StudyError, match="`study` to be a YAML file but found none at"):
        read_spec_file(tmp_path / "none.yaml")


def test_short_names_are_arguments_of_a_config():
    with open("configs/quickstart.yaml", encoding="utf-8") as file:
        sections = yaml.safe_load(file)
    for path in SHORT_NAMES.values():
        assert path.split(".")[0] in sections


def test_class_on_an_axis_is_named_by_its_arguments():
    krum = {"class_path": "pl_fed.aggregators.Krum", "init_args": {"num_selected": 3}}
    spec = read_spec({"name": "a", "base": "quickstart", "axes": {"aggregator": ["Mean", krum]}})
    assert spec.axes[0].labels == ("Mean", "Krum(num_selected=3)")


def test_study_extends_another_file(tmp_path):
    (tmp_path / "first.yaml").write_text(
        "name: first\nbase: [quickstart]\nseeds: 2\naxes: {lr: [0.1, 0.2], attack: {none: {}}}\n"
    )
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "second.yaml").write_text(
        "extends: ../first.yaml\nname: second\naxes: {lam: [1.0], lr: [0.3]}\n"
    )
    (tmp_path / "third.yaml").write_text("extends: inner/second.yaml\nseeds: [7]\n")
    first, second, third = (
        read_spec_file(tmp_path / name)
        for name in ("first.yaml", "inner/second.yaml", "third.yaml")
    )
    assert [axis.name for axis in second.axes] == ["lr", "attack", "lam"]
    assert second.axes[0].labels == ("0.3",)
    assert (second.name, second.seeds, second.base) == ("second", (0, 1), first.base)
    assert (third.axes, third.seeds, third.name) == (second.axes, (7,), "second")
    assert first.axes[0].labels == ("0.1", "0.2"), "the extended file keeps its axes"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("extends: none.yaml", "`extends` to be a YAML file but found none at"),
        ("extends: study.yaml", "`extends` to name another file, which does not extend this one"),
        ("extends: loop.yaml", "`extends` to name another file, which does not extend this one"),
        ("extends: [a]", "`extends` to"),
        ("extends: parent.yaml\naxes: [1]", "`axes` to be a mapping"),
    ],
)
def test_wrong_extension_is_one_sentence(tmp_path, text, part):
    (tmp_path / "loop.yaml").write_text("extends: study.yaml")
    (tmp_path / "parent.yaml").write_text("name: a\nbase: quickstart")
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(StudyError, match=re.escape(part)) as error:
        read_spec_file(tmp_path / "study.yaml")
    assert "\n" not in str(error.value)


def test_a_declared_direction_wins_over_the_end_of_a_name():
    declared = {"explained_var": True, "psnr_gap": True, "accuracy": True}
    for name in ("explained_var", "psnr_gap"):
        assert find_direction(f"test/global/{name}", declared) is True
        assert find_direction(f"test/global/{name}_std", declared) is False
    assert find_direction("test/global/accuracy_gap", declared) is False


def test_columns_of_a_recorded_table_have_any_order(tmp_path):
    for columns in ("algorithm,attack", "attack,algorithm"):
        values = "Ditto,none" if columns.startswith("algorithm") else "none,Ditto"
        (tmp_path / "table.csv").write_text(f"{columns},seed,status,loss\n{values},0,done,0.5\n")
        (key,) = read_table(tmp_path / "table.csv")
        assert key == {("algorithm", "Ditto"), ("attack", "none"), ("seed", "0")}


def test_a_table_that_is_no_text_is_refused(tmp_path):
    table = tmp_path / "results.csv"
    table.write_bytes(b"algorithm,seed,status\n\x9a,0,done\n")
    with pytest.raises(StudyError, match=r"to be a table in UTF-8 but got .*results\.csv, which"):
        read_table(table)


def test_a_table_of_a_spreadsheet_begins_with_a_mark(tmp_path):
    """The first axis would have another name, and all rows be those of other cells."""
    table = tmp_path / "results.csv"
    table.write_text("algorithm,seed,status\nDitto,0,done\n", encoding="utf-8-sig")
    assert list(read_table(table)) == [{("algorithm", "Ditto"), ("seed", "0")}]


def test_numbers_of_a_table_are_labels_in_another_form(tmp_path):
    """pandas writes 1 and 0.10 as 1.0 and 0.1: their cells counted as missing, and ran again."""
    table, axes = tmp_path / "results.csv", read_axes({"model.lam": [1, "0.10", "0.5"]})
    table.write_text("model.lam,seed,status\n1.0,0,done\n0.1,0,done\n0.5,0,done\n0.7,0,done\n")
    labels = [row["model.lam"] for row in read_table(table, axes).values()]
    assert labels == ["1", "0.10", "0.5", "0.7"]


@pytest.mark.parametrize(
    ("lines", "losses"),
    [
        (["0,done,0.5", "0,done,0.50"], [0.5]),
        (["0,done,0.5", "0,failed,"], [0.5]),
        (["0,failed,", "0,done,0.5", "1,done,2.5"], [0.5, 2.5]),
        (["0,done,nan", "0,done,nan"], None),
        (["0,done,0.5", "1,done,0.5", "0,done,0.6"], "two that differ for algorithm=Ditto,seed=0"),
    ],
)
def test_cells_of_a_merged_table_have_one_row(tmp_path, lines, losses):
    """The last row of a cell replaced the others, also a failed one a result."""
    table = tmp_path / "results.csv"
    text = "".join(f"Ditto,{line}\n" for line in ["seed,status,loss", *lines])
    table.write_text(text.replace("Ditto", "algorithm", 1))
    if isinstance(losses, str):
        with pytest.raises(StudyError, match=losses):
            read_table(table)
    else:
        read = [row["loss"] for row in read_table(table).values()]
        assert read == losses or losses is None


def test_a_table_that_was_cut_off_is_refused(tmp_path):
    table = tmp_path / "results.csv"
    table.write_text("algorithm,seed,status,loss,accuracy\nDitto,0,done,0.5,1\nFedAvg,0,done,0.")
    with pytest.raises(StudyError, match="have 5 cells in each row but got 4 in row 1 of"):
        read_table(table)


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    """Runs of other configs move beside the folder: `folder: .` ended in an error of pathlib."""
    monkeypatch.chdir(tmp_path)
    assert read_spec({**STUDY, "options": {"folder": "."}}).folder == tmp_path
    assert str(read_spec({**STUDY, "options": {"folder": "runs/b"}}).folder) == "runs/b"
