"""The trainer's accelerator: never Apple's MPS, which has no float64 numbers."""

import pytest
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from pl_fed.lightning.compatibility import choose_accelerator


def test_accelerator_is_never_mps(monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: False)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    assert choose_accelerator("auto") == "cpu"
    for accelerator in ("mps", "gpu"):
        with pytest.raises(ValueError, match="to be auto, cpu or cuda but got") as refused:
            choose_accelerator(accelerator)
        assert f"but got {accelerator}:" in str(refused.value)


def test_other_accelerators_stay(monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: False)
    assert [choose_accelerator(name) for name in ("auto", "cpu", "gpu", "cuda")] == [
        *("auto", "cpu", "gpu", "cuda")
    ]
