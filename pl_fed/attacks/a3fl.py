"""A3FL: a trigger that survives a model that was trained to unlearn it.

H. Zhang, J. Jia, J. Chen, L. Lin and D. Wu, "A3FL: Adversarially Adaptive Backdoor Attacks to
Federated Learning", NeurIPS 2023. Before the attackers train, the first attacker of a round moves
the pixels t of a stamp, with x' the sample with the stamp, θ = w^t, and θ', a copy of θ trained on
(x', true class)::

    t ← t − α sign ∂/∂t [CE(θ; x', target) + λ · s · CE(θ'; x', target)]

The weight s is the similarity of both models: the mean, over the trained parameter tensors, of the
cosine between the gradients of CE(·; x', target) at θ' and at θ. Attackers then train on samples
with the stamp and the target.

Departs from the authors' code: s takes all tensors, not only those with ``conv`` in their name,
and so is defined for every net. It compares gradients of the same loss at both models, in
evaluation mode; in the code, θ's gradient is a sum over all earlier steps, and that of θ' belongs
to one minibatch with true classes, in training mode. The search has 10 passes in a round instead of
200, because the stamp goes on from the last round. Pixels stay between the smallest and largest
number of the attackers' samples instead of [−2, 2]. There is no label smoothing. (The library
BackFed never builds θ': its A3FL is the search without the second term.)
"""

import copy

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative, check_positive
from pl_fed.attacks.backdoor import Corner
from pl_fed.attacks.learned_stamp import LearnedStamp
from pl_fed.attacks.own_training import AttackerTraining, enter_training_mode, list_trained
from pl_fed.random import fork_torch_rng, key
from pl_fed.types import RoundContext


class A3FL(LearnedStamp):
    """A3FL: the stamp adapts to a model that was trained against it.

    Args:
        target: The class that the attackers want for samples with the stamp, at least 0.
        samples: Share of an attacker's samples with the stamp, in [0, 1].
        size: Width and height of the stamp, in pixels, at least 1.
        corner: The corner of the stamp: see :class:`Backdoor`.
        start: The value of all pixels before the first search.
        low: The smallest value of a pixel; ``None``: see :class:`LearnedStamp`.
        high: The largest value of a pixel.
        trigger_epochs: Passes over the first attacker's samples in each round, at least 1.
        trigger_lr: Step α of the pixels, above 0.
        adversarial_every: Passes with the same adversarial model θ', at least 1; the first passes
            have none.
        adversarial_epochs: Passes of the training of θ', at least 1.
        adversarial_lr: Learning rate of θ', above 0; its momentum is 0.9.
        balance: Weight λ of the adversarial model's loss, at least 0.
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch, also in the search.
        lr: Learning rate, above 0.
        momentum: Momentum, at least 0.
        weight_decay: Weight decay, at least 0.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> stamp, slope = torch.full((3,), 0.5), torch.tensor([0.2, -0.01, 0.0])
        >>> descend_by_signs(stamp, slope, 0.01, (-2.0, 2.0))
        tensor([0.4900, 0.5100, 0.5000])
        >>> A3FL(target=3).target
        3
    """

    def __init__(
        self,
        target: int = 0,
        samples: float = 0.25,
        size: int = 3,
        corner: Corner = "bottom_right",
        start: float = 0.5,
        low: float | None = None,
        high: float | None = None,
        trigger_epochs: int = 10,
        trigger_lr: float = 0.01,
        adversarial_every: int = 1,
        adversarial_epochs: int = 5,
        adversarial_lr: float = 0.01,
        balance: float = 0.01,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            target=target,
            samples=samples,
            size=size,
            corner=corner,
            start=start,
            low=low,
            high=high,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )
        check_integers(
            1,
            trigger_epochs=trigger_epochs,
            adversarial_every=adversarial_every,
            adversarial_epochs=adversarial_epochs,
        )
        check_positive(trigger_lr=trigger_lr, adversarial_lr=adversarial_lr)
        check_nonnegative(balance=balance)
        self.trigger_epochs = trigger_epochs
        self.trigger_lr = trigger_lr
        self.adversarial_every = adversarial_every
        self.adversarial_epochs = adversarial_epochs
        self.adversarial_lr = adversarial_lr
        self.balance = balance

    def search_stamp(self, attackers: list[int], context: RoundContext, stamp: Tensor) -> Tensor:
        """Return the stamp after steps by signs, with adversarial models on the way."""
        training = self.open_training(attackers[0], context)
        adversary, similarity, last_epoch = None, 0.0, 0
        batches = self.draw_passes(training.clean, self.trigger_epochs, context, "A3FL")
        for epoch, batch in batches:
            is_new = epoch != last_epoch and epoch % self.adversarial_every == 0
            if is_new and self.balance:
                adversary = self.train_adversary(training, stamp, epoch)
                similarity = self.compare_models(training, adversary, stamp)
            last_epoch = epoch
            stamp = stamp.detach().requires_grad_()
            loss = self.backdoor_loss(training.net, batch.inputs, stamp)
            if adversary is not None:
                adversarial = self.backdoor_loss(adversary, batch.inputs, stamp)
                loss = loss + self.balance * similarity * adversarial
            (slope,) = torch.autograd.grad(loss, [stamp])
            stamp = descend_by_signs(stamp.detach(), slope, self.trigger_lr, self.bounds)
        return stamp

    def train_adversary(self, training: AttackerTraining, stamp: Tensor, epoch: int) -> nn.Module:
        """Return θ', a copy of the model trained to give samples with the stamp their true class.

        Its frozen parameters, such as FedBABU's head, stay those of the model: no client trains
        them, and so no client can unlearn the stamp by them.

        Args:
            training: The attacker with the model θ and its samples.
            stamp: The stamp.
            epoch: The pass of the search; it keys the draws.
        """
        context, adversary = training.context, copy.deepcopy(training.net)
        stamped = training.clean._replace(
            inputs=self.add_stamp(training.clean.inputs, stamp.detach())
        )
        optimizer = torch.optim.SGD(
            list_trained(adversary, context),
            lr=self.adversarial_lr,
            momentum=0.9,
            weight_decay=5e-4,
        )
        enter_training_mode(adversary)
        with fork_torch_rng(training.start.device) as seed:  # for dropout
            seed(key(context.seed, "A3FL adversary", context.round, epoch))
            purpose = f"A3FL adversary {epoch}"
            batches = self.draw_passes(stamped, self.adversarial_epochs, context, purpose)
            for _, batch in batches:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(adversary(batch.inputs), batch.targets)
                torch.autograd.backward(loss)
                optimizer.step()
        return adversary.eval()

    def compare_models(
        self, training: AttackerTraining, adversary: nn.Module, stamp: Tensor
    ) -> float:
        """Return s, the mean cosine of the backdoor's gradients at two models, in [−1, 1]."""
        gradients = []
        for net in (training.net, adversary):
            loss = self.backdoor_loss(net, training.clean.inputs, stamp.detach())
            parameters = list_trained(net, training.context)
            gradients.append(torch.autograd.grad(loss, parameters, materialize_grads=True))
        cosines = [
            nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0)
            for first, second in zip(*gradients)
        ]
        return float(torch.stack(cosines).mean())


def descend_by_signs(
    stamp: Tensor, slope: Tensor, step: float, bounds: tuple[float, float]
) -> Tensor:
    """Return a stamp after one step against the signs of a slope; a slope of 0 keeps a pixel.

    Args:
        stamp: The pixels, any shape.
        slope: The derivatives by the pixels, of the same shape.
        step: The change of a pixel.
        bounds: The smallest and the largest value of a pixel.
    """
    return (stamp - step * slope.sign()).clamp(*bounds)
