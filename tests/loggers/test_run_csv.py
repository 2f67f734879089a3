"""A damaged ``metrics.csv`` is renamed, and the run continues."""

import csv

import pytest
from lightning.pytorch.loggers import CSVLogger

from pl_fed.loggers import RunCSV, refuse_shared_file

INTACT = b"round,train/loss\n0,0.5\n1,0.25\n"
DAMAGED = {
    "no UTF-8": INTACT.replace(b"0.25", b"0.\x95\xff"),
    "zeros in its head": b"\0\0\0\0\0\0" + INTACT[6:],
    "a head of nothing": b"\n" + INTACT,
    "no round": INTACT.replace(b"1,", b"x,"),
    "too many values": INTACT.replace(b"0.25", b"0.25,3"),
    "too few values": INTACT.replace(b",0.25", b""),
    "a value that is too long": INTACT + b"2," + b"1" * 200_000 + b"\n",
}


@pytest.fixture(autouse=True)
def default_limit():
    """Restore the largest length of a value of Python's reader: reports raise it."""
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_renamed(tmp_path, damage):
    for number in (1, 2):
        (tmp_path / "metrics.csv").write_bytes(DAMAGED[damage])
        logger = RunCSV(tmp_path)
        match = rf"metrics.csv is damaged \(.*\): it is kept as metrics_damaged_{number}.csv"
        with pytest.warns(UserWarning, match=match):
            logger.keep(2)
        logger.log_metrics({"train/loss": 0.125}, step=2)
        assert (tmp_path / f"metrics_damaged_{number}.csv").read_bytes() == DAMAGED[damage]
        assert (tmp_path / "metrics.csv").read_bytes() == b"round,train/loss\n2,0.125\n"


@pytest.mark.parametrize("content", [INTACT, INTACT[:-3], b"", b"round\n", b"rou"])
def test_truncated_last_row_is_no_damage(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    RunCSV(tmp_path).keep(2)
    assert not [*tmp_path.glob("metrics_damaged*")]
    assert (tmp_path / "metrics.csv").read_bytes().startswith(b"round")


@pytest.mark.parametrize(("rows", "missing"), [("0,0.5\n", "1 to 2"), ("", "0 to 2")])
def test_lost_rows_are_told(tmp_path, rows, missing):
    """A resume wrote its rows behind those of half a file, and was silent."""
    if rows:
        (tmp_path / "metrics.csv").write_text(f"round,train/loss\n{rows}")
    with pytest.warns(UserWarning, match=rf"metrics.csv has no rows of rounds {missing}, which"):
        RunCSV(tmp_path).keep(3, warns=True)


@pytest.mark.filterwarnings("error")
def test_complete_rows_are_no_news(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(INTACT)
    RunCSV(tmp_path).keep(2, warns=True)
    RunCSV(tmp_path / "new").keep(2)  # a checkpoint of another folder


def test_undefined_number_is_an_empty_cell(tmp_path):
    logger = RunCSV(tmp_path)
    logger.log_metrics({"round": 0, "train/loss": 1.5, "train/benign_distance": float("nan")})
    logger.log_metrics({"round": 1, "train/loss": float("inf"), "train/benign_distance": 0.25})
    expected = "round,train/loss,train/benign_distance\n0,1.5,\n1,inf,0.25\n"
    assert (tmp_path / "metrics.csv").read_text() == expected


def test_resumed_run_drops_tests_of_earlier_rounds(tmp_path):
    """A test of the best round has its row behind those of later rounds, or shares one of them."""
    logger = RunCSV(tmp_path)
    for round in range(3):
        logger.log_metrics({"round": round, "train/loss": 0.5})
    logger.log_metrics({"round": 2, "test/loss": 0.25})
    logger.log_metrics({"round": 1, "test/loss": 0.125})
    resumed = RunCSV(tmp_path)
    resumed.keep(3)
    resumed.log_metrics({"round": 3, "train/loss": 0.75})
    expected = "round,train/loss,test/loss\n0,0.5,\n1,0.5,\n2,0.5,\n3,0.75,\n"
    assert (tmp_path / "metrics.csv").read_text() == expected


def test_file_of_another_logger_is_refused(tmp_path):
    """Both would write metrics.csv: the first round ended in "dict contains fields not in"."""
    refuse_shared_file([CSVLogger(tmp_path, name="own"), CSVLogger(tmp_path, name="")], tmp_path)
    for shared in (CSVLogger(tmp_path, "", ""), CSVLogger(tmp_path.parent, "", tmp_path.name)):
        with pytest.raises(ValueError, match=r"a CSVLogger in another folder than"):
            refuse_shared_file([shared], tmp_path)
