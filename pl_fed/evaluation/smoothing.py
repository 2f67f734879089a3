"""The section ``federation.smoothing``: tests of the votes of noisy copies of the global model.

C. Xie, M. Chen, P.-Y. Chen and B. Li, "CRFL: Certifiably Robust Federated Learning against Backdoor
Attacks", ICML 2021, arXiv 2106.08283, Algorithm 2: the class of a sample is the one that most
copies predict.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative
from pl_fed.functional.certification import count_votes
from pl_fed.nets.noisy_copies import noisy_copies

_PATH = "federation.smoothing"


@dataclass(frozen=True)
class Smoothing:
    """Smoothing: noisy copies of the global model, whose votes a test measures as one more model.

    The metrics of the votes have the name ``smoothed``, such as ``test/smoothed/accuracy``. With a
    backdoor, they tell its success, too. Only classification has votes.

    Args:
        std: σ_T, the standard deviation of the noise on each trainable parameter, at least 0.
        num_models: M, the number of copies, at least 1; each runs on all test samples. The authors'
            code has 1,000.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> Smoothing(num_models=100)
        Smoothing(std=0.01, num_models=100)
    """

    std: float = 0.01
    num_models: int = 1_000

    def __post_init__(self) -> None:
        check_nonnegative(**{f"{_PATH}.std": self.std})
        check_integers(1, **{f"{_PATH}.num_models": self.num_models})

    def score(
        self, net: nn.Module, predict: Callable[[nn.Module], Tensor], num_classes: int, seed: int
    ) -> Tensor:
        """Return log p of each class, with p = (votes + 1) / (M + classes), so that p is not 0.

        Args:
            net: The net; it is unchanged afterwards.
            predict: Returns the classes that a net predicts, int64 [samples].
            num_classes: The number of classes.
            seed: The seed of the noise.

        Returns:
            float32 [samples, num_classes].
        """
        copies = noisy_copies(net, std=self.std, num_models=self.num_models, seed=seed)
        with closing(copies):  # also after an error of `predict`
            votes = sum(count_votes(predict(copy)[None], num_classes) for copy in copies)
        shares = (votes + 1) / (self.num_models + num_classes)
        return torch.as_tensor(shares).log()
