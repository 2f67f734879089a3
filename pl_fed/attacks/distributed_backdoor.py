"""Distributed backdoor (DBA): each attacker trains on one part of the trigger.

C. Xie, K. Huang, P.-Y. Chen and B. Li, "DBA: Distributed Backdoor Attacks against Federated
Learning", ICLR 2020::

    (x, y) ← (x with part r mod M, target)     r = the attacker's rank among the attackers

The M parts are bars of 1 × size pixels, in rows of two. Part i begins in this row and column::

    row = (i // 2) · (1 + gap) + shift      column = (i mod 2) · (size + gap) + shift

No attacker sees the whole trigger. The metric ``backdoor_success`` measures the success of all M
parts at once.

The authors take M = 4, size 4 and gap 2 on MNIST with 20 of 64 samples in a minibatch, and size 6
and gap 3 on CIFAR-10 with 5 of 64. Their multiple-shot attack is this class. Their single-shot
attack also scales the upload: use ``Combined`` with ``ModelReplacement(factor=100)``.

Departs from the authors' code: a keyed draw selects the samples, and not their position in the
minibatch. The pixels are as bright as the sample's largest number, unless ``value`` is set; in the
code they are 1. Samples of the target class do not count in the metric; in the code they do.
"""

from torch import Tensor

from pl_fed.arguments import check_finite, check_integers
from pl_fed.attacks.trigger_attack import TriggerAttack
from pl_fed.types import Batch, ClientContext


class DistributedBackdoor(TriggerAttack):
    """Distributed backdoor: each attacker stamps one part of a trigger on some training samples.

    Every sample has one independent draw for all rounds. The share of stamped samples is therefore
    ``samples`` in expectation only.

    Args:
        target: The class that the attackers want for stamped samples, at least 0.
        samples: Share of a Byzantine client's samples with its part, in [0, 1].
        parts: M, the number of parts, at least 1. The attackers of the federation take turns, by
            ascending id. Clients that are no attackers, as under the section's ``corruption``, take
            turns by their ids.
        size: The length of a part, in pixels, at least 1.
        gap: The pixels between two parts, in rows and in columns, at least 0.
        shift: The first row and the first column of the trigger, at least 0.
        value: The value of all pixels of the parts, in the units of the normalised inputs;
            ``None`` takes the largest number of the sample.

    Shape:
        - ``batch.inputs``: images [batch, ..., height, width]; all channels get the parts.
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If an argument is not an integer where it must be.
        ValueError: If an argument is out of range; on use, if ``target`` is not a class of the
            data, inputs are no images or too small for the trigger, or ``batch.samples`` is
            missing.

    Example:
        >>> import torch
        >>> attack = DistributedBackdoor(target=3, samples=1.0, size=2, gap=1, value=1.0)
        >>> attack.trigger(Batch(torch.zeros(1, 3, 5), torch.tensor([5]))).inputs
        tensor([[[1., 1., 0., 1., 1.],
                 [0., 0., 0., 0., 0.],
                 [1., 1., 0., 1., 1.]]])
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10, attackers=(4, 7))
        >>> batch = Batch(torch.zeros(1, 3, 5), torch.tensor([5]), samples=torch.tensor([2]))
        >>> attack.poison(batch, context).inputs  # part 1
        tensor([[[0., 0., 0., 1., 1.],
                 [0., 0., 0., 0., 0.],
                 [0., 0., 0., 0., 0.]]])
    """

    def __init__(
        self,
        target: int,
        samples: float = 0.3125,
        parts: int = 4,
        size: int = 4,
        gap: int = 2,
        shift: int = 0,
        value: float | None = None,
    ) -> None:
        super().__init__(target, samples)
        check_integers(1, parts=parts, size=size)
        check_integers(0, gap=gap, shift=shift)
        check_finite(value=value)
        self.parts = parts
        self.size = size
        self.gap = gap
        self.shift = shift
        self.value = value

    def add_trigger(self, batch: Batch, context: ClientContext | None) -> Tensor:
        """Return the inputs with the attacker's part, or with all parts in an evaluation."""
        x: Tensor = batch.inputs.clone()
        self._check_size(x)
        value = x.flatten(1).amax(1) if self.value is None else x.new_tensor(self.value)
        for part in self._parts_of(context):
            row = part // 2 * (1 + self.gap) + self.shift
            column = part % 2 * (self.size + self.gap) + self.shift
            x[..., row, column : column + self.size] = value.reshape(-1, *[1] * (x.ndim - 2))
        return x

    def _parts_of(self, context: ClientContext | None) -> list[int]:
        """Return the parts of an attacker; all parts without a context."""
        if context is None:
            return list(range(self.parts))
        ids = context.attackers
        rank = ids.index(context.client) if context.client in ids else context.client
        return [rank % self.parts]

    def _check_size(self, x: Tensor) -> None:
        """Refuse inputs that are no images, or that are too small for all parts."""
        height = (self.parts - 1) // 2 * (1 + self.gap) + 1 + self.shift
        columns = min(self.parts, 2)
        width = columns * self.size + (columns - 1) * self.gap + self.shift
        if x.ndim < 3 or x.shape[-2] < height or x.shape[-1] < width:
            raise ValueError(
                f"Expected inputs to be images of at least {height} x {width} pixels for"
                f" DistributedBackdoor with `size` {self.size}, `gap` {self.gap} and `shift`"
                f" {self.shift} but got shape {list(x.shape[1:])}: reduce `size` or `gap`, or use"
                " Backdoor for inputs that are no images."
            )
