"""The memory of an aggregator between rounds: tensors of any shape, in every checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.nets.fingerprints import is_by_user
from pl_fed.random import fork_all_generators, key
from pl_fed.types import RoundContext


class Memory(nn.Module):
    """Memory: a module with tensors that it keeps between rounds; their shapes may change.

    Example:
        >>> class Count(Memory):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.add_memory("rounds_by_client")
        >>> count, other = Count(), Count()
        >>> count.rounds_by_client = torch.tensor([1.0, 0.0, 2.0])
        >>> _ = other.load_state_dict(count.state_dict())
        >>> other.rounds_by_client
        tensor([1., 0., 2.])
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory_names: list[str] = []

    def __call__(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Any:
        """Call ``forward``; draws of a user's class from global generators have a key."""
        if not is_by_user(self):
            return super().__call__(uploads, weights, context)
        with fork_all_generators(uploads.device) as seed:
            seed(key(context.seed, type(self).__name__, context.round, context.center))
            return super().__call__(uploads, weights, context)

    def add_memory(self, name: str, default: Tensor | None = None) -> None:
        """Declare a tensor that is kept between rounds, saved in checkpoints and restored.

        A round reads and replaces it as an attribute, also by a tensor of another shape. It holds
        a copy of uploads, because the next round overwrites them.

        Args:
            name: The name of the attribute.
            default: The tensor before the first round; empty by default.
        """
        self.register_buffer(name, torch.empty(0) if default is None else default)
        self._memory_names.append(name)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name in self._memory_names:
            saved = state_dict.get(f"{prefix}{name}")
            if saved is not None:
                setattr(self, name, torch.empty_like(saved, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args)
