"""The campaigns of faults: their cases repeat, they go on, and they find faults."""

import pytest
import torch
from further_cases import mark_others

from experiments.reliability import __main__ as campaign
from experiments.reliability import kills, races
from experiments.reliability.states import STATES


def test_campaign_takes_the_shares_of_each_kind_in_turn(tmp_path, monkeypatch):
    def describe(draw, folder):
        return f"draw {draw.random()}", ""

    monkeypatch.setattr(campaign, "KINDS", {"broken file": (describe, 2), "race": (describe, 1)})
    tables = []
    for name in ("first.csv", "second.csv"):
        campaign.run_campaign(tmp_path / name, 7, 100, ["broken file", "race"], 6)
        tables.append(campaign.read_cases(tmp_path / name))
    assert tables[0] == tables[1]
    cases = [(row["kind"], row["number"]) for row in tables[0]]
    cycles = [
        [("broken file", f"{n}"), ("broken file", f"{n + 1}"), ("race", f"{n // 2}")]
        for n in (0, 2)
    ]
    assert cases == [*cycles[0], *cycles[1]]
    assert len({row["case"] for row in tables[0]}) == 6


def test_kinds_of_state_are_options_of_fit():
    assert len(STATES) == 55
    for options in STATES.values():
        assert not options or options[0].startswith("--")
    assert STATES["Ditto, kept Adam"][-6:] == [
        *("--model.optimizer", "torch.optim.Adam", "--model.optimizer.lr", "0.005"),
        *("--federation.engine.keep_optimizer_state", "true"),
    ]


def test_campaign_goes_on_and_counts_failures(tmp_path, monkeypatch):
    def fail_at_times(draw, folder):
        return f"draw {draw.random()}", "a fault" if draw.random() < 0.5 else ""

    monkeypatch.setitem(campaign.KINDS, "race", (fail_at_times, 1))
    path = tmp_path / "cases.csv"
    for most in (2, 3):
        campaign.run_campaign(path, 0, 100, ["race"], most)
    rows = campaign.read_cases(path)
    assert [row["number"] for row in rows] == ["0", "1", "2", "3", "4"]
    failed = [row["number"] for row in rows if row["fault"]]
    expected = ", ".join(f"0/{number}" for number in failed)
    assert f"| race | 5 | {len(failed)} | {expected} |" in campaign.make_table(rows)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    mark_others(
        [("mutated config", 3), ("broken file", 2), ("kill or signal", 1), ("race", 1)],
        ("broken file", 2),
    ),
)
def test_sample_of_a_campaign(kind, number, tmp_path, monkeypatch):
    """Of four rounds instead of twelve."""
    torch.set_num_threads(1)
    for module in (kills, races):
        monkeypatch.setattr(module, "FIT", [*module.FIT, "--trainer.max_epochs", "4"])
    campaign.run_campaign(tmp_path / "cases.csv", 7, 8, [kind], number)
    rows = campaign.read_cases(tmp_path / "cases.csv")
    assert rows
    assert [row for row in rows if row["fault"]] == []
