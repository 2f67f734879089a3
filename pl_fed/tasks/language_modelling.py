"""Language modelling: the next token of each position of a sequence."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.text import Perplexity

from pl_fed.tasks.base import as_floats, check_tensor
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.tasks.token_accuracy import TokenAccuracy
from pl_fed.trees import Tree, describe


class LanguageModelling(CriterionTask):
    """Language modelling: the net predicts the next token at each position of a sequence.

    The loss is the cross entropy, averaged over the tokens of a batch. The metrics of a client are
    ``perplexity``, the exponential of its mean loss over tokens, and ``token_accuracy``, the share
    of correct tokens.

    Args:
        ignore_index: Target of positions without a next token, as padding; the loss and the metrics
            leave them out.
        shift: Whether the targets are the tokens of the inputs, so that the output at position t
            predicts the target at t + 1, as in Hugging Face's models. Otherwise the target at t is
            the token that the output at t predicts.

    Shape:
        - outputs: logits [batch, length, vocabulary].
        - targets: token ids, int64 [batch, length].

    Example:
        >>> import torch
        >>> task, targets = LanguageModelling(shift=True), torch.tensor([[3, 1, -100]])
        >>> task.batch_loss(torch.zeros(1, 3, 4), targets)  # one token of four: log 4
        tensor(1.3863)
    """

    class_dim = 2

    def __init__(self, ignore_index: int = -100, shift: bool = False) -> None:
        super().__init__(nn.CrossEntropyLoss(ignore_index=ignore_index))
        self.ignore_index = ignore_index
        self.shift = shift

    @property
    def name(self) -> str:
        """The name of the task's loss in messages."""
        return "the cross entropy of tokens"

    def _pair(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the tokens that they predict."""
        return (outputs[:, :-1], targets[:, 1:]) if self.shift else (outputs, targets)

    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the mean loss of each sequence over all its positions, [batch].

        It is multiplied by the sequence's share of positions with a token: see :meth:`weights`.
        """
        logits, tokens = self._pair(outputs, targets)
        return super().losses(logits.transpose(1, 2), tokens)

    def weights(self, targets: Tree) -> Tensor | None:
        """Return each sequence's share of positions with a token, [batch]."""
        return super().weights(targets[:, 1:] if self.shift else targets)

    def batch_loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the mean loss over all tokens."""
        logits, tokens = self._pair(outputs, targets)
        return super().batch_loss(logits.transpose(1, 2), tokens)

    def metrics(self) -> MetricCollection:
        """Return ``perplexity`` and ``token_accuracy``."""
        return MetricCollection(
            {
                "perplexity": Perplexity(ignore_index=self.ignore_index),
                "token_accuracy": TokenAccuracy(self.ignore_index),
            },
            compute_groups=False,
        )

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the logits and the tokens that they predict."""
        return self._pair(as_floats(outputs), targets)

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the most likely next token at each position, int64 [samples, length]."""
        return {"prediction": outputs.argmax(-1)}

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse targets that are not sequences of token ids."""
        is_tokens = isinstance(targets, Tensor) and targets.dim() == 2
        if not is_tokens or targets.is_floating_point():
            raise ValueError(
                "Expected the data to have token ids as targets, integers [samples, length], for"
                f" the task LanguageModelling but got {describe(targets)}."
            )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net unless it returns logits of the vocabulary at each position."""
        check_tensor(outputs)
        if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
            raise ValueError(
                "Expected argument `net` to return logits [batch, length, vocabulary], with batch"
                f" and length {list(targets.shape)}, but got {list(outputs.shape)}."
            )
