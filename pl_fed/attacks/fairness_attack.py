"""Attack on fairness: the global model becomes accurate for some classes at the cost of others.

J. Rance and F. Svoboda, "Attacks on fairness in Federated Learning", arXiv 2311.12715. An attacker
trains a model X_k on samples most of which have the favoured attribute, here some classes. It
predicts the benign clients' models by p_k, its own model after honest training. Its upload cancels
them and puts X_k in the place of the global model. With the attackers' joint share s of the
weights, as changes of w^t::

    Δ_k = (X_k − w^t) / s − (1 − s) / s · (p_k − w^t)

If p_k is the mean of the benign models, the mean of all uploads is X_k.

The success is the fall in fairness over benign clients: compare the spread, the worst clients and
the classes with those of the run without the attack (``start_round`` after the last round).

Departs from the authors' code: all attackers train, each on its own samples, and the mean of their
models replaces the global one; there, one X is sent by all. The share of an unweighted mean is
b / n for b attackers among n uploads; a mean weighted by samples needs ``share``. The paper's
attackers predict by their own models; ``prediction="observed"`` takes the mean of the benign
uploads instead, for attackers who know them. ``prediction="none"`` replaces the model as a backdoor
does: Δ_k = (X_k − w^t) / s.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pl_fed.arguments import (
    check_at_most,
    check_choice,
    check_integers,
    check_positive,
    check_shares,
)
from pl_fed.attacks.own_training import AttackerTraining, OwnTraining, select_samples
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.functional.forging import mean_row
from pl_fed.random import generator
from pl_fed.types import Batch, ClientContext, RoundContext

Prediction = Literal["own", "observed", "none"]


class FairnessAttack(OwnTraining):
    """Attack on fairness: replaces the global model by one that favours some classes.

    Args:
        classes: The favoured classes, at least one; the paper's are 0 and 1.
        samples: Share of an attacker's training samples that are of these classes, in [0, 1]; the
            others are drawn from all its samples. An attacker without any takes those of the other
            Byzantine clients.
        prediction: The prediction of the benign updates: the attacker's ``"own"`` honest update,
            the mean of the ``"observed"`` benign uploads, or ``"none"``. With the adversary's
            ``knowledge: own``, the observed uploads are the attackers' own honest ones.
        share: s, the attackers' joint share of the weights, in (0, 1]; ``None`` takes their share
            of the cohort.
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch.
        lr: Learning rate, above 0.
        momentum: Momentum, at least 0.
        weight_decay: Weight decay, at least 0.

    Shape:
        - ``honest``: [h, d]; read for ``prediction="observed"``.
        - ``own``: [b, d]; the honest updates of the attackers.
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range; before training, if a class is none of the
            data's.

    Example:
        >>> change, honest = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.35, 0.15]])
        >>> replace_mean(change, honest, share=0.1)
        tensor([[  6.8500, -11.3500]])
    """

    def __init__(
        self,
        classes: Sequence[int] = (0, 1),
        samples: float = 1.0,
        prediction: Prediction = "own",
        share: float | None = None,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(epochs, steps, batch_size, lr, momentum, weight_decay)
        classes = list(classes)
        if not classes:
            raise ValueError("Expected argument `classes` to have at least one class but got none.")
        for number in classes:
            check_integers(0, classes=number)
        check_shares(samples=samples)
        check_choice(get_args(Prediction), prediction=prediction)
        if share is not None:
            check_positive(share=share)
            check_at_most(1, share=share)
        self.classes = classes
        self.samples = samples
        self.prediction = prediction
        self.share = share

    def try_training(self, net: nn.Module, batch: Batch, context: ClientContext) -> None:
        """Refuse data without a favoured class, such as real-valued targets."""
        super().try_training(net, batch, context)
        if unknown := [number for number in self.classes if number >= context.num_classes]:
            raise ValueError(
                f"Expected argument `classes` to be among the {context.num_classes} classes of the"
                f" data but got {unknown[0]}: name classes of the data, or use another attack."
            )

    def poison_samples(self, training: AttackerTraining) -> Batch:
        """Return as many samples as the attacker has, most of them of the favoured classes."""
        clean, context = training.clean, training.context
        favoured = self._select_favoured(clean)
        if not favoured.size:
            batches = self.read_batches(context.byzantine, context)
            favoured = _join([favoured, *(self._select_favoured(batch) for batch in batches)])
        if not favoured.size:
            return clean
        draw = generator(context.seed, "fairness attack", context.round, training.client)
        num_favoured = round(self.samples * clean.size)
        order = torch.randperm(favoured.size, generator=draw)
        repeated = order.repeat(-(-num_favoured // len(order)))[:num_favoured]
        drawn = torch.randperm(clean.size, generator=draw)[: clean.size - num_favoured]
        return _join([select_samples(favoured, repeated), select_samples(clean, drawn)])

    def _select_favoured(self, batch: Batch) -> Batch:
        """Return the samples of the favoured classes."""
        is_favoured = torch.isin(batch.targets.cpu(), torch.tensor(self.classes))
        return select_samples(batch, is_favoured.nonzero()[:, 0])

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return uploads that put the attackers' models in the place of the mean."""
        changes = super().forge(honest, own, context)
        share = self.share or len(own) / max(1, len(context.clients))
        predicted = torch.zeros_like(own)
        if self.prediction == "observed" and len(honest):
            predicted = mean_row(honest).to(own).expand_as(own)
        elif self.prediction != "none":
            predicted = torch.where(own.isfinite(), own, 0)
        return replace_mean(changes, predicted, share).to(own)


def replace_mean(changes: Tensor, predicted: Tensor, share: float) -> Tensor:
    """Return uploads of attackers that move the mean of all uploads to the attackers' mean change.

    Args:
        changes: X_k − w^t, [b, d].
        predicted: The predicted mean of the other uploads, [b, d].
        share: The share of the b uploads among all weights, in (0, 1].
    """
    wide = merging_dtype(changes)
    return (changes.to(wide) - (1 - share) * predicted.to(wide)) / share


def _join(batches: Sequence[Batch]) -> Batch:
    """Return the samples of several batches, at least one, whose inputs are tensors."""
    return Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches]))
