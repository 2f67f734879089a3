"""A short time-out counts from the meeting of the processes on."""

import threading
from datetime import timedelta

import pytest

from pl_fed.distributed import processes
from pl_fed.lightning.meeting import meet_patiently


class PretendStrategy:
    """Has a time-out, and records the one with which it creates a process group."""

    def __init__(self, timeout, error=None):
        self._timeout, self.error, self.used = timeout, error, []

    def setup_distributed(self):
        self.used.append(self._timeout)
        if self.error is not None:
            raise self.error


@pytest.fixture
def later_timeouts(monkeypatch):
    timeouts = []
    monkeypatch.setattr("torch.distributed.set_timeout", timeouts.append, raising=False)
    return timeouts


def test_short_timeout_is_set_after_the_meeting(later_timeouts):
    short = timedelta(seconds=10)
    strategy = PretendStrategy(short)
    meet_patiently(strategy)
    strategy.setup_distributed()
    assert strategy.used == [timedelta(minutes=30)]
    assert (strategy._timeout, later_timeouts) == (short, [short])


def test_failed_meeting_sets_no_timeout(later_timeouts):
    strategy = PretendStrategy(timedelta(seconds=10), RuntimeError("no meeting"))
    meet_patiently(strategy)
    with pytest.raises(RuntimeError, match="no meeting"):
        strategy.setup_distributed()
    assert (strategy._timeout, later_timeouts) == (timedelta(seconds=10), [])


def test_meeting_is_noted_when_it_has_happened(monkeypatch, later_timeouts):
    monkeypatch.setattr(processes, "_have_met", threading.Event())
    failing = PretendStrategy(None, RuntimeError("no meeting"))
    meet_patiently(failing)
    with pytest.raises(RuntimeError, match="no meeting"):
        failing.setup_distributed()
    assert not processes._have_met.is_set()
    strategy = PretendStrategy(None)
    meet_patiently(strategy)
    strategy.setup_distributed()
    assert processes._have_met.is_set()


@pytest.mark.parametrize("timeout", [None, timedelta(minutes=30), timedelta(hours=2)])
def test_other_timeouts_are_lightning_s_own(later_timeouts, timeout):
    strategy = PretendStrategy(timeout)
    meet_patiently(strategy)
    strategy.setup_distributed()
    assert (strategy.used, later_timeouts) == ([timeout], [])
