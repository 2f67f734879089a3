"""Reading ahead: the right pages, in memory before their use, and no change of a number."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from pl_fed.data.memory_map import tensors_of_memory_maps
from pl_fed.data.read_ahead import page_ranges, read_ahead

PAGE = mmap.PAGESIZE


def make_map(path, samples, row_bytes):
    np.save(path, np.arange(samples * row_bytes, dtype="uint8").reshape(samples, row_bytes))
    return tensors_of_memory_maps(np.load(path, mmap_mode="r"))


def pages(leaf, index):
    """The numbers of the pages of each range, counted from the page of the first byte."""
    origin = leaf.data_ptr() // PAGE
    ranges = page_ranges(leaf, torch.tensor(index, dtype=torch.int64))
    assert all(begin % PAGE == size % PAGE == 0 for begin, size in ranges)
    return [(begin // PAGE - origin, size // PAGE) for begin, size in ranges]


def test_ranges_cover_the_pages_of_the_rows(tmp_path):
    leaf = make_map(tmp_path / "x.npy", 40, PAGE)  # behind the header, each row lies in two pages
    assert pages(leaf, [3]) == [(3, 2)]
    assert pages(leaf, [9, 3, 4, 9]) == [(3, 3), (9, 2)]
    assert pages(leaf, [0, 1, 2, 3]) == [(0, 5)]
    small = make_map(tmp_path / "small.npy", 40, 8)
    assert pages(small, [30, 2, 17]) == [(0, 1)]
    assert pages(leaf, []) == []


def count_resident_bytes(leaf):
    """The bytes of the file of a map that the process has in its memory, from Linux's smaps."""
    is_map = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(number, 16) for number in words[0].split("-"))
            is_map = begin <= leaf.data_ptr() < end
        elif is_map and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError("no such map")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's smaps")
@pytest.mark.slow
def test_rows_are_mapped_when_the_thread_ends(tmp_path):
    leaf = make_map(tmp_path / "x.npy", 4000, PAGE)
    before = count_resident_bytes(leaf)
    read_ahead({"x": leaf}, lambda: torch.arange(2000, 3000)).join()
    grown = count_resident_bytes(leaf) - before
    assert 1000 * PAGE <= grown < 2000 * PAGE
    values = leaf[2999]
    assert torch.equal(values, torch.arange(2999 * PAGE, 3000 * PAGE).to(torch.uint8))
