"""Token classification: each token of a sequence has one class."""

from typing import Any

from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score

from pl_fed.tasks.base import as_floats
from pl_fed.tasks.language_modelling import LanguageModelling
from pl_fed.tasks.token_accuracy import TokenAccuracy
from pl_fed.trees import Tree


class TokenClassification(LanguageModelling):
    """Token classification: the net predicts the class of each token, such as its part of speech.

    The loss is the cross entropy, averaged over the tokens of a batch. The metrics of a client are
    ``token_accuracy``, the share of correct tokens, and ``token_f1``, the mean F1 score of the
    classes.

    Args:
        num_classes: Number of classes of a token.
        ignore_index: Target of positions that do not count, as padding.

    Shape:
        - outputs: logits [batch, length, classes].
        - targets: class ids, int64 [batch, length].

    Example:
        >>> import torch
        >>> task, targets = TokenClassification(num_classes=2), torch.tensor([[1, -100]])
        >>> task.batch_loss(torch.zeros(1, 2, 2), targets)  # one token of two classes: log 2
        tensor(0.6931)
    """

    def __init__(self, num_classes: int, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        self.num_token_classes = num_classes

    def metrics(self) -> MetricCollection:
        """Return ``token_accuracy`` and ``token_f1``."""
        f1 = MulticlassF1Score(
            self.num_token_classes, ignore_index=self.ignore_index, validate_args=False
        )
        return MetricCollection(
            {"token_accuracy": TokenAccuracy(self.ignore_index), "token_f1": f1},
            compute_groups=False,
        )

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the logits and the classes of all tokens: [tokens, classes] and [tokens]."""
        return as_floats(outputs).flatten(0, 1), targets.flatten()

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse targets that are not sequences of the model's classes."""
        super().check_targets(targets, data_classes)
        ids = targets[targets != self.ignore_index]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_token_classes:
            raise ValueError(
                f"Expected the classes of tokens to be from 0 to {self.num_token_classes - 1}, or"
                f" {self.ignore_index} for tokens that do not count, but got {int(ids.min())} to"
                f" {int(ids.max())}."
            )
