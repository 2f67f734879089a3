"""The page's table of promises, memory and needs is the table of the classes."""

import pytest
from contract_suite import find_configurations
from defences_table import describe_aggregator, find_memory, find_needs, make_table, read_table

import pl_fed.aggregators
from pl_fed.aggregators import (
    CRFL,
    LASA,
    Aggregator,
    CenteredClipping,
    Chain,
    FLTrust,
    KLoss,
    Mean,
    Median,
    PreAggregator,
)


@pytest.mark.exhaustive
def test_table_of_the_page_is_up_to_date():
    assert read_table() == make_table(), "run the command at the top of defences_table.py"


@pytest.mark.slow
def test_page_has_a_row_with_the_promises_of_each_aggregator():
    rows = [line.strip("| ").split(" | ") for line in read_table().splitlines()]
    promises = {row[0]: row[1:3] for row in rows if len(row) > 2}
    pairs = find_configurations(pl_fed.aggregators, Aggregator, {})
    for kind in {kind for kind, _ in pairs} - {Chain}:
        expected = [f"{kind().breakdown(20)} of 20", f"{kind().max_byzantine(20)} of 20"]
        assert promises[f"`{kind.__name__}`"] == expected, kind
    pairs = find_configurations(pl_fed.aggregators, PreAggregator, {})
    assert promises.keys() >= {f"`{kind.__name__}`" for kind, _ in pairs}


def test_cells_equal_those_by_hand():
    assert describe_aggregator(Median) == [
        *("9 of 20", "9 of 20", "–", "yes", "–", "buckets", "–", "–"),
    ]
    assert describe_aggregator(Mean)[4:6] == ["yes", "one sum"]
    assert find_memory(CenteredClipping) == "d"
    needs = {kind: find_needs(kind) for kind in (CRFL, FLTrust, KLoss, LASA)}
    assert needs == {CRFL: "model", FLTrust: "server's data", KLoss: "start losses", LASA: "layout"}
