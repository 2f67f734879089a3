"""The contract of an attack."""

import copy
from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, nn

from pl_fed.configurable import Configurable
from pl_fed.random import key
from pl_fed.trees import leaves
from pl_fed.types import Batch, ClientContext, RoundContext


class Attack(Configurable, ABC):
    """Attack: poisons the training data of Byzantine clients, forges their uploads, or both.

    A subclass overrides :meth:`poison`, :meth:`forge` or both; by default, both are the identity.
    The context keys every draw of an attack. Engines, chunks, and a stop and resume therefore do
    not change the draws. An attack that keeps a state between rounds saves it by
    :meth:`state_dict`. An attack that trains in its own way trains in :meth:`forge`, with
    ``context.net`` and ``context.samples``.

    Raises:
        TypeError: If the class is ``Attack`` itself, which would attack nothing.

    Example:
        >>> import torch
        >>> class SignFlip(Attack):
        ...     def forge(self, honest, own, context):
        ...         return -own
        >>> SignFlip().forge(torch.zeros(2, 1), torch.ones(1, 1), RoundContext())
        tensor([[-1.]])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse to instantiate the base class, which is abstract but has no abstract method."""
        if cls is Attack:
            raise TypeError(
                "Expected a subclass of `Attack` but got `Attack` itself, which attacks nothing:"
                " name an attack, or leave it out."
            )
        return super().__new__(cls, *args, **kwargs)

    needs_inputs: bool = False
    """Whether the attack changes inputs: stored features of a net cannot replace the inputs."""

    trains: bool = False
    """Whether :meth:`forge` trains copies of the global model. The uploads of the algorithm must
    then be changes of the global model, and the net must return a score for each class."""

    needs_net: bool = False
    """Whether :meth:`trigger` runs a model: pl_fed then calls :meth:`set_net` before training."""

    trigger_version: int = 0
    """A number that changes with the trigger: pl_fed then makes its samples for evaluation anew."""

    @property
    def forges(self) -> bool:
        """Whether the attack replaces uploads or losses; pl_fed then gathers a round's uploads."""
        return type(self).forge is not Attack.forge or self.forges_losses

    @property
    def forges_losses(self) -> bool:
        """Whether the attackers report other losses than their own: :meth:`forge_losses`."""
        return type(self).forge_losses is not Attack.forge_losses

    @property
    def triggers(self) -> bool:
        """Whether the attack hides a trigger in models: :meth:`trigger` measures its success."""
        return type(self).trigger is not Attack.trigger

    @property
    def poisons(self) -> bool:
        """Whether the attack changes training data; if not, pl_fed never calls :meth:`poison`."""
        return type(self).poison is not Attack.poison

    @property
    def needs_simulation(self) -> bool:
        """Whether the attack calls ``context.simulate_merge``, so it knows uploads and defence."""
        return False

    def list_parts(self) -> list["Attack"]:
        """Return the attack, and those that are combined in it, at any depth."""
        return [self]

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return poisoned training samples of a Byzantine client.

        pl_fed calls it on any grouping of the client's training samples (a batch, or all samples
        at once), and never on validation or test samples. The poisoned sample must depend only on
        the sample, its ``batch.samples`` and ``batch.visits``, and the context. The grouping then
        does not matter.

        Args:
            batch: Samples of one client; not changed.
            context: The round and the client.

        Returns:
            A batch of the same shapes.
        """
        return batch

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the forged uploads of the Byzantine clients.

        An upload is an update of the global model for most algorithms (see the client's
        ``end_round``): ``context.broadcast`` + upload is then a model.

        Args:
            honest: The honest uploads that the attackers know, finite, shape [h, d]; not changed.
                They are the uploads of the benign clients of the cohort. If attackers know only
                their own uploads, they are the finite rows of ``own``. There may be none.
                ``context.observed`` holds the ids of their clients.
            own: The uploads that the Byzantine clients would send without the attack, shape
                [b, d]; not changed. They may be NaN.
            context: The round. ``context.attackers`` holds the ids of the Byzantine clients,
                int64 [b]; ``context.clients`` those of the cohort. If attackers know only their
                own uploads, ``losses``, ``start_losses``, ``group_counts`` and ``root`` are empty.

        Returns:
            A new tensor or ``own``, shape [b, d].
        """
        return own

    def forge_losses(self, losses: Tensor, context: RoundContext) -> Tensor:
        """Return the losses that the Byzantine clients report beside their uploads.

        Aggregators that weigh clients by their losses read them. pl_fed calls it before
        :meth:`forge`, for the losses of the local steps, and again for those of the broadcast if
        the aggregator needs them.

        Args:
            losses: The attackers' own losses, [b]; not changed. They may be NaN.
            context: The round; ``context.attackers`` holds the ids of the Byzantine clients.

        Returns:
            A new tensor or ``losses``, shape [b].
        """
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the attack keeps between rounds, for a checkpoint.

        Returns:
            Tensors, numbers and strings by name; empty by default.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            ValueError: If ``state`` is not empty, and the attack keeps no state.
        """
        if state:
            raise ValueError(
                f"Expected a checkpoint without a state of {type(self).__name__}, which keeps none,"
                f" but got {', '.join(state)}: resume with the attack of the checkpoint."
            )

    def reset(self) -> None:
        """Return to the state before the first run.

        pl_fed calls it before each run, so that one attack can serve several federations in turn.
        """
        own = vars(self)  # not by an attribute, which a frozen dataclass refuses
        if "_first_state" in own:
            self.load_state_dict(copy.deepcopy(own["_first_state"]))
        else:
            own["_first_state"] = copy.deepcopy(self.state_dict())

    def trigger(self, batch: Batch) -> Batch:
        """Return samples with the trigger, to measure the success of the attack.

        Args:
            batch: Samples for evaluation; not changed.

        Returns:
            The same number of samples, with the trigger, the targets that the attacker wants, and a
            mask. The mask is false for samples that do not count, for example because their true
            target is the wanted one.
        """
        return batch

    def try_training(self, net: nn.Module, batch: Batch, context: ClientContext) -> None:
        """Refuse a net or samples that do not fit the attack, before training.

        pl_fed calls it if :attr:`trains` is set.

        Args:
            net: The user's net in evaluation mode; not changed.
            batch: A few training samples.
            context: The first client and the first round.

        Raises:
            ValueError: If they do not fit.
        """

    def set_net(self, net: nn.Module) -> None:
        """Receive a copy of the user's net, in evaluation mode, if :attr:`needs_net` is set.

        Args:
            net: The net. A trigger that runs a model puts the attackers' parameters into it.
        """

    def attacker_ids(self, own: Tensor, context: RoundContext) -> list[int]:
        """Return ``context.attackers``, the ids that key the draws.

        Raises:
            ValueError: If the number of ids is not the number of rows of ``own``.
        """
        ids: list[int] = context.attackers.tolist()
        if len(ids) != len(own):
            raise ValueError(
                f"Expected `context.attackers` to be the ids of the {len(own)} attackers for"
                f" {type(self).__name__} but got {ids}."
            )
        return ids

    def sample_ids(self, batch: Batch) -> Tensor:
        """Return ``batch.samples``, the ids that key the draws.

        Raises:
            ValueError: If the batch has no sample ids.
        """
        if batch.samples is None:
            raise ValueError(
                "Expected argument `batch.samples` to be the ids of the samples for"
                f" {type(self).__name__} but got None."
            )
        return batch.samples


def apply_attacks(batch: Batch, attacks: Iterable[Attack], context: ClientContext) -> Batch:
    """Return a batch after several attacks; two attacks of the same class draw independently."""
    for position, attack in enumerate(attacks):
        seed = key(context.seed, "again", position) if position else context.seed
        before, batch = batch, attack.poison(batch, replace(context, seed=seed))
        _check_poisoned(attack, before, batch, context.num_classes)
    return batch


def _check_poisoned(attack: Attack, before: Batch, after: object, num_classes: int) -> None:
    """Raise ``ValueError`` if the poisoned batch has other shapes, types or classes."""
    name = type(attack).__name__
    if not isinstance(after, Batch):
        raise ValueError(
            f"Expected `poison` of {name} to return a Batch but got {type(after).__name__}."
        )
    pairs = [
        *(("inputs", *pair) for pair in zip(leaves(before.inputs), leaves(after.inputs))),
        *(("targets", *pair) for pair in zip(leaves(before.targets), leaves(after.targets))),
    ]
    for field, clean, poisoned in pairs:
        if clean.shape != poisoned.shape or clean.dtype != poisoned.dtype:
            raise ValueError(
                f"Expected `poison` of {name} to keep the shape {list(clean.shape)} and"
                f" {clean.dtype} of `{field}` but got {list(poisoned.shape)} and {poisoned.dtype}."
            )
    if (
        num_classes
        and isinstance(after.targets, Tensor)
        and after.targets.is_cpu
        and after.targets.numel()
    ):
        low, high = after.targets.aminmax()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"Expected `poison` of {name} to return labels from 0 to {num_classes - 1} but got"
                f" {int(low)} to {int(high)}."
            )
