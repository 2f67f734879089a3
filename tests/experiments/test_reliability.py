"""The campaigns of faults: their cases repeat, they go on, and they find faults."""

import os
import random
import time

import pytest
import torch

from experiments.reliability import __main__ as campaign
from experiments.reliability import forks, interference, uploads
from pl_fed.clients import FedAvg


def test_cases_repeat_and_have_the_shares_of_a_cycle():
    kinds = list(campaign.KINDS)
    cycle = sum(share for _, share in campaign.KINDS.values())
    cases = campaign.draw_cases(7, kinds)
    first = [next(cases) for _ in range(2 * cycle)]
    again = campaign.draw_cases(7, kinds)
    assert first == [next(again) for _ in range(2 * cycle)]
    for kind, (_, share) in campaign.KINDS.items():
        assert [number for k, number in first if k == kind] == list(range(2 * share))


def test_campaign_goes_on_and_counts_failures(tmp_path, monkeypatch):
    def fail_at_times(draw, folder):
        return f"draw {draw.random()}", "a fault" if draw.random() < 0.5 else ""

    monkeypatch.setitem(campaign.KINDS, "soak", (fail_at_times, 1))
    path = tmp_path / "cases.csv"
    for most in (2, 3):
        campaign.run_campaign(path, 0, 100, ["soak"], most)
    rows = campaign.read_cases(path)
    assert [row["number"] for row in rows] == ["0", "1", "2", "3", "4"]
    failed = [row["number"] for row in rows if row["fault"]]
    expected = ", ".join(f"0/{number}" for number in failed)
    assert f"| soak | 5 | {len(failed)} | {expected} |" in campaign.make_table(rows)


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


def test_interference_is_found(monkeypatch):
    monkeypatch.setattr(interference, "ALGORITHMS", {"FedAvg": Remembering})
    monkeypatch.setattr(interference, "NEIGHBOURS", {"other": lambda x, y: (x + 1, y)})
    faults = [interference.run(random.Random(seed), None)[1] for seed in range(6)]
    assert any("upload" in fault for fault in faults)


def test_upload_that_is_not_left_out_is_found(monkeypatch):
    monkeypatch.setattr(uploads, "BROKEN", {"large": lambda row: row * 0 + 1e6})
    monkeypatch.setattr(uploads, "CAST", {})
    assert uploads.run(random.Random(0), None)[1] == "0 uploads were left out"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("hostile upload", 60), ("non-interference", 30)])
def test_sample_of_a_campaign_in_process(kind, number, tmp_path):
    torch.set_num_threads(1)
    campaign.run_campaign(tmp_path / "cases.csv", 7, 12, [kind], number)
    rows = campaign.read_cases(tmp_path / "cases.csv")
    assert rows
    assert [row for row in rows if row["fault"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mutated config", "broken file", "kill or signal", "full disk"])
def test_sample_of_a_campaign_of_commands(kind, tmp_path):
    torch.set_num_threads(1)
    campaign.run_campaign(tmp_path / "cases.csv", 7, 8, [kind], 4)
    rows = campaign.read_cases(tmp_path / "cases.csv")
    assert rows
    assert [row for row in rows if row["fault"]] == []
