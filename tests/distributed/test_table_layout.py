"""Processes join tables by numbers; they agree on names once. Threads stand for the processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pl_fed.distributed.processes import Processes
from pl_fed.distributed.table_layout import TableLayout
from pl_fed.distributed.work_share import WorkShare

WORKERS = torch.tensor([1, 0, 1, 1, 0])
CPU = torch.device("cpu")


class Threads:
    """Meeting of threads: each brings a value and receives all of them."""

    def __init__(self, size):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)
        self.agreements = 0

    def meet(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Member(Processes):
    """A process whose collectives are meetings of threads."""

    def __init__(self, rank, threads):
        super().__init__(rank, len(threads.values))
        object.__setattr__(self, "threads", threads)

    def gather(self, rows, length):
        padded = rows.new_full((length, *rows.shape[1:]), 7)
        padded[: len(rows)] = rows
        return torch.cat(self.threads.meet(self.rank, padded))

    def gather_objects(self, value):
        self.threads.agreements += self.rank == 0
        return self.threads.meet(self.rank, value)


@pytest.fixture
def join():
    """Return a function that joins tables of two processes; a layout outlasts the calls."""
    threads = Threads(2)
    layouts = [TableLayout(), TableLayout()]

    def run(tables, workers=WORKERS):
        def join_one(rank):
            share = WorkShare(Member(rank, threads), torch.arange(len(workers)), workers)
            return share.join_tables(tables[rank], layouts[rank], CPU)

        threads.agreements = 0
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(join_one, (0, 1))
        assert first.keys() == second.keys()
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=0, equal_nan=True)
        return first, threads.agreements

    return run


def test_tables_are_joined_in_the_order_of_the_cohort(join):
    loss = [torch.tensor([0.1, float("nan")]), torch.tensor([1.5, -2.5, float("inf")])]
    status = [torch.tensor([0, 2], dtype=torch.int8), torch.tensor([1, 0, 1], dtype=torch.int8)]
    sends = [torch.tensor([True, False]), torch.tensor([False, True, True])]
    tables = [
        {"loss": a, "status": b, "sends": c} for a, b, c in zip(loss, status, sends, strict=True)
    ]
    joined, agreements = join(tables)
    assert agreements == 1
    expected = torch.tensor([1.5, 0.1, -2.5, float("inf"), float("nan")])
    torch.testing.assert_close(joined["loss"], expected, rtol=0, atol=0, equal_nan=True)
    assert joined["status"].tolist() == [1, 0, 0, 1, 2]
    assert joined["status"].dtype == torch.int8
    assert joined["sends"].tolist() == [False, True, True, True, False]


def test_processes_agree_again_only_when_a_name_or_dtype_is_new(join):
    both = [{"loss": torch.rand(2)}, {"loss": torch.rand(3)}]
    counts = [join(both)[1], join(both)[1]]
    more = [both[0], {**both[1], "accuracy": torch.rand(3)}]
    counts += [join(more)[1], join(more)[1], join(both)[1], join(more)[1]]
    wide = [{"loss": torch.rand(2).double()}, both[1]]
    joined, agreements = join(wide)
    assert [*counts, agreements] == [1, 0, 1, 0, 0, 0, 1]
    assert joined["loss"].dtype == torch.float64
    assert torch.equal(joined["loss"][[1, 4]], wide[0]["loss"])


def test_a_lacking_table_is_zero_and_a_table_of_nobody_is_absent(join):
    tables = [{"loss": torch.ones(2), "rare": torch.ones(2)}, {"loss": torch.ones(3)}]
    joined, _ = join(tables)
    assert joined["rare"].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    joined, _ = join([{"loss": torch.ones(2)}, {"loss": torch.ones(3)}])
    assert joined.keys() == {"loss"}


def test_a_process_without_clients_has_no_tables(join):
    joined, _ = join([{}, {"loss": torch.tensor([3.0, 4.0])}], torch.tensor([1, 1]))
    assert joined["loss"].tolist() == [3.0, 4.0]
