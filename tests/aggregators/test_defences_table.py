"""The page's table of promises, memory and needs is the table of the classes."""

from defences_table import describe_aggregator, find_memory, find_needs, make_table, read_table

from pl_fed.aggregators import CRFL, LASA, CenteredClipping, FLTrust, KLoss, Mean, Median


def test_table_of_the_page_is_up_to_date():
    assert read_table() == make_table(), "run the command at the top of defences_table.py"


def test_cells_equal_those_by_hand():
    assert describe_aggregator(Median) == [
        *("9 of 20", "9 of 20", "–", "yes", "–", "buckets", "–", "–"),
    ]
    assert describe_aggregator(Mean)[4:6] == ["yes", "one sum"]
    assert find_memory(CenteredClipping) == "d"
    needs = {kind: find_needs(kind) for kind in (CRFL, FLTrust, KLoss, LASA)}
    assert needs == {CRFL: "model", FLTrust: "server's data", KLoss: "start losses", LASA: "layout"}
