"""The guarantee of several private runs together."""

import json
from pathlib import Path

import pytest
from run_folders import with_changes, write_run

from pl_fed.reports.privacy import describe_guarantees
from pl_fed.reports.run import read_run

DIGITS = {"data.dataset.class_path": "pl_fed.data.Digits"}
DIABETES = {"data.dataset.class_path": "pl_fed.data.Diabetes"}


def describe(tmp_path, runs, names=None):
    """Return the sentences for runs: (ε or None, δ, changes of the config) each.

    The names are those of their noise.
    """
    read = []
    for number, (epsilon, delta, changes) in enumerate(runs):
        config = with_changes({"federation.privacy": {"delta": delta}, **changes})
        extra = {} if epsilon is None else {"privacy/epsilon": epsilon}
        folder = write_run(tmp_path / str(number), config, extra=extra)
        summary = {"privacy": f"ε of {number}.", "noise": names and names[number]}
        (folder / "summary.json").write_text(json.dumps(summary))
        read.append(read_run(folder))
    return list(describe_guarantees(read))


def test_guarantees_of_runs_on_one_data_set_add_up(tmp_path):
    partition = {**DIGITS, "data.num_clients": 7}  # other clients, but the same people
    runs = [(3.0, 1e-2, DIGITS), (0.5, 2e-2, partition), (8.0, 1e-5, DIABETES), (None, 0, DIGITS)]
    *own, composed = describe(tmp_path, runs)
    assert own == [f"{number}: ε of {number}." for number in range(4)]
    assert composed.startswith("2 private runs read one data set")
    assert "ε = 3.5 at δ = 0.03," in composed


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a"), (None, None), (["a"], ["a"])], ids=str)
def test_runs_that_resumed_one_checkpoint_have_no_sum(tmp_path, names):
    """They share the noise of later rounds, which their difference does not have."""
    runs = [(3.0, 1e-2, DIGITS), (4.0, 1e-2, DIGITS)]
    *_, composed = describe(tmp_path, runs, names)
    assert ("ε = 7 at δ = 0.02," in composed) == (names != ("a", "a"))
    words = "have the same noise and cohorts, because one resumed a checkpoint of another: together"
    assert (words in composed) == (names == ("a", "a"))


POISSON = {"class_path": "pl_fed.samplers.Poisson", "init_args": {"rate": 0.5}}
UNAMPLIFIED = {"federation.privacy": {"delta": 1e-2, "amplification": False}}


@pytest.mark.parametrize(
    ("other", "adds_up"),
    [({"federation.sampler": POISSON}, False), (UNAMPLIFIED, False), ({}, True)],
    ids=["Poisson", "no amplification", "Uniform"],
)
def test_runs_with_other_neighbours_have_no_sum(tmp_path, other, adds_up):
    """Replacing a client's data is another change than leaving the client out."""
    runs = [(1.0, 1e-2, DIGITS), (2.0, 1e-2, {**DIGITS, **other}), (4.0, 1e-2, DIGITS)]
    *_, composed = describe(tmp_path, runs)
    assert ("ε = 7 at" in composed) == adds_up
    words = "1 of them for neighbours in which one client sends nothing, and 2 for neighbours in"
    assert (words in composed) != adds_up


def test_sums_are_rounded_up(tmp_path):
    *_, composed = describe(tmp_path, [(19.6412, 0.1, DIGITS), (0.0, 0.2, DIGITS)])
    assert "ε = 19.65 at δ = 0.3," in composed


def test_runs_that_read_one_data_set_in_other_ways_add_up(tmp_path):
    """The download, the columns and the spelling of a path do not change whose data it is."""
    fashion, table = (f"pl_fed.data.{name}" for name in ("FashionMNIST", "Table"))
    runs = [
        (1.0, 1e-3, read_by(fashion, download=True)),
        (2.0, 1e-3, read_by(fashion, root="/data")),
        (4.0, 1e-3, read_by(table, path="./people.csv", target="income")),
        (8.0, 1e-3, read_by(table, path="people.csv", target="age", inputs=["city"])),
        (32.0, 1e-3, read_by(table, path=str(Path("people.csv").absolute()), target="age")),
        (16.0, 1e-3, read_by(table, path="others.csv", target="age")),
    ]
    *_, images, people = describe(tmp_path, runs)
    assert "ε = 3 at" in images
    assert "ε = 44 at" in people


def read_by(class_path, **arguments):
    """Return the options of a data source in a config."""
    return {"data.dataset": {"class_path": class_path, "init_args": arguments}}


def test_single_runs_have_no_composed_guarantee(tmp_path):
    assert len(describe(tmp_path, [(3.0, 1e-2, DIGITS), (8.0, 1e-5, DIABETES)])) == 2
