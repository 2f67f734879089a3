"""What several tests share."""

import os

import pytest

from pl_fed.engine import compiled_step


@pytest.fixture(scope="session")
def real_data():
    """The folder with the real data sets, or ``None``: PL_FED_DATA."""
    return os.environ.get("PL_FED_DATA")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep the user's notes of the engines' speeds out of the tests, and theirs out of the user's.

    Processes that tests start have it, too. What the compiler keeps is in another folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def uncompiled(monkeypatch):
    """Run traced steps as they are, as to compile one takes seconds.

    Gives the graphs that would have been compiled.
    """
    graphs = []

    def keep(graph, *_, **__):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiled_step, "compile_graph", keep)
    return graphs
