"""The experiment of attacks against defences: its runs and its page."""

import pytest
from covering_cells import choose_cells, labels_of

from experiments.__main__ import open_experiment
from experiments.robustness import page
from pl_fed.command.fit import FederatedCLI
from pl_fed.studies.cell_configs import check_config


def row(attack, defence, accuracy, personal="0.9", fraction="0.2", success=""):
    return {
        "attack": attack,
        "defence": defence,
        "fraction": fraction,
        "seed": "0",
        "test/global/accuracy": accuracy,
        "test/personal/accuracy": personal,
        "test/global/backdoor_success": success,
        "test/personal/backdoor_success": success,
    }


ROWS = [
    row("none", "Mean", "0.8"),
    row("none", "Krum", "0.6"),
    row("flips", "Mean", "0.7", personal="0.85"),
    row("flips", "Krum", "0.2"),
    row("stamps", "Mean", "0.8", success="0.75"),
    row("stamps", "Krum", "", personal=""),
]


def test_cells_cover_the_grid_and_other_fractions():
    """All pairs occur once at a fraction of 0.2, and some pairs at other fractions."""
    cells = [tuple(cell.values.values()) for cell in open_experiment("robustness").cells]
    assert len(cells) == len(set(cells)) == 406
    attacks, defences = ({cell[place] for cell in cells} for place in (0, 1))
    assert (len(attacks), len(defences)) == (15, 21)
    grid = {cell[:2] for cell in cells if cell[2] == "0.2"}
    assert grid == {(attack, defence) for attack in attacks for defence in defences}
    curves = ("random labels", "sign flipping", "ALIE", "Min-Max")
    expected = {(a, d, f) for a in curves for d in page.CURVES for f in ("0.1", "0.3", "0.4")}
    expected |= {("none", defence, "0.0") for defence in page.CURVES}
    assert {cell for cell in cells if cell[2] != "0.2"} == expected


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_attack_and_defence_builds():
    cells = open_experiment("robustness").cells
    for cell in choose_cells(cells, labels_of):
        config = check_config(cell.arguments).config
        assert config.seed_everything == cell.seed
        assert config.trainer.accelerator == "cpu"
    assert len(set().union(*map(labels_of, cells))) == 15 + 21 + 5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_are_over_the_same_clients_and_differ(real_data, tmp_path):
    if real_data is None:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    metrics = {}
    for name in ("backdoor", "none"):
        cell = next(
            cell
            for cell in open_experiment("robustness").cells
            if cell.values == {"attack": name, "defence": "Median", "fraction": "0.2"}
        )
        words = [*cell.arguments, "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
        cli = FederatedCLI(["fit", *words, f"--trainer.default_root_dir={tmp_path / name}"])
        metrics[name] = {key: float(value) for key, value in cli.trainer.callback_metrics.items()}
    attacked, honest = metrics["backdoor"], metrics["none"]
    for column in ("global/accuracy", "personal/accuracy", "global/backdoor_success"):
        assert 0 < attacked[f"test/{column}"] < 1
    assert "test/global/backdoor_success" not in honest
    assert attacked["test/global/accuracy"] != honest["test/global/accuracy"]


def test_worst_case_and_strength_of_attacks():
    results = page.Results(ROWS)
    assert results.attacks == ["flips", "stamps"]
    assert results.defences == ["Mean", "Krum"]
    assert results.worst("Mean", "global") == (0.7, "flips")
    assert results.worst("Krum", "global") == (0.2, "flips")
    drops = results.drops("flips", "global")
    assert [name for _, name in drops] == ["Krum", "Mean"]
    assert [drop for drop, _ in drops] == pytest.approx([0.4, 0.1])


def test_seeds_are_averaged():
    results = page.Results([row("none", "Mean", "0.8"), row("none", "Mean", "0.6")])
    assert results.value("none", "Mean", "global") == pytest.approx(0.7)
    assert results.value("none", "Mean", "global", fraction=0.3) is None


def test_tables_of_the_page():
    lines = page.make_page(page.Results(ROWS)).splitlines()
    assert "| Mean | 0.800 | 0.700 | 0.800 | **0.700** (flips) |" in lines
    assert "| Krum | 0.600 | 0.200 | – | **0.200** (flips) |" in lines
    strength = [line for line in lines if line.startswith(("| flips |", "| stamps |"))]
    assert strength == [
        "| flips | +0.250 | +0.400 (Krum) | +0.025 | +0.050 (Mean) |",
        "| stamps | +0.000 | +0.000 (Mean) | +0.000 | +0.000 (Mean) |",
    ]
    assert "| Mean | 0.750 | 0.750 |" in lines


@pytest.mark.slow
def test_page_shows_the_current_table():
    """The test fails for new rows: run python -m experiments robustness --report."""
    assert (page.HERE / "table.md").read_text() == page.make_page(page.read_results())


@pytest.mark.slow
def test_pictures_show_all_defences():
    results = page.read_results()
    grid, models, curves = (
        draw(results) for draw in (page.draw_grid, page.draw_models, page.draw_curves)
    )
    assert [label.get_text() for label in grid.axes[1].get_yticklabels()] == results.sort_defences()
    assert len(models.axes[0].get_yticklabels()) == 21
    assert [axes.get_title() for axes in curves.axes[:7]] == list(page.CURVES)
    assert all(len(axes.get_lines()) == 4 for axes in curves.axes)
