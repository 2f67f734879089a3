"""Edge-case backdoor: samples from the tail of the distribution get the attacker's label.

H. Wang, K. Sreenivasan, S. Rajput, H. Vishwakarma, S. Agarwal, J. Sohn, K. Lee and
D. Papailiopoulos, "Attack of the Tails: Yes, You Really Can Backdoor Federated Learning", NeurIPS
2020, arXiv 2007.05084 (the black-box attack)::

    (x, y) ← (sample of the pool, target)      for a share of the Byzantine clients' samples

The pool holds samples that no benign client has: airplanes of one airline as trucks on CIFAR-10,
and sevens of the ARDIS data as ones on EMNIST. Attackers train on a part of the pool. The metric
``backdoor_success`` measures the success on another part, for global and personal models.

The paper also projects or scales the attackers' models: use ``Combined`` with
``ModelReplacement`` for the latter.

Departs from the authors' code: the attackers draw from the pool with replacement, once for all
rounds. In the metric, a keyed draw from the pool replaces every test sample of the benign clients,
except those of the target class.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.attacks.trigger_attack import TriggerAttack
from pl_fed.random import integers, key
from pl_fed.trees import describe
from pl_fed.types import Batch, ClientContext


class SampleSource(Protocol):
    """Sample source: any data source of ``pl_fed.data``."""

    def load(self) -> Any:
        """Return all samples, as ``pl_fed.data.Arrays``."""


class EdgeCaseBackdoor(TriggerAttack):
    """Edge-case backdoor: rare samples of a pool, with the attacker's label, in training data.

    Every training sample has one independent draw for all rounds. The share of replaced samples is
    therefore ``samples`` in expectation only.

    Args:
        target: The class that the attacker wants for samples of the pool, at least 0.
        pool: The data source of rare samples, such as ``pl_fed.data.Npz``, with inputs of the
            federation's shape and units: uint8 is scaled to [0, 1], and ``data.normalize`` does not
            apply to it. Its official training samples are for training and all others for the
            metric. Without official parts, a keyed draw divides the pool in halves.
        classes: The classes of the pool to use; ``None`` for all.
        owners: The owners of the pool's samples to use, by name or id, such as a writer that
            ``data.held_out_clients`` excludes from training; ``None`` for all.
        samples: Share of a Byzantine client's samples that samples of the pool replace, in [0, 1].

    Shape:
        - ``batch.inputs``: one tensor [batch, ...].
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If ``target`` or a class is not an integer, or ``pool`` is not a data source.
        ValueError: If an argument is out of range; on use, if the pool has fewer than two samples
            of these classes and owners, or samples of another shape than the inputs, ``target`` is
            not a class of the data, or ``batch.samples`` is missing.

    Example:
        >>> from types import SimpleNamespace as Arrays
        >>> class Planes:
        ...     def load(self):
        ...         x, y = torch.tensor([[7.0], [8.0]]), torch.tensor([0, 0])
        ...         return Arrays(inputs=x, targets=y, split=torch.tensor([0, 2]))
        >>> attack = EdgeCaseBackdoor(target=9, pool=Planes(), samples=1.0)
        >>> batch = Batch(torch.zeros(2, 1), torch.tensor([3, 9]), samples=torch.tensor([0, 1]))
        >>> attack.poison(batch, ClientContext(0, 0, 4, num_classes=10)).inputs.flatten()
        tensor([7., 7.])
        >>> attack.trigger(batch).inputs.flatten(), attack.trigger(batch).mask
        (tensor([8., 8.]), tensor([ True, False]))
    """

    def __init__(
        self,
        target: int,
        pool: SampleSource,
        classes: Sequence[int] | None = None,
        owners: Sequence[int | str] | None = None,
        samples: float = 0.5,
    ) -> None:
        super().__init__(target, samples)
        if not callable(getattr(pool, "load", None)):
            raise TypeError(
                "Expected argument `pool` to be a data source, such as pl_fed.data.Npz, but got"
                f" {type(pool).__name__}."
            )
        for label in classes or ():
            check_integers(0, classes=label)
        self.pool = pool
        self.classes = classes
        self.owners = owners
        self._parts: tuple[Tensor, Tensor] | None = None

    def add_trigger(self, batch: Batch, context: ClientContext | None) -> Tensor:
        """Return samples of the pool, drawn by (seed, client, sample), or by sample alone."""
        if self._parts is None:
            self._parts = self._load_parts()
        training, evaluation = self._parts
        part = evaluation if context is None else training
        x: Tensor = batch.inputs
        if part.shape[1:] != x.shape[1:]:
            raise ValueError(
                "Expected argument `pool` to have samples of shape"
                f" {list(x.shape[1:])}, as the federation has, but got {list(part.shape[1:])}:"
                " resize the samples of the pool."
            )
        draw = key(0, "edge-case")
        if context is not None:
            draw = key(context.seed, "edge-case", context.client)
        drawn = part[integers(draw, self.sample_ids(batch), len(part)).to(part.device)].to(x.device)
        return drawn.to(x.dtype) / 255 if drawn.dtype == torch.uint8 else drawn.to(x.dtype)

    def _load_parts(self) -> tuple[Tensor, Tensor]:
        """Return the pool's samples for training and for the metric, [samples, ...] each."""
        arrays = self.pool.load()
        if not isinstance(arrays.inputs, Tensor):
            raise ValueError(
                "Expected argument `pool` to have inputs of one tensor but got"
                f" {describe(arrays.inputs)}."
            )
        selected = torch.ones(len(arrays.inputs), dtype=torch.bool)
        if self.classes is not None:
            selected &= torch.isin(arrays.targets, torch.tensor(list(self.classes)))
        if self.owners is not None:
            selected &= _mark_owners(arrays, self.owners)
        found = selected.nonzero().flatten()
        if arrays.split is not None and 0 < int((arrays.split[found] == 0).sum()) < len(found):
            is_training = arrays.split[found] == 0
        else:
            order = integers(key(0, "edge-case-parts"), found, 2**31 - 1).argsort(stable=True)
            is_training = torch.zeros(len(found), dtype=torch.bool)
            is_training[order[: (len(found) + 1) // 2]] = True
        if len(found) < 2:
            raise ValueError(
                "Expected argument `pool` to have at least two samples, for training and for the"
                f" metric, but got {len(found)} of classes {self.classes} and owners"
                f" {self.owners}."
            )
        return arrays.inputs[found[is_training]], arrays.inputs[found[~is_training]]


def _mark_owners(arrays: Any, owners: Sequence[int | str]) -> Tensor:
    """Return a mask of the samples of some owners, bool [samples]."""
    if arrays.client is None:
        raise ValueError(
            "Expected argument `owners` to be left out for a pool without owners but got"
            f" {list(owners)}."
        )
    names = list(arrays.names or ())
    ids = [names.index(owner) if owner in names else owner for owner in owners]
    unknown = [owner for owner in ids if isinstance(owner, str)]
    if unknown:
        raise ValueError(
            f"Expected argument `owners` to name owners of the pool but got {unknown[0]!r}."
        )
    return torch.isin(arrays.client, torch.tensor(ids))
