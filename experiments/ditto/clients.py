"""Ditto for several λ in one run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients import DittoChoice


class ManyDittos(DittoChoice):
    """Ditto whose personal models for all λ are evaluated, and not only the one that is chosen.

    The personal models do not touch the global one, and take the same minibatches: each is what a
    run of :class:`pl_fed.clients.Ditto` with its λ gives, and the global model is FedAvg's.

    Args:
        net: See :class:`pl_fed.clients.Client`.
        lams: All λ.
        choices: Those of them that a client chooses from by its validation data.
        **kwargs: See :class:`pl_fed.clients.DittoChoice`.
    """

    def __init__(
        self,
        net: nn.Module,
        lams: Sequence[float] = (0.1, 1.0, 2.0),
        choices: Sequence[float] = (0.1, 1.0, 2.0),
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lams, **kwargs)
        self.choices = tuple(choices)

    def end_round(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Let a client choose, but only from its choices."""
        for name, lam in self.lams().items():
            if lam not in self.choices:
                rows[f"{name}_loss"] = torch.full_like(rows[f"{name}_loss"], torch.inf)
        return super().end_round(rows)

    def evaluates(self) -> tuple[str, ...]:
        """Return all models, and the chosen one."""
        return ("global", *self.candidates, "personal")
