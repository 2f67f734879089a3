"""What every attack keeps to."""

from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from pl_fed.configurable import Configurable
from pl_fed.random import key
from pl_fed.trees import leaves
from pl_fed.types import Batch, ClientContext, RoundContext


class Attack(Configurable, ABC):
    """What byzantine clients do: poison their training data, forge their uploads, or both.

    A subclass overrides :meth:`poison`, :meth:`forge` or both; the other is the identity. All that
    an attack draws is keyed by the context, so that neither the engine, nor the chunks, nor a stop
    and resume changes it. An attack that keeps a state between rounds saves it by
    :meth:`state_dict`. One that trains in its own way does so in :meth:`forge`, by ``context.net``
    and ``context.samples``.

    Raises:
        TypeError: If ``Attack`` itself is made: it would attack nothing. Leave the attack out.

    Example:
        >>> import torch
        >>> class SignFlip(Attack):
        ...     def forge(self, honest, own, context):
        ...         return -own
        >>> SignFlip().forge(torch.zeros(2, 1), torch.ones(1, 1), RoundContext())
        tensor([[-1.]])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse to make the base class, which has no abstract method to do it."""
        if cls is Attack:
            raise TypeError("Expected a subclass of `Attack` to be made but got `Attack` itself.")
        return super().__new__(cls, *args, **kwargs)

    needs_inputs: bool = False
    """Whether it changes inputs, and features cannot stand for them, which some nets keep."""

    @property
    def forges(self) -> bool:
        """Whether it replaces uploads: all of a round are then brought together."""
        return type(self).forge is not Attack.forge

    @property
    def triggers(self) -> bool:
        """Whether it hides a trigger in models, and its success is measured: :meth:`trigger`."""
        return type(self).trigger is not Attack.trigger

    @property
    def poisons(self) -> bool:
        """Whether it changes training data: it is not asked to otherwise."""
        return type(self).poison is not Attack.poison

    @property
    def needs_merged(self) -> bool:
        """Whether it tries out ``context.merged``: it must know all uploads, and the defence."""
        return False

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the training samples of a byzantine client as it pretends that they are.

        Called on any grouping of the client's training samples (a batch, or all of them at once),
        and never on validation or test samples. What happens to a sample depends on the sample,
        its ``batch.samples`` and ``batch.visits``, and the context only, so that the grouping does
        not matter.

        Args:
            batch: Samples of one client; not changed.
            context: The round and the client.

        Returns:
            A batch of the same shapes.
        """
        return batch

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return what the byzantine clients upload.

        Uploads are what clients send: changes of the global model, as a rule (see a client's
        ``end_round``), so that ``context.broadcast`` + upload is a model.

        Args:
            honest: The honest uploads that the attackers know of, finite, shape [h, d]; not
                changed. Those of the benign clients of the cohort; or, if attackers know only their
                own, those of ``own`` that are finite. There may be none. ``context.known`` has
                their ids.
            own: What the byzantine clients would upload honestly, shape [b, d]; not changed. Those
                may be NaN.
            context: The round; ``context.attackers`` are the ids of those clients, int64 [b], and
                ``context.clients`` those of the whole cohort. If attackers know only their own
                uploads, ``losses``, ``start_losses`` and ``root`` are empty.

        Returns:
            A new tensor or ``own``, shape [b, d].
        """
        return own

    def state_dict(self) -> dict[str, Any]:
        """Return what the attack keeps between rounds, for a checkpoint.

        Returns:
            Tensors, numbers and words by name; by default nothing.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: If there is a state, and the attack keeps none.
        """
        if state:
            raise ValueError(
                f"Expected a checkpoint without a state of {type(self).__name__}, which keeps none,"
                f" but got one with {', '.join(state)}."
            )

    def trigger(self, batch: Batch) -> Batch:
        """Return samples as the attacker shows them to a model that it wants to mislead.

        Args:
            batch: Samples for evaluation; not changed.

        Returns:
            As many samples, changed, with the targets that the attacker wants, and a mask: false
            for those that do not count, such as those which have the wanted label anyway.
        """
        return batch

    def attacker_ids(self, own: Tensor, context: RoundContext) -> list[int]:
        """Return ``context.attackers``, which key the draws; ``ValueError`` if not one for each."""
        ids: list[int] = context.attackers.tolist()
        if len(ids) != len(own):
            raise ValueError(
                f"Expected `context.attackers` to be the ids of the {len(own)} attackers for"
                f" {type(self).__name__} but got {ids}."
            )
        return ids

    def sample_ids(self, batch: Batch) -> Tensor:
        """Return ``batch.samples``, which key the draws, or raise ``ValueError`` without them."""
        if batch.samples is None:
            raise ValueError(
                "Expected argument `batch.samples` to be the ids of the samples for"
                f" {type(self).__name__} but got None."
            )
        return batch.samples


def poisoned(batch: Batch, attacks: Iterable[Attack], context: ClientContext) -> Batch:
    """Return a batch after several attacks; of two of a kind each draws by itself."""
    for place, each in enumerate(attacks):
        seed = key(context.seed, "again", place) if place else context.seed
        before, batch = batch, each.poison(batch, replace(context, seed=seed))
        _check_poisoned(each, before, batch, context.num_classes)
    return batch


def _check_poisoned(attack: Attack, before: Batch, after: object, num_classes: int) -> None:
    """Raise ``ValueError`` if poisoning left no minibatch of the same kind."""
    name = type(attack).__name__
    if not isinstance(after, Batch):
        raise ValueError(
            f"Expected `poison` of {name} to return a Batch but got {type(after).__name__}."
        )
    pairs = [
        *(("inputs", *pair) for pair in zip(leaves(before.inputs), leaves(after.inputs))),
        *(("targets", *pair) for pair in zip(leaves(before.targets), leaves(after.targets))),
    ]
    for part, one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(
                f"Expected `poison` of {name} to keep the shape {list(one.shape)} and {one.dtype}"
                f" of `{part}` but got {list(other.shape)} and {other.dtype}."
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
                f"Expected `poison` of {name} to give labels from 0 to {num_classes - 1} but got"
                f" {int(low)} to {int(high)}."
            )
