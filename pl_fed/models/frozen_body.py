"""A pretrained torchvision net whose body is frozen, under a new linear head."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn
from torchvision import models

from pl_fed.arguments import check_integers


class FrozenBody(nn.Module):
    """Trains a linear head on the features of a frozen torchvision classifier.

    The body has requires_grad=False and stays in evaluation mode: in a federation it exists once,
    and only the head is uploaded and personalised. With ``keep_features`` the body sees each sample
    once, before the first round, and a round costs what it costs a linear model. Inputs cannot be
    augmented then, and an attack that changes inputs changes features.

    Args:
        architecture: Name of a torchvision classifier, such as ``resnet18``.
        weights: Name of torchvision weights (``DEFAULT`` downloads them), the path of a file with
            the state dict of that architecture, or nothing (``none`` and ``null`` from the command
            line) for a random body.
        num_classes: Outputs of the head, at least 1.
        keep_features: Whether a federation computes the features of all samples once.

    Shape:
        - input: [batch, channels, height, width]; one channel is repeated to three. Or features,
          [batch, features], as :meth:`features` gives them.
        - output: logits [batch, num_classes].

    Raises:
        ValueError: If torchvision has no such architecture or weights, they cannot be downloaded,
            the file holds something else, the architecture has no linear layer, or a number is
            below 1.

    Example:
        >>> net = FrozenBody("resnet18", num_classes=10)
        >>> sum(p.numel() for p in net.parameters() if p.requires_grad)
        5130
    """

    def __init__(
        self,
        architecture: str = "resnet18",
        weights: str | None = None,
        num_classes: int = 10,
        keep_features: bool = False,
    ) -> None:
        super().__init__()
        check_integers(1, num_classes=num_classes)
        given = None if str(weights).lower() in ("none", "null") else weights
        body = _body(architecture, given)
        linear = [(n, m) for n, m in body.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ValueError(
                "Expected argument `architecture` to be a classifier with a linear last layer but"
                f" got {architecture!r}."
            )
        name, last = linear[-1]
        body.set_submodule(name, nn.Identity())
        self.body = body.requires_grad_(False).eval()
        self.head = nn.Linear(last.in_features, num_classes)
        self.keep_features = keep_features

    def features(self, images: Tensor) -> Tensor:
        """Return what the body makes of images, [batch, features]."""
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        features: Tensor = self.body(images)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images, or of features."""
        return self.head(x if x.dim() == 2 else self.features(x))  # type: ignore[no-any-return]


def _body(architecture: str, weights: str | None) -> nn.Module:
    """Return a classifier of torchvision, with its head."""
    file = weights if weights and Path(weights).is_file() else None
    try:
        body: nn.Module = models.get_model(architecture, weights=None if file else weights)
    except (ValueError, KeyError) as error:
        raise ValueError(
            "Expected arguments `architecture` and `weights` to be names that torchvision"
            f" knows, or `weights` a file or none, but got {architecture!r} and {weights!r}."
        ) from error
    except OSError as error:
        raise ValueError(
            "Expected argument `weights` to be weights that can be downloaded but got"
            f" {weights!r} ({error}): give the path of a file with them."
        ) from error
    if file:
        try:
            body.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
        except (RuntimeError, TypeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"Expected argument `weights` to be a file with the state dict of {architecture}"
                f" but got {file} ({type(error).__name__})."
            ) from error
    return body
