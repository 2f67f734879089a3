"""A frozen pretrained torchvision net with a new linear head."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers


class FrozenBody(nn.Module):
    """Frozen body: a torchvision classifier without gradients, with a new trainable linear head.

    The body has requires_grad=False and stays in evaluation mode. In a federation there is one
    body, and clients upload and personalise the head only. With ``keep_features``, the body sees
    each sample once, before the first round. Then a round costs as much as a round of a linear
    model. In this case inputs cannot be augmented, and an attack on inputs changes features.

    Args:
        architecture: Name of a torchvision classifier, such as ``resnet18``.
        weights: Name of torchvision weights (``DEFAULT`` downloads them), or the path of a file
            with the state dict of the architecture. ``None`` (on the command line also ``none`` and
            ``null``) gives a random body.
        num_classes: Number of outputs of the head, at least 1.
        keep_features: Whether a federation computes the features of all samples once, and trains on
            them.

    Shape:
        - input: images [batch, channels, height, width], where one channel is repeated to three; or
          features [batch, features], as :meth:`features` returns them.
        - output: logits [batch, num_classes].

    Raises:
        ValueError: If torchvision does not have the architecture or the weights, a download fails,
            the file contains anything else, the architecture has no linear layer, or a number is
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
        body = _load_body(
            architecture, None if str(weights).lower() in ("none", "null") else weights
        )
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
        """Return the body's features of images, [batch, features]."""
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        features: Tensor = self.body(images)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images or of features."""
        return self.head(x if x.dim() == 2 else self.features(x))  # type: ignore[no-any-return]


def _load_body(architecture: str, weights: str | None) -> nn.Module:
    """Return a torchvision classifier with its own head."""
    from torchvision import models  # slow to import

    file = weights if weights and Path(weights).is_file() else None
    try:
        body: nn.Module = models.get_model(architecture, weights=None if file else weights)
    except (ValueError, KeyError) as error:
        raise ValueError(
            "Expected arguments `architecture` and `weights` to be names of torchvision, or"
            f" `weights` to be a file or none, but got {architecture!r} and {weights!r}."
        ) from error
    except OSError as error:
        raise ValueError(
            "Expected argument `weights` to be weights that can be downloaded but got"
            f" {weights!r} ({error}): set `weights` to the path of a file with a state dict."
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
