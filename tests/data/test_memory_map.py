"""Room for samples on disk: a file that no folder shows, and a full disk in one sentence."""

import shutil
import tempfile

import pytest
import torch

from pl_fed.data.memory_map import allocate_on_disk


def test_rows_on_disk_hold_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = allocate_on_disk(5, torch.zeros(2, 3, dtype=torch.uint8))
    rows[:] = torch.arange(15, dtype=torch.uint8).view(5, 3)
    assert (rows.shape, rows.dtype, rows[4].tolist()) == ((5, 3), torch.uint8, [12, 13, 14])
    assert not [*tmp_path.iterdir()]


def test_samples_without_numbers_need_no_file():
    assert allocate_on_disk(4, torch.zeros(2, 0)).shape == (4, 0)


def test_full_disk_is_reported(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    words = r"to have space for 4.0 GiB of samples but it has 1.0 GiB: set .* TMPDIR"
    with pytest.raises(OSError, match=words):
        allocate_on_disk(2**30, torch.zeros(2, 1))
