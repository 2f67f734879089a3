"""Values that a file may hold so that it can be loaded without running code."""

import io
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pl_fed.safe_load import can_be_loaded, safe_load


class Score:
    """An object of a user's own class."""


LOADABLE = [
    {"rate": np.float64(0.1), "history": np.arange(3)},
    OrderedDict(weight=nn.Parameter(torch.ones(2))),
    frozenset([3]),
    [Path("runs"), timedelta(hours=1), None, (3, "name", b"bytes")],
]


@pytest.mark.parametrize("value", LOADABLE, ids=lambda value: type(value).__name__)
def test_values_are_loaded_as_they_were_saved(value):
    assert can_be_loaded(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = safe_load(file)
    assert str(loaded) == str(value)
    assert type(loaded) is type(value)


@pytest.mark.parametrize("value", [Score(), [lambda: 1], nn.Identity()], ids=["own", "code", "net"])
def test_other_objects_cannot_be_loaded(value):
    assert not can_be_loaded({"state": value})
