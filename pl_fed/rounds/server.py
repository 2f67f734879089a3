"""The server: uploads are merged, and the global model moves."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from pl_fed.aggregators import Aggregator
from pl_fed.arguments import check_finite_options, check_not_differentiable, check_optimizers
from pl_fed.types import RoundContext

Merge = Callable[[Aggregator, Tensor, Tensor, RoundContext], Tensor]


class Server:
    """Merges uploads by an aggregator and takes them for a negative gradient.

    S. Reddi et al. "Adaptive federated optimization". ICLR 2021. arXiv 2003.00295. SGD with
    learning rate 1 is FedAvg.

    Args:
        aggregator: Merges the uploads.
        optimizer: Builds the optimizer of the global model's flat row.

    Attributes:
        states: What the algorithm has the server keep, by name: see :meth:`Client.server_states`.
        adds: Whether a step adds what was merged to the model, and does nothing else.

    Raises:
        ValueError: If the optimizer cannot be built, or needs a closure.
    """

    def __init__(self, aggregator: Aggregator, optimizer: OptimizerCallable) -> None:
        self.aggregator = aggregator
        self._new_aggregator = copy.deepcopy(aggregator)
        self._build = optimizer
        example = self._example()
        check_optimizers(server_optimizer=example)
        check_finite_options(server_optimizer=example)
        check_not_differentiable(server_optimizer=example)
        options = example.param_groups[0]
        self._optimizer_class = type(example).__name__
        self.adds = (
            type(example) is torch.optim.SGD
            and options["lr"] == 1
            and not any(options[name] for name in ("momentum", "weight_decay", "maximize"))
        )
        self._optimizer: torch.optim.Optimizer | None = None
        self._pending: Mapping[str, Any] | None = None
        self.states: dict[str, Tensor] = {}

    def new_aggregator(self) -> Aggregator:
        """Return the aggregator as it was given, remembering nothing."""
        return copy.deepcopy(self._new_aggregator)

    def reset(self) -> None:
        """Forget what the aggregator and the optimizer remember, and the states."""
        self.aggregator = self.new_aggregator()
        self.states = {}
        self._optimizer = None
        self._pending = None

    def optimizer(self, row: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer, over a copy of the global model's row."""
        if self._optimizer is None:
            with torch.inference_mode(False):
                self._optimizer = self._build([torch.nn.Parameter(row.detach().clone())])
            if self._pending is not None:
                self._optimizer.load_state_dict(dict(self._pending))
                self._pending = None
            self.aggregator.to(row.device)
        return self._optimizer

    def step(
        self,
        row: Tensor,
        uploads: Tensor,
        weights: Tensor,
        context: RoundContext,
        before_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        merge: Merge = lambda aggregator, *what: aggregator(*what),
    ) -> Tensor:
        """Merge the uploads, and move the global model along them.

        Args:
            row: The global model [numel]; changed in place.
            uploads: Finite rows [n, numel].
            weights: Training samples of each [n].
            context: The round.
            before_step: Called when the gradient is set, before the step.
            merge: How the aggregator is called, where the uploads lie in several processes.

        Returns:
            The merged update [numel].
        """
        optimizer = self.optimizer(row)
        update = merge(self.aggregator, uploads, weights, context)
        (copy,) = optimizer.param_groups[0]["params"]
        copy.data.copy_(row)
        copy.grad = -update.to(copy)
        before_step(optimizer)
        optimizer.step()
        copy.grad = None
        row.copy_(copy.data)
        return update

    def simulate(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Return the update that the aggregator would give, without changing its memory."""
        aggregator = copy.deepcopy(self.aggregator).to(uploads.device)
        merged: Tensor = aggregator(uploads, weights, replace(context, note=lambda *_: None))
        return merged

    def state_dict(self, row: Tensor) -> dict[str, Any]:
        """Return the states of the optimizer and of the aggregator."""
        return {
            "optimizer": self.optimizer(row).state_dict(),
            "optimizer class": self._optimizer_class,
            "aggregator": self.aggregator.state_dict(),
            "aggregator class": type(self.aggregator).__name__,
            "states": dict(self.states),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over.

        An aggregator of another class will do if neither remembers anything.

        Raises:
            ValueError: If they are those of another optimizer or aggregator.
        """
        if self._optimizer_class != state["optimizer class"]:
            raise ValueError(
                f"Expected a checkpoint whose server optimizer is {self._optimizer_class} but got"
                f" one with {state['optimizer class']}."
            )
        try:
            self.aggregator.load_state_dict(state["aggregator"])
        except RuntimeError as error:
            raise ValueError(
                f"Expected a checkpoint whose aggregator is {type(self.aggregator).__name__} but"
                f" got one with {state['aggregator class']} and its memory."
            ) from error
        self._optimizer = None
        self._pending = state["optimizer"]
        self.states = dict(state["states"])

    def _example(self) -> torch.optim.Optimizer:
        try:
            return self._build([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Expected argument `server_optimizer` to build an optimizer but that failed:"
                f" {error}"
            ) from error
