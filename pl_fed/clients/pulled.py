"""Pulled: the base of algorithms with a pull of personal models to the broadcast.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221. Section 3.1 mentions distances other than the squared
one, and Appendix C.2 defines them:

- Elastic weight consolidation: λ/2 Σ_j F_jj (v_j − w_j)², where F is the empirical Fisher
  information at w, estimated on a batch.
- Symmetrized Kullback-Leibler divergence: λ/2 (KL(f(v) ‖ f(w)) + KL(f(w) ‖ f(v))), where f gives
  the probabilities of the classes.
"""

from abc import ABC
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.clients.base import Client
from pl_fed.clients.contract import Model
from pl_fed.data.client_data import ClientData
from pl_fed.functional.divergences import (
    diagonal_fisher,
    symmetrized_divergence,
    weighted_squared_distance,
)
from pl_fed.nets.modes import evaluation_mode
from pl_fed.trees import Tree, describe, select
from pl_fed.types import Batch, Population

Regularizer = Literal["l2", "fisher", "kl"]


class Pulled(Client, ABC):
    """Pulled, the base class of Ditto and Finetuning: F_k(v) + λ/2 R(v, w^t) for personal models v.

    Args:
        net: The net that clients train: see :class:`Client`.
        models: The algorithm's models.
        lam: λ ≥ 0, the strength of the pull.
        regularizer: R: ``"l2"`` is ‖v − w^t‖². ``"fisher"`` weighs the squared differences by the
            diagonal of the empirical Fisher information at w^t, the minibatch's mean of squared
            sample gradients. ``"kl"`` is the symmetrized Kullback-Leibler divergence of the
            predicted classes on the minibatch. The last two evaluate w^t in evaluation mode. They
            cost a gradient for each sample, or a forward pass.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lam`` is negative or infinite, or ``regularizer`` is unknown. Before
            training, if it is ``"kl"`` and the targets are no classes, or if it is ``"fisher"`` and
            the net or the criterion has no sample gradients.

    Example:
        >>> from pl_fed.clients import Ditto
        >>> Ditto(nn.Linear(4, 2), lam=0.5, regularizer="kl").regularizer
        'kl'
    """

    def __init__(
        self,
        net: nn.Module,
        models: Mapping[str, Model],
        lam: float = 1.0,
        regularizer: Regularizer = "l2",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, models=models, **kwargs)
        check_nonnegative(lam=lam)
        check_choice(get_args(Regularizer), regularizer=regularizer)
        self.lam = lam
        self.regularizer = regularizer

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse ``"kl"`` without classes, and ``"fisher"`` without sample gradients."""
        super().check(data, population)
        if self.regularizer == "fisher":
            self.refuse_batch_criterion("`regularizer` = fisher needs sample gradients")
            self._check_sample_gradients(data.batch(torch.arange(2, device=data.device)).inputs)
        criterion = getattr(self.task, "criterion", None)
        if (
            self.regularizer == "kl"
            and not self.count_classes(data)
            and not isinstance(criterion, nn.CrossEntropyLoss)
        ):
            raise ValueError(
                "Expected argument `regularizer` to be l2 or fisher if targets are no classes"
                f" but got kl, with targets of {describe(data.targets)}."
            )

    def _check_sample_gradients(self, inputs: Tree) -> None:
        """Refuse nets without sample gradients: those that ``torch.func.vmap`` does not support."""
        net = self.model("global")
        with evaluation_mode(net), torch.no_grad():
            try:
                torch.func.vmap(lambda sample: self.task.predict(net, select(sample, None)))(
                    self.place(inputs)
                )
            except RuntimeError as error:
                raise ValueError(
                    "Expected argument `regularizer` to be l2 or kl for a net that torch.func.vmap"
                    f" does not support but got fisher: {str(error).splitlines()[0]}"
                ) from error

    def pulled_loss(self, batch: Batch, lams: Mapping[str, float]) -> Tensor:
        """Return Σ over models of F_k(v) + λ/2 R(v, w^t) on the minibatch.

        Args:
            batch: The client's minibatch.
            lams: λ of each model, by the model's name.
        """
        if self.regularizer == "l2":  # needs no outputs, and a LightningModule's step has none
            losses = [
                self.loss(model, batch) + lam / 2 * self.squared_distance(model)
                for model, lam in lams.items()
            ]
            return sum(losses[1:], losses[0])
        losses, centre = [], self._describe_centre(batch)
        for model, lam in lams.items():
            outputs = self.outputs_of(model, batch)
            pull = self._distance(model, outputs, centre, batch)
            losses.append(self.mean_loss(outputs, batch) + lam / 2 * pull)
        return sum(losses[1:], losses[0])

    def _describe_centre(self, batch: Batch) -> Any:
        """Return the part of R that depends on w^t and the minibatch alone."""
        net, centre = self.model("global"), self.tensors("broadcast")
        buffers: dict[str, Tensor] = {}  # those in the net are of the global model's local steps
        if (layout := self.statistics("global").layout).numel:
            buffers = layout.views(self.read("broadcast.statistics"))
        with evaluation_mode(net):
            if self.regularizer == "kl":
                model = self.net_at("global", {**centre, **buffers})
                return self.task.predict(model, batch.inputs).detach()

            def sample_loss(
                parameters: Mapping[str, Tensor], inputs: Tree, targets: Tree
            ) -> Tensor:
                """Return the loss of one sample at some parameters."""
                model = self.net_at("global", {**parameters, **buffers})
                outputs = self.task.predict(model, select(inputs, None))
                return self.sample_losses(outputs, select(targets, None))[0]

            weights = self.sample_weights(batch.targets)
            return diagonal_fisher(
                sample_loss, centre, batch.inputs, batch.targets, batch.mask, weights
            )

    def _distance(self, model: str, outputs: Tensor, centre: Any, batch: Batch) -> Tensor:
        """Return R(v, w^t).

        Args:
            model: The name of v.
            outputs: The outputs of v on the minibatch.
            centre: The result of :meth:`_describe_centre`.
            batch: The minibatch.
        """
        if self.regularizer == "kl":
            logits, others = (rows.movedim(self.task.class_dim, 1) for rows in (outputs, centre))
            return symmetrized_divergence(logits, others, batch.mask)
        parameters = self.parameters_of(model)
        return weighted_squared_distance(parameters, self.tensors("broadcast"), centre)
