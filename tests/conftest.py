"""What several tests share."""

import os

import pytest

from pl_fed.engine import compiled


@pytest.fixture(scope="session")
def real_data():
    """The folder with the real data sets, or ``None``: PL_FED_DATA."""
    return os.environ.get("PL_FED_DATA")


@pytest.fixture
def uncompiled(monkeypatch):
    """Run traced steps as they are, as to compile one takes seconds.

    Gives the graphs that would have been compiled.
    """
    graphs = []

    def keep(graph, *_, **__):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiled, "compile_graph", keep)
    return graphs
