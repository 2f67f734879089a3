"""Benefit over local training: the gains of the same clients, by hand."""

import json

import numpy as np
import pytest
from run_folders import read_table, with_changes, write_run, write_table

import pl_fed
from pl_fed.reports.answers import find_answers
from pl_fed.reports.benefit import Benefit, average_figures, describe_benefit
from pl_fed.reports.clients import draw_gains
from pl_fed.reports.group import group_runs
from pl_fed.reports.run import find_runs
from pl_fed.studies.tables import format_number

LOCAL = {"model.class_path": "pl_fed.clients.Local"}
ALONE, JOINED = (0.5, 0.75, 1.0, 0.25, 0.5), (0.75, 0.75, 0.5, 0.5, 0.625)


def write_pair(folder, changes=(), alone=ALONE, joined=JOINED, seed=0, **options):
    """Write a run of local training and one of Ditto on the same data."""
    seeds = {"seed_everything": seed, **dict(changes)}
    write_run(folder / f"local{seed}", with_changes({**LOCAL, **seeds}), accuracy=alone, **options)
    write_run(folder / f"ditto{seed}", with_changes(seeds), accuracy=joined, **options)
    for name in ("local", "ditto"):
        change_column(folder / f"{name}{seed}", "train_samples", [10, 20, 30, 5, 15])
    return folder / f"ditto{seed}", folder / f"local{seed}"


def change_column(folder, name, values):
    rows = read_table(folder / "per_client.csv")
    write_table(
        folder / "per_client.csv", [row | {name: value} for row, value in zip(rows, values)]
    )


def test_gains_of_each_client_by_hand(tmp_path):
    benefit = pl_fed.measure_benefit(*write_pair(tmp_path, byzantine=[4]))
    assert benefit.clients.tolist() == [0, 1, 2, 3], "the Byzantine client is left out"
    assert benefit.gains.tolist() == [0.25, 0.0, -0.5, 0.25]
    assert (benefit.share_gaining, benefit.share_losing) == (0.5, 0.25)
    assert (benefit.mean, benefit.mean_gain) == (0.0, 0.25)
    assert (benefit.mean_loss, benefit.largest_loss) == (0.5, 0.5)
    assert benefit.train_samples.tolist() == [10, 20, 30, 5]


def test_smaller_losses_are_gains(tmp_path):
    benefit = pl_fed.measure_benefit(*write_pair(tmp_path), metric="loss")
    assert benefit.lower_is_better
    assert benefit.gains.tolist() == [0.25, 0.0, -0.5, 0.25, 0.125]


def test_clients_whose_models_diverge_lose(tmp_path):
    folders = write_pair(tmp_path)
    change_column(folders[0], "personal_loss", [0.1, 0.2, "inf", "nan", 0.3])
    change_column(folders[1], "personal_loss", [0.3] * 5)
    benefit = pl_fed.measure_benefit(*folders, metric="loss")
    assert benefit.clients.tolist() == [0, 1, 4]
    assert (benefit.share_gaining, benefit.share_losing, benefit.num_diverged) == (0.4, 0.4, 2)
    assert benefit.largest_loss == np.inf
    assert benefit.mean == pytest.approx(0.1)
    assert "inf" in format_number(benefit.largest_loss, 3)


@pytest.mark.parametrize(
    ("column", "metric", "message"),
    [
        ("personal_ape", "ape", "one with a known direction but got ape"),
        ("personal_balanced_mae", "mae", "test mae of the model personal or global"),
    ],
    ids=["unknown direction", "longer name"],
)
def test_metrics_that_no_run_explains_are_refused(tmp_path, column, metric, message):
    folders = write_pair(tmp_path)
    for folder in folders:
        change_column(folder, column, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=message):
        pl_fed.measure_benefit(*folders, metric=metric)


def test_models_of_the_federation(tmp_path):
    folders = write_pair(tmp_path)
    change_column(folders[0], "global_accuracy", [0, 0, 0, 0, 1])
    assert pl_fed.measure_benefit(*folders, model="global").share_gaining == 0.2
    with pytest.raises(ValueError, match=r"test accuracy of the model hybrid in per_client\.csv"):
        pl_fed.measure_benefit(*folders, model="hybrid")
    with pytest.raises(ValueError, match="test mae of the model personal or global"):
        pl_fed.measure_benefit(*folders, metric="mae")


def test_clients_that_all_gain_or_all_stay():
    ids, same = np.arange(3), np.full(3, 0.5)
    unchanged = Benefit(ids, same, same, same)
    assert (unchanged.mean_gain, unchanged.mean_loss, unchanged.largest_loss) == (None, None, 0)
    assert describe_benefit(unchanged)["correlation with training samples"] is None
    assert Benefit(ids, same, same + 0.25, same).largest_loss == 0


def test_mean_and_largest_loss_are_of_the_seeds_in_which_a_client_loses():
    """A mean loss of one seed beside a largest loss over two was the larger of both."""
    ids, alone = np.arange(2), np.array([0.5, 0.5])

    def measure(*joined, **options):
        return Benefit(ids, alone, np.array(joined), alone, **options)

    losing, gaining = measure(0.25, 0.375), measure(0.75, 0.5)
    figures = average_figures([losing, gaining])
    assert (figures["mean loss of these"], figures["largest loss"]) == (0.1875, 0.25)
    assert figures["share that loses"] == 0.5, "of both"
    assert average_figures([gaining])["largest loss"] == 0
    diverged = average_figures([losing, measure(0.75, 0.5, num_diverged=1)])
    assert (diverged["mean loss of these"], diverged["largest loss"]) == (0.1875, np.inf)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed_everything": 1}, "data of the seed 1 instead of 0"),
        ({"data.seed": 3}, "data of the seed 3 instead of 0"),
        ({"data.num_clients": 9}, "values of `data.num_clients`"),
        ({"data.partitioner.init_args.classes_per_client": 3}, "values of `data.partitioner."),
        ({"data.skew": {"class_path": "pl_fed.skews.Rotation"}}, "values of `data.skew`"),
    ],
)
def test_runs_of_other_clients_are_refused(tmp_path, changes, reason):
    folder = write_run(tmp_path / "ditto", accuracy=JOINED)
    local = write_run(tmp_path / "local", with_changes({**LOCAL, **changes}), accuracy=ALONE)
    for pair in ((folder, local), (local, folder)) if "values" in reason else ((folder, local),):
        with pytest.raises(ValueError, match=f"runs of the same clients but got other {reason}"):
            pl_fed.measure_benefit(*pair)


def test_other_samples_and_missing_tests_are_refused(tmp_path):
    folder, local = write_pair(tmp_path)
    change_column(local, "train_samples", [10, 20, 30, 5, 16])
    with pytest.raises(ValueError, match=r"got other values of `train_samples` in .*local0"):
        pl_fed.measure_benefit(folder, local)
    write_run(tmp_path / "short", with_changes(LOCAL), accuracy=ALONE[:3])
    with pytest.raises(ValueError, match=r"numbers of clients \(3 instead of 5\)"):
        pl_fed.measure_benefit(folder, tmp_path / "short")
    write_run(tmp_path / "untested", tested=False)
    with pytest.raises(ValueError, match="`local` to be the folder of a run with a test"):
        pl_fed.measure_benefit(folder, tmp_path / "untested")


def test_settings_that_leave_the_samples_do_not_matter(tmp_path):
    """A batch size or a seed of the federation may be another one."""
    folder = write_run(tmp_path / "ditto", accuracy=JOINED)
    changes = {**LOCAL, "data.batch_size": 5, "federation.seed": 9}
    local = write_run(tmp_path / "local", with_changes(changes), accuracy=ALONE)
    (local / "summary.json").write_text(json.dumps({"seeds": {"data": 0}}))
    assert pl_fed.measure_benefit(folder, local).mean == pytest.approx(0.025)
    (local / "summary.json").write_text(json.dumps({"seeds": {"data": 4}}))
    with pytest.raises(ValueError, match="data of the seed 4 instead of 0"):
        pl_fed.measure_benefit(folder, local)


def test_answer_says_for_whom_a_federation_pays(tmp_path):
    for seed, joined in enumerate([JOINED, (0.5, 0.75, 1.0, 0.25, 0.75)]):
        write_pair(tmp_path, joined=joined, seed=seed)
    groups = group_runs(find_runs([tmp_path])[0])
    (row,) = next(answer.rows for answer in find_answers(groups) if answer.name == "local")
    assert (row["better"], row["worse"]) == ("4 of 10", "1 of 10")
    assert row["share that gains"] == pytest.approx((0.6 + 0.2) / 2)
    assert row["mean gain of these"] == pytest.approx((0.625 / 3 + 0.25) / 2)
    assert (row["mean loss of these"], row["largest loss"]) == (0.5, 0.5), "of the same seed"
    assert row["correlation with the local result"] < 0


def test_picture_of_gains(tmp_path):
    write_pair(tmp_path)
    (picture,) = draw_gains(group_runs(find_runs([tmp_path])[0]))
    assert [row["gain in accuracy"] for row in picture.rows] == [-0.5, 0, 0.125, 0.25, 0.25]
    assert picture.png()
    write_run(tmp_path / "only" / "ditto")
    assert list(draw_gains(group_runs(find_runs([tmp_path / "only"])[0]))) == []
