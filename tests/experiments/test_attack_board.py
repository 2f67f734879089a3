"""The board of attacks: its studies build, and its page says what the results say."""

from pathlib import Path

import pytest
import torch
from covering_cells import choose_cells, labels_of
from further_cases import mark_others

from experiments.attack_board import benchmarks, further_tables, page
from experiments.attack_board.nets import CifarResNet18
from experiments.attack_board.results import Board, collect, differences
from pl_fed.studies.cell_configs import check_config
from pl_fed.studies.study import Study

FOLDER = Path(page.__file__).parent
SIZES = {
    "shares": {"share": {"0.05", "0.1", "0.4"}},
    "seeds": {"seed": {"1", "2", "3", "4"}},
    "durability": {"stop": {"20"}},
}


def row(algorithm, attack, defence, accuracy, success="", seed="0", **numbers):
    model = "global" if algorithm == "FedAvg" else "personal"
    return {
        "study": "attack_board",
        "algorithm": algorithm,
        "attack": attack,
        "defence": defence,
        "share": "0.2",
        "seed": seed,
        "status": "done",
        f"test/{model}/accuracy": accuracy,
        f"test/{model}/accuracy_worst10": accuracy,
        f"test/{model}/backdoor_success": success,
        f"test/{model}/backdoor_success_worst10": success,
        f"test/{model}/backdoor_success_max": success,
        **numbers,
    }


ROWS = [
    row("FedAvg", "none", "Mean", "0.8", "0.02"),
    row("FedAvg", "none", "Krum", "0.7", "0.02"),
    row("FedAvg", "none", "tilted", "0.78", "0.02"),
    row("FedAvg", "backdoor", "Mean", "0.8", "0.9"),
    row("FedAvg", "backdoor", "Krum", "0.7", "0.1", **{"attack/detection_recall": "0.5"}),
    row("FedAvg", "backdoor", "tilted", "0.75", "0.98"),
    row("FedAvg", "flips", "Mean", "0.6"),
    row("FedAvg", "flips", "Krum", "0.65"),
    row("Ditto", "none", "Mean", "0.9", "0.02", personal_small="0.9", personal_large="0.9"),
    row("Ditto", "none", "Krum", "0.9", "0.02"),
    row("Ditto", "backdoor", "Mean", "0.9", "0.5", personal_small="0.5", personal_large="0.8"),
    row("Ditto", "backdoor", "Mean", "0.8", "0.3", "1"),
    row("Ditto", "backdoor", "Krum", "0.9", "0.1"),
]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_attack_defence_and_algorithm_of_the_board_builds():
    for cell in choose_cells(Study.from_file(FOLDER / "board.yaml").cells, labels_of):
        check_config(cell.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SIZES])
def test_other_studies_have_the_axes_of_the_board(name):
    board, study = (Study.from_file(FOLDER / f"{part}.yaml") for part in ("board", name))
    labels = {axis.name: set(axis.labels) for axis in study.spec.axes}
    labels["seed"] = {str(seed) for seed in study.spec.seeds}
    for axis in board.spec.axes:
        assert labels[axis.name] == set(axis.labels)
    for axis, values in SIZES[name].items():
        assert labels[axis] == values
    triggered = {cell.values["attack"] for cell in study.cells}
    if name == "durability":
        assert {"backdoor", "boosted backdoor"} <= triggered
        assert not {"none", "ALIE"} & triggered


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mark_others(
        ["flpoison", "backfed", "flpoison_quick", "backfed_quick"],
        *("flpoison_quick", "backfed_quick"),
    ),
)
def test_benchmark_settings_build(name):
    cells = Study.from_file(FOLDER / f"{name}.yaml").cells
    check_config(cells[0].arguments)
    check_config(cells[-1].arguments)


@pytest.mark.slow
def test_net_of_the_benchmarks_is_resnet18_for_small_images():
    net = CifarResNet18()
    assert sum(parameter.numel() for parameter in net.parameters()) == 11_173_962
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert not [module for module in net.modules() if isinstance(module, torch.nn.MaxPool2d)]


def test_sound_accuracy_and_worst_case_by_hand():
    board = Board(ROWS)
    assert board.sound("FedAvg", "backdoor", "Mean") == pytest.approx(0.08)
    assert board.sound("FedAvg", "none", "Mean") == 0.8, "the trigger of nobody does not count"
    assert board.sound("Ditto", "backdoor", "Mean") == pytest.approx((0.45 + 0.56) / 2)
    assert board.worst("FedAvg", "Krum") == (pytest.approx(0.63), "backdoor")
    assert board.worst("FedAvg", "Mean") == (pytest.approx(0.08), "backdoor")
    assert board.worst("Ditto", "tilted") is None
    assert board.sort_defences()[0] == "Krum"
    assert page.cost(board, "Krum") == pytest.approx(0.05)
    assert "Over all algorithms: Krum, with a worst case of 0.720; it costs +0.050" in (
        page.answer_worst(board)
    )


def test_fair_servers_are_compared_with_a_plain_mean():
    board = Board(ROWS)
    (effect,) = page.fair_effects(board, "tilted", "backdoor")
    assert effect == pytest.approx((0.78 - 0.75 * 0.02) - (0.8 - 0.08))
    assert "more than 0.02 worse in 1, better in 0" in page.answer_fair(board)


def test_clients_that_pay_by_hand():
    means = page.average_losses(Board(ROWS), "Ditto")
    assert means["half with fewer samples"] == pytest.approx(0.4)
    assert means["half with more samples"] == pytest.approx(0.1)
    assert "Ditto +0.300" in page.answer_payers(Board(ROWS))


def test_worst_cases_of_several_seeds_by_hand():
    others = [
        row("FedAvg", "none", "Mean", "0.7", "0.02", "1"),
        row("FedAvg", "backdoor", "Mean", "0.7", "0.5", "1"),
        row("FedAvg", "flips", "Mean", "0.3", "", "1"),
        row("FedAvg", "backdoor", "Krum", "0.6", "0.0", "1"),
        row("FedAvg", "flips", "Krum", "0.5", "", "1"),
    ]
    board = Board([*ROWS, *others])
    attacks = ["backdoor", "flips"]
    assert further_tables.find_worst(board, "FedAvg", "Mean", attacks) == pytest.approx(
        {"0": 0.08, "1": 0.3}
    )
    assert further_tables.find_worst(board, "FedAvg", "Krum", attacks) == pytest.approx(
        {"0": 0.63, "1": 0.5}
    )
    text = further_tables.write_seeds(board)
    half = 12.706205 * 0.065  # the t quantile of one degree of freedom, and the standard error
    assert f"| FedAvg | Krum | 0.700 | 0.565 ± {half:.3f} | +0.375 ± " in text
    assert further_tables.write_seeds(Board(ROWS[:5])) == "", "one seed only"


def test_other_shares_are_listed_in_order():
    many = {**row("FedAvg", "flips", "Mean", "0.4"), "share": "0.4"}
    few = {**row("FedAvg", "flips", "Mean", "0.7"), "share": "0.05"}
    other_seed = {**row("FedAvg", "flips", "Mean", "0.6"), "seed": "1"}
    text = further_tables.write_shares(Board([*ROWS, other_seed, many, few]))
    assert "with 5 / 20 / 40 % attackers, means over 1 / 2 / 1 seeds." in text
    assert "| FedAvg | flips | 0.700 / 0.600 / 0.400 |" in text
    assert further_tables.write_shares(Board(ROWS)) == ""


def test_backdoors_that_last_to_the_end_are_bounded_from_below():
    numbers = {"attack/global_durability": "3.0", "attack/personal_durability": "20.0"}
    text = further_tables.write_durations(
        [row("Ditto", "backdoor", "Mean", "0.9", **numbers, **{"attack/personal_outlasts": "1.0"})]
    )
    assert "| backdoor | Ditto | 3 / ≥ 20 |" in text
    assert further_tables.write_durations([]) == ""


@pytest.mark.slow
def test_writers_are_a_part_of_the_board():
    board, study = (Study.from_file(FOLDER / f"{name}.yaml") for name in ("board", "writers"))
    labels = {axis.name: set(axis.labels) for axis in board.spec.axes}
    for axis in study.spec.axes:
        assert set(axis.labels) <= labels[axis.name]
    for cell in choose_cells(study.cells, labels_of):
        check_config(cell.arguments)


@pytest.mark.slow
def test_page_of_incomplete_results_is_written():
    text = page.make_page(Board(ROWS))
    assert "– / 0.50" in text, "detection"
    assert "The results have no attack made for personal models" in text
    aimed = [*ROWS, row("Ditto", "PFedBA", "Mean", "0.9", "0.95")]
    assert "the largest success on personal models is 0.950 (PFedBA, Ditto, Mean)" in (
        page.answer_personal(Board(aimed))
    )


def test_page_without_results_is_refused():
    with pytest.raises(ValueError, match="Expected results of the board"):
        page.make_page(Board([]))


def test_pictures_of_incomplete_results_are_drawn():
    for draw in (page.draw_worst, page.draw_success, page.draw_cost):
        assert draw(Board(ROWS)).axes


def test_differences_leave_out_what_is_missing():
    assert differences([1.0, None, 3.0], [0.5, 1.0, None]) == [0.5]


@pytest.mark.slow
def test_results_of_unfinished_studies_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.attack_board.results.TABLE", tmp_path / "results.csv")
    monkeypatch.chdir(tmp_path)
    collect([FOLDER / "board.yaml"])
    assert (tmp_path / "results.csv").read_text().strip() == ""


def test_moments_of_a_backdoor_are_read_from_the_curve():
    name = "val/central/backdoor_success"
    history = [{"round": str(k), name: str(k / 100)} for k in range(80)]
    assert list(benchmarks.measure(history, stop=20)) == [
        ("end of attack", "success", 0.19),
        ("last 50 rounds", "success", pytest.approx(0.545)),
    ]


@pytest.mark.slow
def test_pages_show_the_current_results():
    assert (FOLDER / "table.md").read_text() == page.make_page(page.read_board())
    assert (FOLDER / "benchmarks.md").read_text() == benchmarks.make_page()


@pytest.mark.slow
def test_personal_sides_are_compared_under_a_plain_mean():
    cells = Study.from_file(FOLDER / "personal_side.yaml").cells
    assert {cell.values["defence"] for cell in cells} == {"Mean"}
    for cell in {cell.values["algorithm"]: cell for cell in cells}.values():
        check_config(cell.arguments)
    others = [
        row("Local", "none", "Mean", "0.85"),
        row("Local", "backdoor", "Mean", "0.8", "0.1"),
        row("Local", "flips", "Mean", "0.75"),
    ]
    text = page.answer_personal_side(Board(ROWS), Board(others))
    assert text.splitlines() == [
        "- Local: 0.720 in the worst case (backdoor), 0.850 without an attack.",
        "- FedAvg: 0.080 in the worst case (backdoor), 0.800 without an attack.",
    ], "Ditto has no run of one attack"
    table = page.tabulate_personal_side(Board(ROWS), Board(others))
    assert "| Local | 0.850 | 0.720 | 0.750 |" in table
