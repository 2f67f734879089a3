"""The campaigns of faults: their cases repeat, they go on, and they find faults."""

import os
import random
import time

import pytest
import torch

import pl_fed.data
from experiments.reliability import __main__ as campaign
from experiments.reliability import data_files, forks, interference, kills, uploads
from pl_fed.aggregators import Mean
from pl_fed.clients import FedAvg


@pytest.mark.slow
def test_campaign_takes_the_shares_of_each_kind_in_turn(tmp_path, monkeypatch):
    def describe(draw, folder):
        return f"draw {draw.random()}", ""

    shares = {
        "soak": campaign.Kind(describe, 2, is_forked=True),
        "race": campaign.Kind(describe, 1),
    }
    monkeypatch.setattr(campaign, "KINDS", shares)
    tables = []
    for name in ("first.csv", "second.csv"):
        campaign.run_campaign(tmp_path / name, 7, 100, list(shares), 6)
        tables.append(campaign.read_cases(tmp_path / name))
    assert tables[0] == tables[1]
    cases = [(row["kind"], row["number"]) for row in tables[0]]
    cycles = [[("soak", f"{n}"), ("soak", f"{n + 1}"), ("race", f"{n // 2}")] for n in (0, 2)]
    assert cases == [*cycles[0], *cycles[1]]
    assert len({row["case"] for row in tables[0]}) == 6


@pytest.mark.slow
def test_fault_of_a_shared_fork_is_that_of_its_own_case(tmp_path, monkeypatch):
    def end_at_times(draw, folder):
        if draw.random() < 0.5:
            os._exit(3)
        return "case", ""

    monkeypatch.setitem(campaign.KINDS, "soak", campaign.Kind(end_at_times, 4, is_forked=True))
    campaign.run_campaign(tmp_path / "cases.csv", 0, 100, ["soak"], 4)
    ends = [random.Random(f"0, soak, {number}").random() < 0.5 for number in range(4)]
    assert {*ends} == {True, False}
    faults = [row["fault"] for row in campaign.read_cases(tmp_path / "cases.csv")]
    assert faults == ["status 3" if end else "" for end in ends]


def test_campaign_goes_on_and_counts_failures(tmp_path, monkeypatch):
    def fail_at_times(draw, folder):
        return f"draw {draw.random()}", "a fault" if draw.random() < 0.5 else ""

    monkeypatch.setitem(campaign.KINDS, "soak", campaign.Kind(fail_at_times, 1))
    path = tmp_path / "cases.csv"
    for most in (2, 3):
        campaign.run_campaign(path, 0, 100, ["soak"], most)
    rows = campaign.read_cases(path)
    assert [row["number"] for row in rows] == ["0", "1", "2", "3", "4"]
    failed = [row["number"] for row in rows if row["fault"]]
    expected = ", ".join(f"0/{number}" for number in failed)
    assert f"| soak | 5 | {len(failed)} | {expected} |" in campaign.make_table(rows)


@pytest.mark.slow
def test_fork_returns_results_errors_and_ends():
    assert forks.call_in_fork(lambda: 7, 10) == (7, "")
    assert forks.call_in_fork(lambda: 1 / 0, 10).failure.startswith("ZeroDivisionError")
    assert forks.call_in_fork(lambda: os._exit(3), 10).failure == "status 3"
    assert forks.call_in_fork(lambda: time.sleep(9), 0.1).failure == "timed out"


class Remembering(FedAvg):
    """Remembering: carries the samples of one client to the next one."""

    previous = 0.0

    def end_round(self, client):
        upload = super().end_round(client) + Remembering.previous
        Remembering.previous = float(client.broadcast.parameters.sum() + upload.sum())
        return upload


@pytest.mark.slow
def test_interference_is_found(monkeypatch):
    monkeypatch.setattr(interference, "ALGORITHMS", {"FedAvg": Remembering})
    monkeypatch.setattr(interference, "NEIGHBOURS", {"other": lambda x, y: (x + 1, y)})
    faults = [interference.run(random.Random(seed), None)[1] for seed in range(6)]
    assert any("upload" in fault for fault in faults)


def test_upload_that_is_not_left_out_is_found(monkeypatch):
    monkeypatch.setattr(uploads, "BROKEN", {"large": lambda row: row * 0 + 1e6})
    monkeypatch.setattr(uploads, "CAST", {})
    assert uploads.run(random.Random(0), None)[1] == "0 uploads were left out"


def test_upload_that_moves_the_model_too_far_is_found(monkeypatch):
    monkeypatch.setattr(uploads, "EXTREME", {"large": lambda row: row * 0 + 1e6})
    mean = type("RobustMean", (Mean,), {"breakdown": lambda self, num_uploads: 4})
    monkeypatch.setattr(
        uploads, "list_aggregators", lambda: {"mean": lambda: {"aggregator": mean()}}
    )
    assert uploads.run_extreme(random.Random(0), None)[1].startswith("moved the model by")


def test_differences_of_checkpoints_are_found(tmp_path):
    runs = [tmp_path / name for name in ("own", "reference")]
    for momentum, run in enumerate(runs):
        (run / "checkpoints").mkdir(parents=True)
        content = {"optimizer_states": [{"lr": 0.1, "momentum": torch.ones(2) * momentum}]}
        content["callbacks"] = {"path": run.name, "count": 3}
        torch.save(content, run / "checkpoints" / "last.ckpt")
    assert [*kills.list_differences(*runs)] == ["last.ckpt: /optimizer_states/0/momentum"]
    assert [*kills.list_differences(runs[0], runs[0])] == []
    (runs[0] / "checkpoints" / "best.ckpt").touch()
    assert len([*kills.list_differences(*runs)]) == 1


@pytest.mark.parametrize("name", data_files.FORMATS)
def test_data_files_are_complete_before_they_are_damaged(name, tmp_path):
    write, source = data_files.FORMATS[name]
    write(tmp_path, data_files.draw_arrays())
    arguments = dict(source["init_args"])
    key = "folder" if name == "npy" else "path"
    arguments[key] = str(tmp_path / arguments[key])
    arrays = getattr(pl_fed.data, source["class_path"])(**arguments).load()
    assert len(arrays.targets) == data_files.SAMPLES
    assert arrays.client.unique().tolist() == list(range(data_files.CLIENTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *(("hostile upload", 6), ("extreme upload", 6), ("non-interference", 6)),
        *(("mutated config", 3), ("broken file", 2), ("broken data file", 2)),
        *(("kill or signal", 1), ("two processes", 1)),
    ],
)
def test_sample_of_a_campaign(kind, number, tmp_path):
    torch.set_num_threads(1)
    campaign.run_campaign(tmp_path / "cases.csv", 7, 8, [kind], number)
    rows = campaign.read_cases(tmp_path / "cases.csv")
    assert rows
    assert [row for row in rows if row["fault"]] == []
