"""Augmentations of minibatches, with draws by key for each sample."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_shares
from pl_fed.random import integers, random_bits, uniforms
from pl_fed.trees import Tree, count_samples, leaves


class KeyedAugmentation(nn.Module, ABC):
    """Keyed augmentation: changes each sample by draws from a key of its own.

    It is called once for the samples of all clients of a step. Other modules draw from torch's
    generator, so they are called once for each client, with a seed of its own: on a GPU that costs
    kernels for each client.
    """

    @abstractmethod
    def forward(self, inputs: Tree, keys: Tensor) -> Tree:
        """Return the changed inputs.

        Args:
            inputs: The inputs of some samples, [samples, ...].
            keys: The key of each sample, int64 [samples], for ``pl_fed.random.uniforms`` and
                the other functions of that module.
        """


class RandomFlip(KeyedAugmentation):
    """Random flip: mirrors images, left to right.

    Args:
        p: The probability of a flip, in [0, 1].

    Shape:
        [samples, ..., width] → the same.

    Example:
        >>> flip = RandomFlip(p=1.0)
        >>> flip(torch.tensor([[1, 2, 3]]), keys=torch.tensor([7]))
        tensor([[3, 2, 1]])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        check_shares(p=p)
        self.p = p

    def forward(self, inputs: Tensor, keys: Tensor) -> Tensor:
        """Return the images; some are mirrored."""
        is_flipped = uniforms(keys, torch.zeros_like(keys)) < self.p
        mask = is_flipped.view(-1, *([1] * (inputs.dim() - 1)))
        return torch.where(mask, inputs.flip(-1), inputs)


class RandomShift(KeyedAugmentation):
    """Random shift: moves images by some pixels, with zeros behind them.

    It equals a crop of the images' own size after padding.

    Args:
        most: The largest number of pixels in each direction, at least 1.

    Shape:
        [samples, channels, height, width] → the same.

    Example:
        >>> RandomShift(1)(torch.ones(2, 1, 3, 3), keys=torch.tensor([7, 8])).shape
        torch.Size([2, 1, 3, 3])
    """

    def __init__(self, most: int = 4) -> None:
        super().__init__()
        check_integers(1, most=most)
        self.most = most

    def forward(self, inputs: Tensor, keys: Tensor) -> Tensor:
        """Return the moved images."""
        most, (height, width) = self.most, inputs.shape[-2:]
        padded = nn.functional.pad(inputs, (most, most, most, most))
        axes = torch.arange(2, device=keys.device)
        down, right = integers(keys[:, None], axes, 2 * most + 1).unbind(1)
        rows = down[:, None] + torch.arange(height, device=keys.device)
        columns = right[:, None] + torch.arange(width, device=keys.device)
        samples = torch.arange(len(inputs), device=keys.device)
        moved = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return moved.movedim(-1, 1)  # [samples, height, width, channels]


class Augmentation:
    """Augmentation: the modules that change each training minibatch, in their order.

    Args:
        modules: The modules.

    Attributes:
        is_keyed: Whether all modules are keyed: one call may then serve several clients.
        reads_keys: Whether a module is keyed.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        is_keyed = [isinstance(module, KeyedAugmentation) for module in self.modules]
        self.is_keyed = all(is_keyed)
        self.reads_keys = any(is_keyed)

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.modules))

    def __call__(self, inputs: Tree, keys: Tensor | None = None) -> Any:
        """Return the changed inputs.

        Args:
            inputs: The inputs of some samples.
            keys: The key of each sample, int64 [samples]; without it, those of a trial.
        """
        if keys is None:
            keys = torch.arange(count_samples(inputs), device=leaves(inputs)[0].device)
        for position, module in enumerate(self.modules):
            if isinstance(module, KeyedAugmentation):
                inputs = module(inputs, random_bits(keys, torch.full_like(keys, position)))
            else:
                inputs = module(inputs)
        return inputs
