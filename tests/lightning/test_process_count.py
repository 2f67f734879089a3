"""The number of processes is checked before any process starts."""

import warnings
from types import SimpleNamespace

import pytest
from tables import table_test

from pl_fed.lightning import compatibility
from pl_fed.lightning.compatibility import (
    check_process_count,
    check_processes,
    count_cores,
    warn_of_idle_processes,
)


@pytest.mark.parametrize(("processes", "cores"), [(1, 1), (4, 1), (4, 2), (16, 8), (128, 64)])
def test_processes_up_to_twice_the_cores_pass(processes, cores):
    check_process_count(processes, cores)


@table_test(("processes", "cores", "most"), [(5, 1, 4), (99, 2, 4), (17, 8, 16)])
def test_more_processes_are_refused(processes, cores, most):
    sentence = (
        rf"`devices` to be at most {most} on this CPU with {cores} cores but got {processes}: .*"
        rf"Set `trainer\.devices`, for example to {cores}\."
    )
    with pytest.raises(ValueError, match=sentence):
        check_process_count(processes, cores)


@pytest.mark.parametrize(
    ("device", "started_by_others", "refused"),
    [("cpu", False, True), ("cpu", True, False), ("cuda", False, False)],
)
def test_only_processes_to_be_started_on_a_cpu_count(
    monkeypatch, device, started_by_others, refused
):
    class PretendDDP:
        launcher = None
        root_device = SimpleNamespace(type=device)
        cluster_environment = SimpleNamespace(creates_processes_externally=started_by_others)

    monkeypatch.setattr(compatibility, "DDPStrategy", PretendDDP)
    monkeypatch.setattr(compatibility, "count_cores", lambda: 2)
    trainer = SimpleNamespace(strategy=PretendDDP(), world_size=99, num_devices=99)
    if not refused:
        check_processes(trainer)
        return
    with pytest.raises(ValueError, match="but got 99"):
        check_processes(trainer)


def test_machine_has_cores():
    assert count_cores() >= 1


def test_processes_without_a_client_are_named():
    with pytest.warns(UserWarning, match="5 processes share 3 clients, so 2 of them have nothing"):
        warn_of_idle_processes(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_processes(3, 3)
        warn_of_idle_processes(9, None)
