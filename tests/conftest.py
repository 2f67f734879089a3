"""What several tests share."""

import os

import pytest


@pytest.fixture(scope="session")
def real_data():
    """The folder with the real data sets, or ``None``: PL_FED_DATA."""
    return os.environ.get("PL_FED_DATA")
