"""All algorithms on Fashion-MNIST: the committed page."""

import pytest

from experiments.fashion_mnist import studies


def test_main_model_is_the_personal_one_if_there_is_one():
    results = studies.read_results()
    assert len(results.algorithms) == 32
    models = {name: results.main_model(name) for name in ("FedAvg", "local", "Ditto", "TERM")}
    assert models == {
        "FedAvg": "global",
        "local": "personal",
        "Ditto": "personal",
        "TERM": "global",
    }


@pytest.mark.slow
def test_page_shows_the_current_table():
    """The test fails for new rows: run python -m experiments fashion_mnist --report."""
    assert (studies.HERE / "table.md").read_text() == studies.make_page()
