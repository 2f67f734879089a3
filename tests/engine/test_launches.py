"""An eager local step runs few operators beside those of forward pass, backward pass and SGD."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from further_cases import mark_further

BENCHMARKS = Path(__file__).parents[2] / "experiments" / "benchmarks"


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "operator_counts", raising=False)
    import operator_counts

    return operator_counts


@pytest.mark.slow
@pytest.mark.parametrize("engine", mark_further(["one_by_one", "stacked"], ["one_by_one"]))
def test_a_step_has_at_most_1_3_times_the_operators_by_hand(counts, engine):
    for case in counts.CASES.values():
        case = replace(case, clients=2)
        own = counts.count_engine(case, engine, few=2, many=4).per_step
        assert own <= 1.3 * counts.count_by_hand(case, engine == "stacked")


@pytest.mark.slow
def test_a_stacked_round_has_as_many_operators_for_any_number_of_clients(counts):
    case = counts.CASES["FedAvg, MLP"]
    steps = [
        counts.count_engine(replace(case, clients=clients), "stacked", few=2, many=4)
        for clients in (10, 100)
    ]
    assert steps[0] == steps[1]
