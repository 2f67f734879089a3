"""Reading run folders, and refusing or skipping invalid ones."""

import itertools
import shutil
from pathlib import Path

import pytest
import yaml
from run_folders import CONFIG, read_table, with_changes, write_run, write_table

from pl_fed.command.report import report
from pl_fed.reports import tables
from pl_fed.reports.group import group_runs, main_metric
from pl_fed.reports.run import NoFitError, find_runs, read_run, sort_models


def test_run_is_read_from_its_files(tmp_path):
    run = read_run(write_run(tmp_path / "a", byzantine=[2]))
    assert run.name == "a"
    assert run.config == CONFIG
    assert run.engine == "stacked"
    assert run.num_rounds == 4
    assert run.has_test
    assert run.models("val") == run.models("test") == ["personal", "global"]
    assert run.curve("train/loss") == {0: 2.0, 1: 1.75, 2: 1.5, 3: 1.25}
    assert run.curve("val/global/accuracy") == pytest.approx({1: 0.1, 3: 0.2})
    assert run.final("test/personal/accuracy") == 0.5
    assert run.final("test/local/accuracy") is None
    assert run.clients["personal_accuracy"].tolist() == [0.5, 0.75, 1.0, 0.25]
    assert run.benign.tolist() == [True, True, False, True]
    assert run.classes["class"].tolist() == [0, 1] * 4


def test_byzantine_share_counts_byzantine_clients(tmp_path):
    """The adversary is given by ids, or by a fraction that is rounded down."""
    attack = {"federation.adversary.attack": {"class_path": "pl_fed.attacks.RandomLabels"}}
    ids = with_changes({**attack, "federation.adversary.ids": [2], "data.num_clients": None})
    fraction = with_changes({**attack, "federation.adversary.fraction": 0.4})
    for name, config in (("ids", ids), ("fraction", fraction)):
        run = read_run(write_run(tmp_path / name, config, byzantine=[2]))
        assert (run.num_clients, run.byzantine_share) == (4, 0.25)


def test_validation_table_determines_the_byzantine_share(tmp_path):
    attack = {"class_path": "pl_fed.attacks.RandomLabels"}
    config = with_changes(
        {"federation.adversary.attack": attack, "federation.adversary.fraction": 0.4}
    )
    folder = write_run(tmp_path / "a", config, tested=False)
    assert read_run(folder).byzantine_share == 0.4, "as configured"
    rows = [{"client": k, "byzantine": int(k == 1), "val_samples": 3} for k in range(5)]
    write_table(folder / "per_client_validation.csv", rows)
    run = read_run(folder)
    assert (run.num_clients, run.byzantine_share, run.clients) == (5, 0.2, {})


def test_models_are_sorted():
    models = sort_models(["hybrid_by_test_data", "global", "a", "hybrid", "personal", "a"])
    assert models == ["personal", "global", "hybrid", "a", "hybrid_by_test_data"]


def test_killed_run_has_its_finished_rounds(tmp_path):
    """Tables of an earlier test do not belong to a resumed run."""
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:3]) + "2,1.5,3")  # torn apart
    run = read_run(folder)
    assert not run.has_test
    assert run.num_rounds == 2
    assert run.curve("time/round") == {0: 0.5, 1: 0.5}
    assert (run.clients, run.classes) == ({}, {})


def test_test_of_an_earlier_round_is_a_test_until_the_run_goes_on(tmp_path):
    """As that of the best round: its row follows those of later rounds."""
    folder = write_run(tmp_path / "a")
    *trained, tested = read_table(folder / "metrics.csv")
    write_table(folder / "metrics.csv", [*trained, {**tested, "round": 2}])
    run = read_run(folder)
    assert run.has_test
    assert (run.num_rounds, len(run.clients["byzantine"])) == (4, 4)
    again = {**tested, "round": 1, "test/global/loss": 0.125}
    write_table(folder / "metrics.csv", [*trained, tested, again])
    assert read_run(folder).final("test/global/loss") == 0.125, "as in per_client.csv"
    more = {**trained[-1], "round": 4}
    write_table(folder / "metrics.csv", [*trained, {**tested, "round": 2}, more])
    assert not read_run(folder).has_test


@pytest.mark.parametrize(
    ("limits", "rounds", "row", "finished"),
    [
        ({"max_epochs": 4}, 4, {"round": 4}, True),
        ({"max_epochs": 4}, 4, None, True),
        ({"max_epochs": 4}, 3, None, False),
        ({"max_epochs": 9, "max_steps": 3}, 3, None, True),
        ({"max_epochs": 9}, 3, {"round": 3}, True),
        ({"max_epochs": 9}, 3, {"round": 3, "test/global/loss": 1.0}, True),
        ({"max_epochs": -1, "max_steps": -1}, 3, None, False),
    ],
    ids=[
        *("no client to test", "no test", "killed", "all steps", "early, no client to test"),
        *("early", "no limit"),
    ],
)
def test_run_is_finished_at_its_limits_or_with_a_test(tmp_path, limits, rounds, row, finished):
    """A test without samples writes a row with only its round."""
    config = with_changes({f"trainer.{name}": value for name, value in limits.items()})
    folder = write_run(tmp_path / "a", config, rounds=rounds, tested=False)
    if row:
        write_table(folder / "metrics.csv", [*read_table(folder / "metrics.csv"), row])
    run = read_run(folder)
    assert (run.num_rounds, run.has_test, run.is_finished) == (rounds, row is not None, finished)


def test_run_from_python_has_no_config(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").unlink()
    (folder / "engine.json").write_text("{")
    run = read_run(folder)
    assert run.config == {}
    assert run.engine is None


def test_nan_and_text_cells_are_skipped(tmp_path):
    folder = write_run(tmp_path / "a")
    rows = [{"round": 0, "val/global/loss": "nan", "a": "inf"}, {"round": "x", "a": 3}]
    write_table(folder / "metrics.csv", rows)
    assert read_run(folder).rows == {0: {"a": float("inf")}}


def test_runs_are_found_once_in_nested_folders(tmp_path):
    for name in ("b", "deep/er/a", "c"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "c" / "logs").mkdir()
    shutil.copy(tmp_path / "runs" / "b" / "metrics.csv", tmp_path / "runs" / "c" / "logs")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    runs, skipped = find_runs([tmp_path / "runs", tmp_path / "runs" / "c"])
    assert [run.name for run in runs] == ["b", "c", "a"], "each run once"
    assert skipped == []


def test_links_to_runs_are_followed(tmp_path):
    """Links lead to runs outside the folder. Each run is read once."""
    write_run(tmp_path / "elsewhere" / "a")
    write_run(tmp_path / "runs" / "b")
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "elsewhere" / "a")
    runs, skipped = find_runs([tmp_path / "runs"])
    assert {run.folder.resolve().name for run in runs} == {"a", "b"}
    assert len(runs) == 2
    assert skipped == []


@pytest.mark.parametrize("name", ["secret", "metrics.csv", "per_client.csv"])
def test_unreadable_runs_are_skipped_and_listed(tmp_path, monkeypatch, name):
    write_run(tmp_path / "a" / "good")
    write_run(tmp_path / "b" / "secret")
    unreadable = tmp_path / "b" / "secret"
    with monkeypatch.context() as patched:
        for method in ("iterdir", "open"):
            original = getattr(Path, method)

            def refuse(path, *arguments, original=original, **options):
                if path == unreadable or path == unreadable / name:
                    raise PermissionError(13, "Permission denied", str(path))
                return original(path, *arguments, **options)

            patched.setattr(Path, method, refuse)
        if name == "secret":
            (unreadable / "metrics.csv").unlink()
        runs, skipped = find_runs([tmp_path])
        assert [run.name for run in runs] == ["good"]
        assert len(skipped) == 1
        with pytest.raises(NoFitError, match="secret"):
            find_runs([tmp_path / "b"])


def test_later_validation_adds_no_round(tmp_path):
    """A validation after a fit has the number of rounds as its round, and adds none."""
    folder = write_run(tmp_path / "a", tested=False)
    rows = read_table(folder / "metrics.csv")
    write_table(folder / "metrics.csv", [*rows, {"round": 4, "val/global/accuracy": 0.5}])
    assert read_run(folder).num_rounds == 4


def test_earlier_configs_are_read_by_round(tmp_path):
    folder = write_run(tmp_path / "a", with_changes({"model.init_args.lam": 1.0}))
    assert read_run(folder).earlier_configs == {}
    shutil.copy(write_run(tmp_path / "b") / "config.yaml", folder / "config_to_round_3.yaml")
    assert read_run(folder).earlier_configs == {3: CONFIG}


def test_config_beside_run_folders_is_no_run(tmp_path):
    write_run(tmp_path / "runs" / "mine" / "a")
    shutil.copy(tmp_path / "runs" / "mine" / "a" / "config.yaml", tmp_path / "runs" / "mine")
    runs, skipped = find_runs([tmp_path / "runs"])
    assert [run.name for run in runs] == ["a"]
    assert skipped == []


def test_runs_of_the_same_name_get_different_names(tmp_path):
    for name in ("x/a", "y/a", "y/b"):
        write_run(tmp_path / name)
    runs, _ = find_runs([tmp_path])
    assert [run.name for run in runs] == ["x/a", "y/a", "b"]


def test_folders_without_a_fit_are_skipped_and_listed(tmp_path):
    write_run(tmp_path / "fit")
    tested = write_run(tmp_path / "only_tested")
    (tested / "engine.json").unlink()
    write_table(tested / "metrics.csv", [{"round": 4, "test/global/accuracy": 0.5}])
    predicted = tmp_path / "predicted"
    predicted.mkdir()
    for name in ("config.yaml", "predictions.csv"):
        (predicted / name).write_text("a: 1\n")
    started = write_run(tmp_path / "started")
    (started / "metrics.csv").unlink()
    empty = write_run(tmp_path / "without_rounds")
    (empty / "metrics.csv").write_text("round\n")
    runs, skipped = find_runs([tmp_path])
    assert [run.name for run in runs] == ["fit"]
    assert skipped == [
        f"{tested}: only evaluated, no round was run.",
        f"{predicted}: only predictions.",
        f"{started}: no metrics.csv, so no round was run.",
        f"{empty}: no numbers in metrics.csv, so no round was run.",
    ]
    for folder in (tested, predicted, started, empty):
        with pytest.raises(ValueError, match=r"^Expected argument `runs` to hold fits but got /"):
            find_runs([tmp_path / "fit", folder])


def test_user_metric_is_no_model(tmp_path):
    names = ("val/mine", "test/mine", "test/mine/of/accuracy", "test/sizes/smallest")
    run = read_run(write_run(tmp_path / "a", extra=dict.fromkeys(names, 0.5)))
    assert run.models("test") == run.models("val") == ["personal", "global"]
    assert run.final("test/mine") == 0.5


def test_client_with_many_owners_is_read(tmp_path):
    folder = write_run(tmp_path / "a")
    rows = read_table(folder / "per_client.csv")
    write_table(folder / "per_client.csv", [row | {"owner": "7, " * 90_000} for row in rows])
    assert read_run(folder).clients["personal_accuracy"].tolist() == [0.5, 0.75, 1.0, 0.25]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *(("per_client", "byzantine"), ("per_class", "byzantine"), ("per_class", "class")),
        ("per_client_validation", "byzantine"),
    ],
)
@pytest.mark.parametrize("value", [{}, None])
def test_invalid_key_column_is_refused(tmp_path, name, column, value):
    """A text replaces a number, or the column is missing."""
    folder = write_run(tmp_path / "a", tested=name != "per_client_validation")
    rows = [{"client": k, "byzantine": 0, "class": 1, "global_accuracy": 0.5} for k in range(3)]
    write_table(folder / f"{name}.csv", rows)
    read_run(folder)
    if value is None:
        rows = [{key: value for key, value in row.items() if key != column} for row in rows]
    else:
        rows[1][column] = "oops"
    write_table(folder / f"{name}.csv", rows)
    words = rf"but got .*/a: {name}\.csv lacks a number in its column `{column}`\.$"
    with pytest.raises(NoFitError, match=words):
        find_runs([folder])


@pytest.mark.parametrize("name", ["per_client", "per_class"])
def test_truncated_table_is_refused(tmp_path, name):
    folder = write_run(tmp_path / "a")
    write_table(folder / f"{name}.csv", [{"client": k, "byzantine": 0, "class": 1} for k in "123"])
    read_run(folder)
    with (folder / f"{name}.csv").open("r+") as file:
        file.truncate(len(file.read()) - 2)
    with pytest.raises(NoFitError, match=rf"but got .*/a: {name}\.csv was cut off\.$"):
        find_runs([folder])


def test_missing_folders_and_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `runs` to be folders but got"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match=r"^Expected argument `runs` to be folders of runs"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    "content", ["a: [", "a: b", "just words", "- 1", "2026-13-01", "!!python/object:os.x {}"]
)
def test_invalid_config_is_refused(tmp_path, content):
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").write_text(content)
    with pytest.raises(
        NoFitError, match=r"but got .*/a: config\.yaml is not the config of a run\.$"
    ):
        find_runs([folder])


def test_invalid_metrics_file_is_refused(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.csv").write_bytes(b"round,train/loss\n\xff\xfe\x00")
    with pytest.raises(NoFitError, match=r"but got .*/a: metrics\.csv is not readable CSV\.$"):
        find_runs([folder])


def test_broken_runs_among_others_are_skipped_and_listed(tmp_path):
    for name in ("config", "metrics", "whole"):
        write_run(tmp_path / name)
    (tmp_path / "config" / "config.yaml").write_text("a: [")
    (tmp_path / "metrics" / "metrics.csv").write_bytes(b"round,train/loss\n\xff\xfe\x00")
    runs, skipped = find_runs([tmp_path])
    assert [run.name for run in runs] == ["whole"]
    assert skipped == [
        f"{tmp_path}/config: config.yaml is not the config of a run.",
        f"{tmp_path}/metrics: metrics.csv is not readable CSV.",
    ]


# Damaged data are left out and reported


def damage_of(run, file, change):
    path = run / file
    path.write_text(change(path.read_text()))
    return read_run(run).damage


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("per_client.csv", lambda text: f"{text}4,0,9\n", "per_client.csv has 1 damaged row"),
        ("per_client.csv", lambda text: text.replace("0.75", "0.7x"),
         "per_client.csv has 4 damaged cells"),
        ("per_client.csv", lambda text: "", "per_client.csv is missing or empty"),
        ("per_client.csv", lambda text: "".join(text.splitlines(True)[:3]),
         "per_client.csv has 2 of 4 clients"),
        ("per_class.csv", lambda text: f"{text}1\n2\n", "per_class.csv has 2 damaged rows"),
        ("metrics.csv", lambda text: text.replace("\n1,", "\n1?,"),
         "metrics.csv has 1 damaged row and 1 damaged cell"),
        ("engine.json", lambda text: "{", "engine.json cannot be read"),
    ],
)  # fmt: skip
def test_damage_is_described(tmp_path, file, change, words):
    run = write_run(tmp_path / "a")
    assert read_run(run).damage == ()
    assert damage_of(run, file, change) == (words,)


def test_owner_names_are_no_damage(tmp_path):
    run = write_run(tmp_path / "a")
    table = read_table(run / "per_client.csv")
    named = [{**row, "owner": f"Ada {row['client']}"} for row in table]
    write_table(run / "per_client.csv", named)
    assert read_run(run).damage == ()


@pytest.mark.slow
def test_page_and_command_report_damage(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    damage_of(run, "per_client.csv", lambda text: f"{text}4\n")
    path = report([str(run), "--out", str(tmp_path / "out")])
    assert f"note: {run}: per_client.csv has 1 damaged row." in capsys.readouterr().err
    note = "Damaged data, left out: a: per_client.csv has 1 damaged row."
    assert note in path.read_text(encoding="utf-8")


ATTACK = {"class_path": "pl_fed.attacks.RandomLabels", "init_args": {"redraw": True}}
ADVERSARY = {"attack": ATTACK, "fraction": 0.5, "ids": None}
MISPLACED = [
    *("text", 3, None, [], [1], {}, {3: 4}, float("nan")),
    *({"class_path": value} for value in (None, 3, [1])),
    *({"class_path": "x.Y", "init_args": value} for value in ("text", [1])),
]


def config_keys(config, parents=()):
    for key, value in config.items():
        yield (*parents, key)
        if isinstance(value, dict):
            yield from config_keys(value, (*parents, key))


@pytest.mark.slow
def test_run_with_misplaced_config_values_is_read(tmp_path):
    """Each key gets invalid values, and the report is still written."""
    changes = {"federation.adversary": ADVERSARY, "federation.monitor": "accuracy"}
    config = with_changes(changes)
    intact, run = write_run(tmp_path / "whole", config), write_run(tmp_path / "run", config)
    (run / "per_client.csv").unlink()
    for keys, value in itertools.product(list(config_keys(config)), MISPLACED):
        damaged_config = with_changes({".".join(keys): value}, config)
        (run / "config.yaml").write_text(yaml.safe_dump(damaged_config))
        runs, _ = find_runs([intact, run])
        groups = group_runs(runs)
        assert main_metric(groups, "test") == "accuracy"
        assert all(run.is_finished for run in runs)
        damaged_run = next(run for run in runs if run.name == "run")
        assert damaged_run.byzantine_share in (0.0, 0.25, 0.5, 3.0, None) or value != value
        assert tables.render_differences(groups)
        assert tables.render_configs(groups).count("<details>") == 2
