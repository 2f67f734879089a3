"""Trace files: clients by id or name, values by round, and refusals in one sentence."""

import pytest
import torch
from tables import table_test

from pl_fed.systems import ClientProfiles, Systems, Trace

OWNERS = [["ward a"], ["ward b"], ["c", "d"]]


def write(folder, text):
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_valid_from_their_round_on(tmp_path):
    path = write(
        tmp_path,
        "client,round,speed,availability\nward b,0,5,0.5\n0,0,1,1\n2,0,2,1\n0,3,10,0\n0,7,20,1\n",
    )
    trace = Trace.read(path, 3, OWNERS)
    clients = torch.tensor([2, 0, 1])
    speeds = {r: trace.select(clients, r)["speed"].tolist() for r in (0, 2, 3, 6, 7, 99)}
    assert speeds == {
        **{round: [2.0, 1.0, 5.0] for round in (0, 2)},
        **{round: [2.0, 10.0, 5.0] for round in (3, 6)},
        **{round: [2.0, 20.0, 5.0] for round in (7, 99)},
    }
    assert trace.select(clients, 4)["availability"].tolist() == [1.0, 0.0, 0.5]


def test_rows_of_held_out_clients_are_not_used(tmp_path):
    text = "client,round,speed\nward a,0,3\nward b,0,5\nward b,4,1\n2,0,7\n"
    owners = [["ward a"], ["c", "d"], ["ward b"]]  # the held-out client is the last
    trace = Trace.read(write(tmp_path, text.replace("2,0,7", "1,0,7")), 2, owners, num_held_out=1)
    assert trace.select(torch.tensor([0, 1]), 9)["speed"].tolist() == [3.0, 7.0]
    trace = Trace.read(write(tmp_path, "client,speed\n0,3\n1,5\n2,7\n"), 2, (), num_held_out=1)
    assert trace.select(torch.tensor([0, 1]), 0)["speed"].tolist() == [3.0, 5.0]
    with pytest.raises(
        ValueError, match="by ids of 0 to 1 or by names of owners, but got 'ward b'"
    ):
        Trace.read(write(tmp_path, text), 2, owners[:2])


@pytest.mark.parametrize("cell", ["'s-Hertogenbosch", "''s-Hertogenbosch"])
def test_an_owner_with_a_leading_apostrophe_is_found(tmp_path, cell):
    """The files of a run write two, so that no spreadsheet drops the first."""
    trace = Trace.read(write(tmp_path, f"client,speed\n{cell},3\n"), 1, [["'s-Hertogenbosch"]])
    assert trace.select(torch.tensor([0]), 0)["speed"].tolist() == [3.0]


def test_a_trace_replaces_the_distributions_of_its_columns(tmp_path):
    path = write(tmp_path, "client,download\n0,100\n1,200\n")
    profiles = ClientProfiles(Systems(speed=3.0, upload=7.0, trace=path), 2, (), seed=0)
    numbers = profiles.select(torch.tensor([1, 0]), 5)
    assert numbers["download"].tolist() == [200.0, 100.0]
    assert numbers["speed"].tolist() == [3.0, 3.0]
    assert numbers["upload"].tolist() == [7.0, 7.0]


@table_test(
    "text, message",
    [
        ("", "a column `client`, perhaps a column `round`, .* but got no rows in trace.csv"),
        ("client,speed\n", "but got no rows in trace.csv"),
        ("speed,upload\n1,2\n", "to have a column `client`, .* but got speed, upload in trace.csv"),
        ("client,round\n0,0\n", "any of the columns speed, .* but got client, round in trace.csv"),
        ("client,sped\n0,1\n", "but got client, sped in trace.csv: rename the columns"),
        (
            "client,speed\n0,1\nward z,1\n",
            "ids of 0 to 2 or by names of owners, but got 'ward z' in",
        ),
        ("client,speed\n0,1\n3,1\n", "but got '3' in line 3: remove the line"),
        ("client,speed\n0,1\n0,2\n", "but got a second one of client 0 and round 0 in line 3"),
        ("client,speed\n0,1\nward a,2\n", "a second one of client ward a and round 0 in line 3"),
        ("client,speed\n0,1\n", r"a row of round 0 for each of 3 clients but got none .*\[1, 2\]"),
        ("client,round,speed\n0,1,1\n", r"got none for clients \[0, 1, 2\]: add them"),
        (
            "client,round,speed\n0,x,1\n",
            "`round` of .* to be integers from 0 but got 'x' in line 2",
        ),
        ("client,speed\n0,-1\n", "`speed` of .* to be above 0, and finite but got '-1' in line 2"),
        ("client,speed\n0,nan\n", "to be above 0, and finite but got 'nan' in line 2"),
        ("client,speed\n0\n", "`speed` of .* to be above 0, and finite but got '' in line 2"),
        ("client,dropout\n0,2\n", r"`dropout` of .* to be in \[0, 1\] but got '2' in line 2"),
        ("client,speed\n\x1b[31m,2\n", r"but got '\\\\x1b\[31m' in line 2"),
    ],
    ids=lambda text: repr(text)[:60],
)
def test_invalid_traces_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        Trace.read(write(tmp_path, text), 3, OWNERS)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"CSV file that can be read but got .*none.csv"):
        Trace.read(tmp_path / "none.csv", 3, OWNERS)
