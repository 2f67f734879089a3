"""Pictures of a report: their numbers and their drawing."""

import io
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from run_folders import read_table, with_changes, without_accuracy, write_run, write_table

from pl_fed.functional.fairness import best_mean, worst_mean
from pl_fed.reports import classes, clients, curves, robustness, spread, times
from pl_fed.reports.clients import Ranks
from pl_fed.reports.group import Final, group_runs
from pl_fed.reports.picture import (
    BLACK,
    COLOURS,
    FEW,
    ColumnTable,
    Picture,
    encode_csv,
    error_bars,
    line_style,
    space_out,
)
from pl_fed.reports.run import find_runs


@pytest.fixture
def make_groups(tmp_path):
    """Return a function that writes runs, pairs of config changes and options, and groups them."""

    def make(*runs):
        for number, (changes, options) in enumerate(runs):
            write_run(tmp_path / f"run{number:02d}", with_changes(changes), **options)
        return group_runs(find_runs([tmp_path])[0])

    make.folder = tmp_path
    return make


def seeds(*accuracies, **options):
    return [
        ({"seed_everything": seed}, {"accuracy": accuracy, **options})
        for seed, accuracy in enumerate(accuracies)
    ]


# Clients


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_worst_and_best_means_equal_those_of_the_metrics(values):
    ranks = Ranks(np.sort(np.array([values])))
    table = torch.tensor(values, dtype=torch.float64)
    assert ranks.mean[: ranks.tail].mean() == pytest.approx(float(worst_mean(table)))
    assert ranks.mean[-ranks.tail :].mean() == pytest.approx(float(best_mean(table)))


def test_ranks_are_sorted_without_byzantine_clients(make_groups):
    (group,) = make_groups(*seeds((0.5, 0.75, 1.0, 0.25), byzantine=[2]))
    ranks = clients.rank_clients(group, "personal_accuracy")
    assert ranks.values.tolist() == [[0.25, 0.5, 0.75]]
    assert ranks.tail == 1
    personal, other = clients.draw_distributions([group])
    assert (personal.name, other.name) == ("clients_personal", "clients_global")
    assert [row["worst10"] for row in personal.rows] == [1, 0, 0]
    assert [row["accuracy"] for row in personal.rows] == [0.25, 0.5, 0.75]
    assert "Byzantine clients are left out" in personal.caption
    assert "mean 0.5, worst 10 %: 0.25, best 10 %: 0.75" in personal.alt


def test_ranks_are_averaged_over_seeds(make_groups):
    (group,) = make_groups(*seeds((0.2, 0.8), (0.6, 0.4)))
    ranks = clients.rank_clients(group, "global_accuracy")
    assert ranks.mean.tolist() == pytest.approx([0.3, 0.7])
    assert ranks.low.tolist() == pytest.approx([0.2, 0.6])
    assert ranks.high.tolist() == pytest.approx([0.4, 0.8])


def test_ranks_repeat_values_for_seeds_with_fewer_clients(make_groups):
    (group,) = make_groups(*seeds((0.1, 0.2, 0.3, 0.4), (0.6, 0.8)))
    ranks = clients.rank_clients(group, "global_accuracy")
    assert ranks.values.tolist() == [[0.1, 0.2, 0.3, 0.4], [0.6, 0.6, 0.8, 0.8]]


def test_ranks_leave_out_clients_without_samples(make_groups, tmp_path):
    (group,) = make_groups(*seeds((0.2, 0.4)))
    table = tmp_path / "run00" / "per_client.csv"
    rows = read_table(table)
    write_table(table, [*rows, {**rows[0], "client": 2, "global_accuracy": "nan"}])
    (group,) = group_runs(find_runs([tmp_path])[0])
    assert clients.rank_clients(group, "global_accuracy").values.tolist() == [[0.2, 0.4]]


def test_caption_of_ranks_counts_clients_whose_models_have_diverged(make_groups, tmp_path):
    make_groups(*seeds((0.2, 0.4, 0.6)))
    table = tmp_path / "run00" / "per_client.csv"
    first, *others = read_table(table)
    write_table(table, [{**first, "personal_accuracy": "inf"}, *others])
    personal, other = clients.draw_distributions(group_runs(find_runs([tmp_path])[0]))
    assert [row["accuracy"] for row in personal.rows] == [0.4, 0.6]
    assert "diverged are left out, and are worse than all: 1." in personal.caption
    assert "diverged" not in other.caption


@pytest.mark.slow
def test_pictures_show_losses_for_real_valued_targets(make_groups, tmp_path):
    make_groups(*seeds((0.5, 0.75)))
    without_accuracy(tmp_path / "run00")
    *rounds, test = read_table(tmp_path / "run00" / "metrics.csv")
    write_table(
        tmp_path / "run00" / "metrics.csv", [*rounds, test | {"test/global/loss_var": 0.25}]
    )
    groups = group_runs(find_runs([tmp_path])[0])
    personal, _ = clients.draw_distributions(groups)
    assert [row["loss"] for row in personal.rows] == [0.5, 0.25], "the worst is the largest"
    (picture,) = spread.draw_spread(groups)
    (row,) = picture.rows
    assert (row["loss"], row["spread"]) == (0.125, 0.5)
    again = shutil.copytree(tmp_path / "run00", tmp_path / "run01")
    write_table(again / "metrics.csv", [*rounds, test | {"test/global/loss_var": 1.0}])
    (config := again / "config.yaml").write_text(
        config.read_text().replace("seed_everything: 0", "seed_everything: 1")
    )
    (pooled,) = spread.draw_spread(group_runs(find_runs([tmp_path])[0]))
    assert [row["spread"] for row in pooled.rows] == [0.75], "the mean of the two deviations"
    assert [picture.name for picture in curves.draw_validation(groups)] == [
        "curves_personal",
        "curves_global",
    ]
    assert {
        row["metric"] for picture in curves.draw_validation(groups) for row in picture.rows
    } == {
        "val/personal/loss",
        "val/global/loss",
    }
    check_pictures(personal, picture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ((-2.0, -1.0), (-2.04, -0.96)),
        ((-1.0, 3.0), (-1.16, 3.16)),
        ((0.0, 0.0), (-0.05, 0.05)),
        ((1.0, 2.0), (0.96, 2.04)),
    ],
)
def test_losses_below_zero_are_drawn(make_groups, tmp_path, losses, ends):
    """Densities and Poisson likelihoods of counts have such losses."""
    make_groups(*seeds((0.5, 0.75)))
    without_accuracy(tmp_path / "run00")
    table = tmp_path / "run00" / "per_client.csv"
    rows = [row | {"global_loss": loss} for row, loss in zip(read_table(table), losses)]
    write_table(table, rows)
    picture = list(clients.draw_distributions(group_runs(find_runs([tmp_path])[0])))[1]
    (axes,) = picture.figure.axes
    assert axes.get_ylim() == pytest.approx(ends)
    (stairs,) = [patch for patch in axes.patches if hasattr(patch, "get_data")]
    assert sorted(stairs.get_data().values) == sorted(losses)
    check_pictures(picture)


@pytest.mark.slow
def test_many_clients_give_a_small_picture(make_groups):
    groups = make_groups(*seeds(tuple(k / 5000 for k in range(5000)), models=("global",)))
    (picture,) = clients.draw_distributions(groups)
    assert len(picture.rows) == 5000
    assert len(picture.svg()) < 60_000


# Classes


@pytest.mark.slow
def test_accuracy_by_class_equals_hand_computed_values(make_groups):
    """Class 0 has the accuracies of the benign clients. Class 1 has accuracy 1."""
    (group,) = make_groups(*seeds((0.5, 0.75, 0.0, 0.25), byzantine=[2]))
    table = classes.class_accuracy(group, "personal")
    assert table.names.tolist() == [0, 1]
    assert table.mean.tolist() == [0.5, 1.0]
    assert table.spread.tolist() == pytest.approx([np.std([0.5, 0.75, 0.25]), 0])
    assert table.clients.tolist() == [3, 3]
    pictures = list(classes.draw_class_accuracy([group]))
    assert [picture.name for picture in pictures] == ["classes_personal", "classes_global"]
    assert "lowest class 0 with 0.5, highest class 1 with 1" in pictures[0].alt
    check_pictures(*pictures)


def test_accuracy_by_class_is_averaged_over_seeds(make_groups):
    (group,) = make_groups(*seeds((0.2, 0.4), (0.8, 0.6)))
    table = classes.class_accuracy(group, "global")
    assert table.mean.tolist() == pytest.approx([0.5, 1])
    assert table.spread.tolist() == pytest.approx([0.1, 0])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_run_has_one_panel_of_classes(make_groups, number):
    groups = make_groups(*(({"model.init_args.lam": float(n + 1)}, {}) for n in range(number)))
    for picture in classes.draw_class_accuracy(groups):
        assert [bool(axes.get_title("left")) for axes in picture.figure.axes] == [True] * number


def test_runs_without_classes_have_no_picture_of_classes(make_groups):
    groups = make_groups(*seeds((0.2, 0.4), classes=False))
    assert list(classes.draw_class_accuracy(groups)) == []


# Means and spreads


@pytest.mark.slow
def test_each_group_and_model_has_a_point(make_groups):
    groups = make_groups(*seeds((0.2, 0.4), (0.6, 0.8)), ({"data.num_clients": 7}, {}))
    (picture,) = spread.draw_spread(groups)
    assert [(row["group"], row["model"]) for row in picture.rows] == [
        (1, "personal"),
        (2, "personal"),
        (1, "global"),
        (2, "global"),
    ]
    assert (picture.rows[0]["accuracy"], picture.rows[0]["spread"]) == pytest.approx((0.5, 0.1))
    assert picture.rows[0]["runs"] == 2
    check_pictures(picture)


def test_legend_is_sorted_by_group_number(make_groups):
    groups = make_groups(({}, {"models": ("global",)}), ({"data.num_clients": 7}, {}))
    (picture,) = spread.draw_spread(groups)  # the personal models of the second come first
    (legend,) = picture.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [group.title for group in groups]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0, 400), st.floats(0, 300)), min_size=1, max_size=40, unique=True)
)
def test_numbers_stand_near_their_points(points):
    offsets = spread.place_labels(points)
    assert len(offsets) == len(points)
    assert all(7 < np.hypot(dx, dy) < 19 for dx, dy in offsets)
    assert offsets == spread.place_labels(points)


def test_numbers_of_coinciding_points_get_different_places():
    offsets = spread.place_labels([(50, 50)] * 8)
    assert len(set(offsets)) == 8


def test_numbers_of_thirty_points_do_not_overlap():
    points = np.random.default_rng(0).uniform(0, (330, 260), (30, 2)).tolist()
    ends = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(points, spread.place_labels(points))]
    apart = [np.hypot(a[0] - b[0], a[1] - b[1]) for a in ends for b in ends if a is not b]
    assert min(apart) > 6


# Robustness

ATTACKS = {
    name: {"federation.adversary.attack": {"class_path": f"pl_fed.attacks.{name}"}}
    for name in ("RandomLabels", "SignFlipping")
}
MEDIAN = {"federation.aggregator": {"class_path": "pl_fed.aggregators.Median"}}


def attacked_run(name, share, accuracy, changes=None, clients=10):
    """Return an attacked run. Its number of Byzantine clients is rounded down."""
    byzantine = share if isinstance(share, list) else range(int(clients * share))
    return {**ATTACKS[name], "federation.adversary.fraction": share, **(changes or {})}, {
        "accuracy": (accuracy,) * clients,
        "byzantine": byzantine,
    }


@pytest.mark.slow
def test_robustness_lines_run_over_the_byzantine_share(make_groups):
    groups = make_groups(
        ({}, {"accuracy": (0.9,)}),
        attacked_run("RandomLabels", 0.4, 0.5),
        attacked_run("RandomLabels", 0.2, 0.7),
        attacked_run("SignFlipping", 0.2, 0.3),
        attacked_run("RandomLabels", [0, 1], 0.6, MEDIAN),
        attacked_run("RandomLabels", 0.2, 0.4, {"seed_everything": 1}),
    )
    personal, _ = robustness.draw_robustness(groups)
    lines: dict = {}
    for row in personal.rows:
        lines.setdefault(row["label"], []).append((row["byzantine"], row["accuracy"]))
    assert lines == {
        "Ditto, RandomLabels": [(0.0, 0.9), (0.2, 0.55), (0.4, 0.5)],
        "Ditto, SignFlipping": [(0.0, 0.9), (0.2, 0.3)],
        "Ditto, Median, RandomLabels": [(0.2, 0.6)],
    }, "a median has a single point"
    assert "A single dot has no other run" in personal.caption
    check_pictures(personal)
    assert robustness.list_missing_groups(groups) == ""


def test_groups_missing_from_robustness_pictures_are_listed_with_the_reason(make_groups):
    groups = make_groups(
        ({}, {"accuracy": (0.9,)}),
        attacked_run("RandomLabels", 0.4, 0.5),
        (MEDIAN, {"accuracy": (0.8,)}),
        ({"model.init_args.lam": 1.0}, {"tested": False}),
    )
    missing = robustness.list_missing_groups(groups)
    assert missing == f"{groups[3].title} (no test results)"
    personal, _ = robustness.draw_robustness(groups)
    rows = {(row["label"], row["byzantine"]): row["accuracy"] for row in personal.rows}
    assert rows == {
        ("Ditto, RandomLabels", 0.0): 0.9,
        ("Ditto, RandomLabels", 0.4): 0.5,
        ("Ditto, Median", 0.0): 0.8,
    }, "a run without an attack is a dot too"


def test_groups_at_a_single_share_are_dots(make_groups):
    groups = make_groups(
        attacked_run("RandomLabels", 0.2, 0.6), attacked_run("RandomLabels", 0.2, 0.7, MEDIAN)
    )
    personal, _ = robustness.draw_robustness(groups)
    assert [(row["label"], row["byzantine"], row["accuracy"]) for row in personal.rows] == [
        ("Ditto", 0.2, 0.6),
        ("Ditto, Median", 0.2, 0.7),
    ]
    assert robustness.list_missing_groups(groups) == ""
    check_pictures(personal)


def test_repeated_run_without_byzantine_clients_is_listed(make_groups):
    groups = make_groups(
        ({}, {"accuracy": (0.9,) * 10}),
        attacked_run("RandomLabels", 0.0, 0.9),
        attacked_run("RandomLabels", 0.5, 0.5),
    )
    reason = "no Byzantine client, and the results of another run without any"
    assert robustness.list_missing_groups(groups) == f"{groups[1].title} ({reason})"


def test_robustness_lists_no_group_without_an_attack(make_groups):
    assert robustness.list_missing_groups(make_groups(({}, {}), (MEDIAN, {}))) == ""


def test_robustness_uses_the_actual_byzantine_share(make_groups):
    """The picture shows 2 of 8 clients, given by their ids, and 3 of 8 clients
    for a fraction of 0.4."""
    from_data = {"data.num_clients": None}
    groups = make_groups(
        (from_data, {"accuracy": (0.9,)}),
        attacked_run("RandomLabels", [0, 1], 0.6, from_data, clients=8),
        attacked_run("RandomLabels", 0.4, 0.5, from_data, clients=8),
        attacked_run("RandomLabels", 0.4, 0.3, {**from_data, "seed_everything": 1}, clients=8),
    )
    (picture, _) = robustness.draw_robustness(groups)
    assert [(row["byzantine"], row["accuracy"]) for row in picture.rows] == [
        (0, 0.9),
        (0.25, 0.6),
        (0.375, 0.4),
    ]


def test_line_of_a_defence_begins_with_its_own_run_without_attack(make_groups):
    groups = make_groups(
        ({}, {"accuracy": (0.9,)}),
        (MEDIAN, {"accuracy": (0.8,)}),
        attacked_run("RandomLabels", 0.5, 0.7, MEDIAN),
    )
    line, dot = robustness.build_lines(groups)
    assert {share: group.number for share, group in dot.groups.items()} == {0.0: 1}
    assert {share: group.number for share, group in line.groups.items()} == {0.0: 2, 0.5: 3}


def test_groups_with_equal_byzantine_share_are_joined(make_groups):
    """Settings of Byzantine clients do not split runs without attack, in any order."""
    expecting = {"federation.adversary.expected": 4}
    runs = [
        ({}, {"accuracy": (0.9,)}),
        (expecting, {"accuracy": (0.7,)}),
        attacked_run("RandomLabels", 0.5, 0.5),
    ]
    for order in (runs, runs[::-1]):
        for folder in make_groups.folder.iterdir():
            shutil.rmtree(folder)
        personal, _ = robustness.draw_robustness(make_groups(*order))
        assert [row["accuracy"] for row in personal.rows] == pytest.approx([0.8, 0.5])


def test_run_without_byzantine_clients_counts_once(make_groups):
    groups = make_groups(
        *seeds((0.9,) * 10, (0.6,) * 10),
        attacked_run("RandomLabels", 0.0, 0.9),
        attacked_run("RandomLabels", 0.5, 0.5),
    )
    personal, _ = robustness.draw_robustness(groups)
    assert [(row["accuracy"], row["runs"]) for row in personal.rows] == [(0.75, 2), (0.5, 1)]


def test_different_expected_numbers_give_separate_lines(make_groups):
    groups = make_groups(
        ({}, {"accuracy": (0.9,)}),
        attacked_run("RandomLabels", 0.5, 0.5, {"federation.adversary.expected": 1}),
        attacked_run("RandomLabels", 0.5, 0.7, {"federation.adversary.expected": 4}),
    )
    personal, _ = robustness.draw_robustness(groups)
    lines: dict = {}
    for row in personal.rows:
        lines.setdefault(row["label"], []).append(row["accuracy"])
    assert sorted(lines.values()) == [[0.9, 0.5], [0.9, 0.7]]
    assert all("expected=" in label for label in lines)


def test_line_begins_with_the_run_of_the_same_expected_number(make_groups):
    expecting_four, expecting_one = ({"federation.adversary.expected": number} for number in (4, 1))
    groups = make_groups(
        (expecting_one, {"accuracy": (0.9,)}),
        (expecting_four, {"accuracy": (0.7,)}),
        attacked_run("RandomLabels", 0.5, 0.5, expecting_one),
        attacked_run("RandomLabels", 0.5, 0.6, expecting_four),
    )
    personal, _ = robustness.draw_robustness(groups)
    lines: dict = {}
    for row in personal.rows:
        lines.setdefault(row["label"], []).append(row["accuracy"])
    assert sorted(lines.values()) == [[0.7, 0.6], [0.9, 0.5]]


def test_run_resumed_with_another_config_is_not_joined(make_groups):
    def write_runs():
        return make_groups(
            ({}, {"accuracy": (0.9,)}),
            ({"seed_everything": 1}, {"accuracy": (0.1,)}),
            attacked_run("RandomLabels", 0.5, 0.5),
        )

    write_runs()
    earlier_config = yaml.safe_dump(with_changes({"model.init_args.lam": 100.0}))
    (make_groups.folder / "run01" / "config_to_round_2.yaml").write_text(earlier_config)
    groups = group_runs(find_runs([make_groups.folder])[0])
    personal, _ = robustness.draw_robustness(groups)
    assert [row["accuracy"] for row in personal.rows] == [0.9, 0.5, 0.1]
    assert personal.rows[-1]["label"].endswith("(from round 2 on)")


@given(st.floats(0, 1), st.integers(2, 9))
def test_range_of_equal_values_is_zero(value, number):
    """A rounded sum would make the mean larger than the values."""
    final = Final.summarize([value] * number)
    assert (final.mean, final.low, final.high) == (value, value, value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_error_bars_span_the_range(values):
    (down,), (up,) = error_bars([Final.summarize(values)])
    assert down >= 0
    assert up >= 0
    assert down + up == pytest.approx(max(values) - min(values))


def test_robustness_draws_no_picture_without_attacks(make_groups):
    assert list(robustness.draw_robustness(make_groups(({}, {})))) == []


# Rounds


@pytest.mark.slow
def test_curves_have_the_validated_rounds(make_groups):
    groups = make_groups(*seeds((0.2, 0.4), (0.6, 0.8)))
    personal, other = curves.draw_validation(groups)
    assert (personal.name, other.name) == ("curves_personal", "curves_global")
    assert [(row["metric"], row["round"]) for row in personal.rows] == [
        ("val/personal/accuracy", 1),
        ("val/personal/accuracy", 3),
        ("val/personal/loss", 1),
        ("val/personal/loss", 3),
    ]
    first = personal.rows[0]
    assert (first["mean"], first["min"], first["max"], first["runs"]) == (0.1, 0.06, 0.14, 2)
    (training,) = curves.draw_training_loss(groups)
    assert [row["mean"] for row in training.rows] == [2, 1.75, 1.5, 1.25]
    check_pictures(personal, other, training)


def test_run_without_a_validation_hides_no_curve_of_its_group(make_groups):
    stopped = {"seed_everything": 1}, {"accuracy": (0.6,), "rounds": 1, "tested": False}
    (group,) = make_groups(*seeds((0.2,)), stopped)
    personal, other = curves.draw_validation([group])
    assert (personal.name, other.name) == ("curves_personal", "curves_global")
    rows = [row for row in personal.rows if row["metric"] == "val/personal/accuracy"]
    assert [(row["round"], row["runs"]) for row in rows] == [(1, 1), (3, 1)]


def test_zero_accuracy_is_drawn(make_groups):
    groups = make_groups(({}, {"accuracy": (0.0,)}))
    assert len(drawn_lines(next(curves.draw_validation(groups)))) == 1


def test_uploads_are_drawn_if_some_are_forged(make_groups):
    groups = make_groups(({}, {}), ({"data.num_clients": 7}, {"extra": {"train/forged": 2}}))
    (picture,) = curves.draw_uploads(groups)
    assert {row["metric"] for row in picture.rows} == {"train/forged"}
    assert len(drawn_lines(picture)) == 1
    check_pictures(picture)
    assert list(curves.draw_uploads(groups[:1])) == []


def test_privacy_budget_is_drawn_under_the_name_that_says_a_simulation(make_groups):
    groups = make_groups(
        ({}, {"extra": {"privacy/epsilon": 2.5}}),
        ({"data.num_clients": 7}, {"extra": {"privacy/simulated_epsilon": 2.5}}),
        ({"data.num_clients": 8}, {}),
    )
    for group, title in zip(groups, ("ε", "ε of a simulated\nlarger cohort")):
        (picture,) = curves.draw_privacy([group])
        assert len({row["metric"] for row in picture.rows}) == 1
        assert picture.figure.axes[0].get_ylabel() == title
    assert list(curves.draw_privacy(groups[2:])) == []


@pytest.mark.slow
def test_only_drawn_group_is_named_in_a_report_of_several(make_groups):
    empty = {"tested": False, "extra": {"time/round": None}}
    groups = make_groups(({}, empty), ({"data.num_clients": 7}, {"extra": {"train/forged": 2}}))
    for draw in (curves.draw_uploads, spread.draw_spread, clients.draw_distributions):
        (of_several, *_), (single, *_) = draw(groups), draw(groups[1:])
        (legend,) = of_several.figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [groups[1].title]
        assert single.figure.legends == [], "the report has only this group"


def drawn_lines(picture):
    return picture.figure.axes[0].get_lines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "label"),  # beside runs with 0.5 s a round
    [(200, b">100<"), (3, b">2<"), (0.51, b">0.504<")],
)
def test_logarithmic_scale_has_plain_numbers(make_groups, seconds, label):
    groups = make_groups(({}, {"rounds": 1}), ({}, {"rounds": 4, "extra": {"time/round": seconds}}))
    (picture,) = times.draw_round_times(groups)
    assert picture.figure.axes[0].get_xscale() == "log"
    assert label in picture.svg()
    assert b"mathdefault" not in picture.svg()


def test_negative_loss_gets_a_linear_scale(make_groups):
    groups = make_groups(*seeds((0.5,)))
    losses = [5.0, 0.01, -0.5, -1.0]
    table = make_groups.folder / "run00" / "metrics.csv"
    rows = [row | {"train/loss": loss} for row, loss in zip(read_table(table), [*losses, ""])]
    write_table(table, rows)
    groups = group_runs(find_runs([make_groups.folder])[0])
    (picture,) = curves.draw_training_loss(groups)
    assert [row["mean"] for row in picture.rows] == losses
    assert picture.figure.axes[0].get_yscale() == "linear"


def test_round_times_are_shortest_median_and_longest(make_groups):
    (picture,) = times.draw_round_times(make_groups(({}, {})))
    (row,) = picture.rows
    assert (row["shortest"], row["median"], row["longest"]) == (0.5, 0.5, 0.5)
    check_pictures(picture)


# Drawing


def check_pictures(*pictures):
    """Check that pictures have alt texts and captions, and can be drawn."""
    for picture in pictures:
        assert len(picture.alt) > 30
        assert picture.caption.endswith(".")
        assert Image.open(io.BytesIO(picture.png())).size[0] > 500
        ElementTree.fromstring(picture.svg())
        text = picture.inline_svg()
        element = ElementTree.fromstring(text)
        (title, *_) = element
        assert title.tag.endswith("title")
        assert title.text
        ids = [part.get("id") for part in element.iter() if part.get("id")]
        assert all(name.startswith(f"{picture.stem}-") for name in ids)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= {*ids}


@pytest.mark.slow
def test_thirty_groups_are_numbered_and_named(make_groups):
    groups = make_groups(*[({"data.num_clients": k}, {}) for k in range(30)])
    (lines,), (points,) = curves.draw_training_loss(groups), spread.draw_spread(groups)
    for picture, repeats in ((lines, 1), (points, 2)):
        numbers = [text.get_text() for text in picture.figure.axes[0].texts]
        assert sorted(numbers) == sorted([str(k) for k in range(1, 31)] * repeats)
        svg = picture.svg().decode()
        assert all(f"{group.number} {group.label}" in svg for group in groups)


def test_line_styles_are_distinct():
    def style(place):
        return tuple(str(value) for value in line_style(place).values())

    assert len({style(place) for place in range(30)}) == 30
    assert len({line_style(place)["marker"] for place in range(FEW)}) == FEW


@pytest.mark.slow
@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=40), st.floats(0.001, 0.2))
def test_spaced_places_keep_their_order_and_distance(places, gap):
    spaced = space_out(sorted(places), gap)
    room = min(gap, 1 / max(1, len(places) - 1))
    assert all(b - a > room - 1e-9 for a, b in pairwise(spaced))
    assert spaced[0] > -1e-9
    assert spaced[-1] < 1 + 1e-9


@pytest.mark.slow
def test_matplotlib_settings_of_the_user_change_no_picture(make_groups):
    groups = make_groups(({}, {}))
    usual = next(curves.draw_training_loss(groups)).svg()
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "text.usetex": False}):
        assert next(curves.draw_training_loss(groups)).svg() == usual
        assert matplotlib.rcParams["font.size"] == 30


def test_names_with_matplotlib_syntax_are_drawn_literally(make_groups):
    names = ["$\\frac{1}{0$", "_hidden", "a & b < c", "x" * 300, "日本"]
    groups = make_groups(*[({"data.num_clients": name}, {}) for name in names])
    svg = next(curves.draw_training_loss(groups)).svg().decode()
    assert "$\\frac{1}{0$" in svg
    assert "_hidden" in svg
    assert "…" in svg


def test_svg_has_no_external_references(make_groups):
    picture = next(curves.draw_training_loss(make_groups(({}, {}))))
    root = ElementTree.fromstring(picture.svg())
    for element in root.iter():
        assert not element.tag.endswith(("script", "image", "foreignObject"))
        for name, value in element.attrib.items():
            if name.endswith("href"):
                assert value.startswith("#")


def test_coordinates_are_rounded_and_texts_are_not():
    figure = Figure()
    figure.text(0.5, 0.5, "0.123456")
    figure.add_subplot().plot([0.123456, 0.23456], [1, 2])
    svg = Picture("a", "b", "c", "d", [], figure).svg()
    assert b"0.123456" in svg
    paths = [path for path in svg.split(b' d="')[1:]]
    assert all(len(part.split(b".")[1]) <= 2 for p in paths for part in p.split(b'"')[0].split()
               if b"." in part)  # fmt: skip


def luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#15181c"], ids=["light", "dark"])
def test_lines_contrast_with_the_page(page):
    """WCAG asks for 3:1 for graphics; black takes the colour of the page's text."""
    for colour in COLOURS:
        if colour != BLACK:
            levels = sorted((luminance(colour), luminance(page)))
            assert (levels[1] + 0.05) / (levels[0] + 0.05) >= 3, colour


def test_points_of_a_robustness_line_compare_the_same_clients(make_groups):
    """Client 0 is an attacker at 0.25, clients 0 and 1 are at 0.5: only 2 and 3 are at each."""
    groups = make_groups(
        ({}, {"accuracy": (0.1, 0.3, 0.5, 0.9)}),
        (
            {**ATTACKS["RandomLabels"], "federation.adversary.fraction": 0.25},
            {"accuracy": (0.0, 0.2, 0.4, 0.8), "byzantine": [0]},
        ),
        (
            {**ATTACKS["RandomLabels"], "federation.adversary.fraction": 0.5},
            {"accuracy": (0.0, 0.0, 0.3, 0.7), "byzantine": [0, 1]},
        ),
    )
    personal, _ = robustness.draw_robustness(groups)
    found = {row["byzantine"]: row["accuracy"] for row in personal.rows}
    assert found == pytest.approx({0.0: 0.7, 0.25: 0.6, 0.5: 0.5})
    assert "The points of a line compare the same clients" in personal.caption
    assert "per_client.csv" not in personal.caption


def test_share_with_a_diverged_client_has_no_point_of_robustness(make_groups):
    make_groups(({}, {"accuracy": (0.5, 0.9)}), attacked_run("RandomLabels", 0.5, 0.4, clients=2))
    folders = sorted(make_groups.folder.iterdir())
    path = folders[1] / "per_client.csv"
    rows = read_table(path)
    assert [row["byzantine"] for row in rows] == ["1", "0"]
    write_table(path, [rows[0], rows[1] | {"personal_accuracy": "inf"}])
    personal, _ = robustness.draw_robustness(group_runs(find_runs([make_groups.folder])[0]))
    assert [(row["byzantine"], row["accuracy"]) for row in personal.rows] == [(0.0, 0.9)]
    assert "Shares at which the model of a client has diverged" in personal.caption


def test_robustness_without_tables_of_clients_says_so(make_groups):
    make_groups(({}, {"accuracy": (0.5, 0.9)}), attacked_run("RandomLabels", 0.5, 0.4, clients=2))
    for folder in make_groups.folder.iterdir():
        (folder / "per_client.csv").unlink()
    personal, _ = robustness.draw_robustness(group_runs(find_runs([make_groups.folder])[0]))
    assert next(row["accuracy"] for row in personal.rows) == pytest.approx(0.7)
    assert "Runs without `per_client.csv` have the mean over their own" in personal.caption


def test_column_table_equals_its_rows():
    mean = [0.1, 1e300, -2.0]
    texts = {"label": ["=a", "b", "=a"], 'a "name", or two': ["", "a\nb", 'c"d,e\r']}
    columns = {**texts, "round": [1, 2, 3], "mean": mean, "min": mean, "max": [1, 0.5, math.inf]}
    table = ColumnTable(columns)
    rows = [dict(zip(columns, cells)) for cells in zip(*columns.values())]
    assert (len(table), [*table], table[1:], table[-1]) == (3, rows, rows[1:], rows[-1])
    assert encode_csv(table) == encode_csv(rows)
    assert encode_csv(table).splitlines()[1] == b"'=a,,1,0.1,0.1,1"
    assert encode_csv(ColumnTable({"a": ["", "b"]})) == b'a\n""\nb\n'
    assert len(ColumnTable({})) == 0


def test_rows_with_different_columns_have_empty_cells():
    assert encode_csv([{"a": 1}, {"b": "-x", "a": None}]) == b"a,b\n1,\n,'-x\n"
    assert encode_csv([]) == b"\n"
