"""Ranks of numbers, on the CPU and on other devices."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pl_fed.functional.outliers import nth_magnitude, nth_smallest


class Names(TorchDispatchMode):
    """The names of the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


def test_ranks_on_a_device_do_not_use_kthvalue():
    """Torch may refuse it on a GPU under `deterministic: true`; a sort has the same values."""
    with Names() as run:
        shapes = [
            nth_smallest(torch.empty(2, 3, device="meta"), 2).shape,
            nth_magnitude(torch.empty(3, device="meta"), 1).shape,
        ]
    assert shapes == [(2,), ()]
    assert run.names & {"sort", "kthvalue"} == {"sort"}
