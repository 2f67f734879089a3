"""The experiment of attacks against defences: its runs and its report."""

import functools

import pytest

from experiments.grid import Job
from experiments.robustness import report
from experiments.robustness import run as experiment


def row(attack, defence, accuracy, personal="0.9", fraction="0.2", success="", failed=""):
    return {
        "attack": attack,
        "defence": defence,
        "fraction": fraction,
        "seed": "0",
        "global_accuracy": accuracy,
        "personal_accuracy": personal,
        "global_backdoor_success": success,
        "personal_backdoor_success": success,
        "failed": failed,
    }


ATTACKS, DEFENCES = ["none", "flips", "stamps", "unused"], ["Mean", "Krum", "unused"]
ROWS = [
    row("none", "Mean", "0.8"),
    row("none", "Krum", "0.6"),
    row("flips", "Mean", "0.7", personal="0.85"),
    row("flips", "Krum", "0.2"),
    row("stamps", "Mean", "0.8", success="0.75"),
    row("stamps", "Krum", "", personal="", failed="ValueError: too few"),
]


def test_cells_cover_the_grid_and_other_fractions():
    """All pairs occur once at the grid's fraction, and some pairs at other fractions."""
    attacks, defences = ["none", "random labels", "flipped labels"], ["Mean", "Median"]
    cells = experiment.cells(attacks, defences, [0.2], [0, 1])
    assert len(cells) == len(set(cells))
    ours = [cell.key for cell in cells if cell.key[3] == "1"]
    assert len(ours) * 2 == len(cells)
    grid = {(attack, defence) for attack, defence, fraction, _ in ours if fraction == "0.2"}
    assert grid == {(attack, defence) for attack in attacks for defence in defences}
    other_cells = {key[:3] for key in ours if key[2] != "0.2"}
    expected = {("random labels", d, f) for d in defences for f in ("0.1", "0.3", "0.4")}
    assert other_cells == expected | {("none", d, "0.0") for d in defences}


def test_every_attack_and_defence_builds():
    for spec in [*experiment.ATTACKS.values(), *experiment.DEFENCES.values()]:
        experiment.build(spec)


@pytest.mark.slow
def test_run_returns_the_accuracies(real_data):
    if real_data is None:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    once = functools.partial(experiment.run, rounds=1)
    (attacked,), (honest,) = (
        once(Job((attack, "Median", "0.2", "0")))["results.csv"] for attack in ("backdoor", "none")
    )
    assert {*attacked} == {"rounds", *(c for c in attacked if c.startswith(("global", "personal")))}
    for column in ("global_accuracy", "personal_accuracy", "global_backdoor_success"):
        assert 0 < float(attacked[column]) < 1
    assert honest["global_backdoor_success"] == ""
    assert attacked["global_accuracy"] != honest["global_accuracy"]


def test_impossible_run_returns_its_error(real_data):
    if real_data is None:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    with pytest.raises(ValueError, match="Expected argument `uploads` to have at least 22"):
        experiment.run(Job(("flipped labels", "Krum", "0.95", "0")), rounds=1)


def test_worst_case_and_strength_of_attacks():
    results = report.Results(ROWS, ATTACKS, DEFENCES)
    assert results.attacks == ["flips", "stamps"]
    assert results.defences == ["Mean", "Krum"]
    assert results.worst("Mean", 0.2, "global") == (0.7, "flips")
    assert results.worst("Krum", 0.2, "global") == (0.2, "flips")
    assert results.worst("Mean", 0.3, "global") is None
    drops = results.drops("flips", 0.2, "global")
    assert [name for _, name in drops] == ["Krum", "Mean"]
    assert [drop for drop, _ in drops] == pytest.approx([0.4, 0.1])


def test_seeds_are_averaged():
    results = report.Results(
        [row("none", "Mean", "0.8"), row("none", "Mean", "0.6")], ATTACKS, DEFENCES
    )
    assert results.value("none", "Mean", 0.2) == pytest.approx(0.7)


def test_tables_of_the_report():
    lines = report.tables(report.Results(ROWS, ATTACKS, DEFENCES), [0.2]).splitlines()
    assert "| Mean | 0.800 | 0.700 | 0.800 | **0.700** (flips) |" in lines
    assert "| Krum | 0.600 | 0.200 | – | **0.200** (flips) |" in lines
    strength = [line for line in lines if line.startswith(("| flips |", "| stamps |"))]
    assert strength == [
        "| flips | +0.250 | +0.400 (Krum) | +0.025 | +0.050 (Mean) |",
        "| stamps | +0.000 | +0.000 (Mean) | +0.000 | +0.000 (Mean) |",
    ]
    assert "| Mean | 0.750 | 0.750 |" in lines
    assert "- stamps, Krum, 0.2: ValueError: too few" in lines


@pytest.mark.slow
def test_pictures_of_the_report(tmp_path):
    rows = [
        *ROWS,
        row("none", "Mean", "0.8", fraction="0.0"),
        row("flips", "Mean", "0.5", fraction="0.4"),
    ]
    curves = {"attacks": ["flips"], "defences": ["Mean", "Krum"]}
    report.write(rows, tmp_path, ATTACKS, DEFENCES, curves, [0.2])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"table.md", "grid_20.png", "models_20.png", "fractions.png"}
