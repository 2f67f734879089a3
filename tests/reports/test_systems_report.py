"""Reports of unequal clients: time to a level, and the clients that are left out."""

import json

import pytest
from run_folders import draw_only, read_table, with_changes, write_run, write_table

from pl_fed.reports import page
from pl_fed.reports.answers import find_answers
from pl_fed.reports.group import group_runs
from pl_fed.reports.run import find_runs

OVER_TIME = "Validation over simulated time"
DROP = {"federation.systems": {"policy": "drop", "deadline": 2.0}}
PARTIAL = {"federation.systems": {"policy": "partial", "deadline": 2.0}}


def write_timed_run(folder, changes, seconds, rounds, accuracy=(0.5, 0.75, 1.0, 0.25), **options):
    """Write a run whose rounds take so many simulated seconds."""
    write_run(folder, with_changes(changes), accuracy=accuracy, **options)
    rows = read_table(folder / "metrics.csv")
    for number, row in enumerate(rows[:4], 1):
        row["systems/seconds"] = number * seconds
    write_table(folder / "metrics.csv", rows)
    clients = [
        {**row, "rounds": count}
        for row, count in zip(read_table(folder / "per_client.csv"), rounds, strict=True)
    ]
    write_table(folder / "per_client.csv", clients)


def read_answers(folder):
    groups = group_runs(find_runs([folder])[0])
    return {answer.name: answer.rows for answer in find_answers(groups)}


def test_time_to_a_level_is_the_simulated_time_of_its_round(tmp_path):
    """Both reach 0.38 in the fourth round."""
    better = (1.0, 1.0, 1.0, 1.0)
    write_timed_run(tmp_path / "a", DROP, 2.0, (4, 4, 4, 0), better)
    write_timed_run(tmp_path / "b", PARTIAL, 1.5, (4, 4, 4, 4), better)
    write_run(tmp_path / "c", with_changes({}), accuracy=better)
    rows = read_answers(tmp_path)["communication"]
    seconds = {(row["group"], row["model"]): row.get("simulated seconds") for row in rows}
    assert [seconds[group, "personal"] for group in (1, 2, 3)] == [8.0, 6.0, None]


def test_participation_has_jains_index_and_its_correlation_with_results(tmp_path):
    write_timed_run(tmp_path / "a", DROP, 2.0, (3, 2, 1, 0), (1.0, 0.75, 0.5, 0.25))
    (row,) = read_answers(tmp_path)["participation"]
    assert (row["rounds per client"], row["least"], row["most"], row["never"]) == (1.5, 0, 3, 1)
    assert row["Jain's index"] == pytest.approx(36 / (4 * 14))
    assert row["correlation with the result"] == pytest.approx(1.0)
    assert row["lowest rounds in all seeds"] is None, "one seed"


def test_clients_that_are_left_out_in_every_seed_are_counted(tmp_path):
    for seed, rounds in enumerate([(0, 5, 4, 6), (1, 7, 3, 0), (0, 9, 4, 3)]):
        write_timed_run(tmp_path / str(seed), {**DROP, "seed_everything": seed}, 2.0, rounds)
    (row,) = read_answers(tmp_path)["participation"]
    assert row["lowest rounds in all seeds"] == 0, "client 0 has more rounds than client 3 once"
    write_timed_run(tmp_path / "3", {**PARTIAL, "seed_everything": 0}, 2.0, (0, 2, 2, 2))
    write_timed_run(tmp_path / "4", {**PARTIAL, "seed_everything": 1}, 2.0, (1, 3, 3, 3))
    assert read_answers(tmp_path)["participation"][1]["lowest rounds in all seeds"] == 1


def test_byzantine_clients_do_not_count(tmp_path):
    write_timed_run(tmp_path / "a", DROP, 2.0, (3, 2, 1, 9), byzantine=[3])
    (row,) = read_answers(tmp_path)["participation"]
    assert (row["rounds per client"], row["most"]) == (2.0, 3)


def test_runs_without_a_clock_have_neither_answer_nor_picture(tmp_path, monkeypatch):
    draw_only(monkeypatch, OVER_TIME)
    write_run(tmp_path / "a")
    assert "participation" not in read_answers(tmp_path)
    groups = find_runs([tmp_path])[0]
    text = page.write(groups, tmp_path / "report").read_text(encoding="utf-8")
    assert "simulated time" not in text


@pytest.mark.slow
def test_page_draws_metrics_over_simulated_time(tmp_path, monkeypatch):
    draw_only(monkeypatch, OVER_TIME)
    write_timed_run(tmp_path / "a", DROP, 2.0, (4, 4, 4, 0))
    write_timed_run(tmp_path / "b", PARTIAL, 1.5, (4, 4, 4, 4))
    (tmp_path / "a" / "summary.json").write_text(json.dumps({}))
    runs = find_runs([tmp_path])[0]
    text = page.write(runs, tmp_path / "report").read_text(encoding="utf-8")
    assert "Validation over simulated time" in text
    points = read_table(tmp_path / "report" / "time_personal.csv")
    assert [row["seconds"] for row in points] == ["4.0", "8.0", "3.0", "6.0"]
    assert (tmp_path / "report" / "participation.csv").is_file()


@pytest.mark.slow
def test_validation_after_the_last_round_has_no_simulated_time(tmp_path, monkeypatch):
    """Its round is the number of rounds: no round of training has this number."""
    draw_only(monkeypatch, OVER_TIME)
    write_timed_run(tmp_path / "a", DROP, 2.0, (4, 4, 4, 0))
    *trained, evaluated = read_table(tmp_path / "a" / "metrics.csv")
    write_table(
        tmp_path / "a" / "metrics.csv", [*trained, {**evaluated, "val/personal/accuracy": 0.9}]
    )
    page.write(find_runs([tmp_path / "a"])[0], tmp_path / "report")
    points = read_table(tmp_path / "report" / "time_personal.csv")
    assert [row["seconds"] for row in points] == ["4.0", "8.0"]
    (row,) = (row for row in read_answers(tmp_path / "a")["communication"])
    assert (row["rounds"], row.get("simulated seconds")) == (4, None)
