"""The server: merges uploads and moves the global model."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.aggregators import Aggregator
from pl_fed.arguments import check_finite_options, check_not_differentiable, check_optimizers
from pl_fed.clients.argument_checks import check_builders
from pl_fed.clients.optimizer_memory import forgets_steps
from pl_fed.types import RoundContext

_TRIAL_LENGTH = 8  # of the row on which an optimizer is tried

Merge = Callable[[Aggregator, Tensor, Tensor, RoundContext], Tensor]


class Server:
    """Server: an aggregator merges the uploads, and an optimizer steps along the merged update.

    The gradient is the negative merged update. SGD with learning rate 1 is FedAvg.

    Source: S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv 2003.00295.

    Args:
        aggregator: Merges the uploads.
        optimizer: Builds the optimizer of the global model's flat row.

    Attributes:
        states: The server's states of the algorithm, by name: see :meth:`Client.add_server_state`.
            ``ClientStates.server_states`` creates them when they are first read.
        only_adds: Whether a step only adds the merged update to the global model.

    Raises:
        TypeError: If ``optimizer`` is not callable.
        ValueError: If the optimizer cannot be built, or needs a closure.
    """

    def __init__(self, aggregator: Aggregator, optimizer: OptimizerCallable) -> None:
        self.aggregator = aggregator
        self._new_aggregator = copy.deepcopy(aggregator)
        check_builders(server_optimizer=optimizer)
        self._build = optimizer
        example = self._build_example()
        check_optimizers(server_optimizer=example)
        check_finite_options(server_optimizer=example)
        check_not_differentiable(server_optimizer=example)
        options = example.param_groups[0]
        self._optimizer_class = type(example).__name__
        self.only_adds = (
            type(example) is torch.optim.SGD
            and options["lr"] == 1
            and not any(options[name] for name in ("momentum", "weight_decay", "maximize"))
        )
        self._optimizer: torch.optim.Optimizer | None = None
        self._pending: Mapping[str, Any] | None = None
        self.states: dict[str, Tensor] = {}
        self._members: dict[int, Server] = {}

    def member(self, group: int) -> "Server":
        """Return the server of a center: its aggregator and optimizer have a memory of their own.

        Args:
            group: The center, from 0.
        """
        if group not in self._members:
            self._members[group] = Server(self.new_aggregator(), self._build)
        return self._members[group]

    def new_aggregator(self) -> Aggregator:
        """Return a copy of the aggregator without memory of any round."""
        return copy.deepcopy(self._new_aggregator)

    def reset(self) -> None:
        """Reset the memory of the aggregator and the optimizer, and the states."""
        self.aggregator = self.new_aggregator()
        self.states = {}
        self._optimizer = None
        self._pending = None
        self._members = {}

    def optimizer(self, row: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer, over a copy of the global model's row on its device."""
        if self._optimizer is not None:
            (copy,) = self._optimizer.param_groups[0]["params"]
            if copy.device != row.device:  # another trainer goes on
                self._pending, self._optimizer = self._optimizer.state_dict(), None
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
        merge: Merge = Aggregator.__call__,
    ) -> Tensor:
        """Merge the uploads, and move the global model along the merged update.

        Args:
            row: The global model, [numel]; changed in place.
            uploads: The uploads, finite rows, [n, numel].
            weights: Number of training samples of each client, [n].
            context: The context of the round.
            before_step: Called with the optimizer after the gradient is set, before the step.
            merge: Calls the aggregator; by default on uploads that are all in this process.

        Returns:
            The merged update, [numel].
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

    def simulate_merge(
        self,
        uploads: Tensor,
        weights: Tensor,
        context: RoundContext,
        reject: Callable[[Tensor], None],
    ) -> Tensor:
        """Return the update that the aggregator would merge, without a change of its memory.

        Args:
            uploads: The uploads, finite rows, [n, numel].
            weights: Number of training samples of each client, [n].
            context: The context of the round; the simulation logs nothing.
            reject: Receives the ids of the clients whose uploads the aggregator would leave out.
        """
        aggregator = copy.deepcopy(self.aggregator).to(uploads.device)
        silent = replace(context, note=lambda *_: None, reject=reject, weigh=lambda *_: None)
        merged: Tensor = aggregator(uploads, weights, silent)
        return merged

    def state_dict(self, row: Tensor) -> dict[str, Any]:
        """Return the states of the optimizer and of the aggregator, also of each center's."""
        members = {group: member.state_dict(row) for group, member in self._members.items()}
        return {
            "optimizer": self.optimizer(row).state_dict(),
            "optimizer class": self._optimizer_class,
            "aggregator": self.aggregator.state_dict(),
            "aggregator class": type(self.aggregator).__name__,
            "states": dict(self.states),
            **({"members": members} if members else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the optimizer and of the aggregator.

        The class of the aggregator may differ if neither aggregator has a memory.

        Raises:
            ValueError: If the states belong to another optimizer or aggregator.
        """
        if self._optimizer_class != state["optimizer class"]:
            raise ValueError(
                f"Expected a checkpoint with the server optimizer {self._optimizer_class} but got"
                f" one with {state['optimizer class']}."
            )
        try:
            self.aggregator.load_state_dict(state["aggregator"])
        except RuntimeError as error:
            name, saved_name = type(self.aggregator).__name__, state["aggregator class"]
            if name == saved_name:
                raise ValueError(
                    f"Expected the memory of {name} to have the shapes of the checkpoint's but got"
                    " others: declare memory whose shape changes by `add_memory`."
                ) from error
            memory = "and its memory" if state["aggregator"] else "without a memory"
            raise ValueError(
                f"Expected a checkpoint with the aggregator {name} but got one with {saved_name}"
                f" {memory}: restore that aggregator and its pre-aggregators, or start a new run."
            ) from error
        self._optimizer = None
        self._pending = state["optimizer"]
        self.states = dict(state["states"])
        self._members = {}
        for group, saved in state.get("members", {}).items():
            self.member(group).load_state_dict(saved)

    def warn_of_lost_memory(self) -> None:
        """Warn if a resumed run would lack a part of the optimizer's memory."""
        if forgets_steps(self._build, [[_TRIAL_LENGTH]]):
            rank_zero_warn(
                f"{self._optimizer_class} of `federation.server_optimizer` keeps values from one"
                " step to the next that its `state_dict` lacks, so that a resumed run differs from"
                " an uninterrupted one: keep them in `self.state` or `self.param_groups`."
            )

    def _build_example(self) -> torch.optim.Optimizer:
        """Return the optimizer of one number, to check its options."""
        try:
            return self._build([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Expected argument `server_optimizer` to build an optimizer but that failed:"
                f" {error}"
            ) from error
