"""A trial of optimizers of the user's own classes: their state has all that they remember."""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pl_fed.nets.fingerprints import LIBRARIES, package_of
from pl_fed.random import fork_all_generators, key
from pl_fed.trees import are_equal

_STEPS = 3  # of the trial; the last one is repeated with a restored state

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def forgets_steps(build: Build, shapes: Iterable[Sequence[int]]) -> bool:
    """Return whether a new optimizer with the state of another one continues by other steps.

    So does a class that counts its steps in an attribute. Optimizers of libraries are not tried,
    and one whose trial fails counts as faultless.

    Args:
        build: Builds the optimizer of some parameters.
        shapes: The shapes of the parameters.

    Example:
        >>> class Slowing(torch.optim.SGD):
        ...     __module__, steps = "my_optimizers", 0
        ...     def step(self, closure=None):
        ...         self.steps += 1
        ...         self.param_groups[0]["lr"] = 1 / self.steps
        ...         super().step(closure)
        >>> forgets_steps(Slowing, [[2]]), forgets_steps(torch.optim.Adam, [[2]])
        (True, False)
    """
    draw = torch.Generator().manual_seed(0)
    first = [nn.Parameter(torch.ones(list(shape))) for shape in shapes]
    gradients = [[torch.randn(p.shape, generator=draw) for p in first] for _ in range(_STEPS)]
    try:
        optimizer = build(first)
        if package_of(optimizer) in LIBRARIES:
            return False
        for round, row in enumerate(gradients[:-1]):
            _step(optimizer, first, row, round)
        second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
        resumed = build(second)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _step(optimizer, first, gradients[-1], _STEPS)
        _step(resumed, second, gradients[-1], _STEPS)
    except Exception:  # such as an optimizer for matrices, or for a GPU
        return False
    return not are_equal(first, second)


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    number: int,
) -> None:
    """Take a step with given gradients, and with draws of its own."""
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    with fork_all_generators() as seed:
        seed(key(0, "optimizer trial", number))
        optimizer.step()
