"""Runs in the threads of one process: they take turns."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from lightning.pytorch import Callback
from small_federations import classes, quiet_trainer, sgd, shared_out
from torch import nn

from pl_fed.clients import FedAvg
from pl_fed.isolation import take_turn


class Meeting(Callback):
    """Meeting: waits half a second for another run."""

    def __init__(self, barrier):
        self.barrier = barrier

    def on_train_start(self, trainer, pl_module):
        """Note whether another run is here."""
        try:
            self.barrier.wait(0.5)
        except threading.BrokenBarrierError:
            return


@pytest.mark.slow
def test_runs_in_threads_take_turns(tmp_path):
    barrier = threading.Barrier(2)

    def run(number):
        trainer = quiet_trainer(tmp_path / str(number), 2, callbacks=[Meeting(barrier)])
        trainer.fit(FedAvg(nn.Linear(4, 3), optimizer=sgd()), shared_out(classes([8, 8])))
        return trainer.current_epoch

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(run, range(2))] == [2, 2]
    assert barrier.broken  # they never met


def test_a_thread_takes_turns_within_its_own():
    turns = []

    def take():
        with take_turn():
            turns.append("other")

    with take_turn():
        other = threading.Thread(target=take)
        other.start()
        with take_turn():
            other.join(0.01)
            turns.append("own")
    other.join()
    assert turns == ["own", "other"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent():
    begun, may_end = threading.Event(), threading.Event()

    def hold():
        with take_turn():
            begun.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)  # ends a child that waits
        with take_turn():
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    may_end.set()
    holder.join()
    assert status == 0
