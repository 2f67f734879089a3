"""The features of a frozen body: computed once, and trained on in place of the inputs.

A net asks for it by three names: ``keep_features``, which is true; ``features(x)``, which turns
inputs into features by what is frozen alone; and ``forward``, which takes features as well as
inputs. So does :class:`~pl_fed.models.FrozenBody`, and so may any net.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData, integers_to_floats, scale_images
from pl_fed.nets.modes import evaluation_mode

_BATCH = 128  # samples that a body sees at once: a pretrained one has large images


def keeps_features(net: nn.Module) -> bool:
    """Return whether a net wants its features to be computed once."""
    return bool(getattr(net, "keep_features", False))


def features_of(net: nn.Module, x: Tensor) -> Tensor:
    """Return what a net that keeps features makes of inputs."""
    return cast(Callable[[Tensor], Tensor], net.features)(x)


def moved(client: Client, data: ClientData) -> ClientData:
    """Return the data where the client's models are, in their precision.

    If the net keeps features, they take the place of the inputs, which stay where they were.

    Args:
        client: The algorithm.
        data: The data of the federation.
    """
    net, row = client.global_model, client.row("global").data
    if keeps_features(net):
        with torch.no_grad(), evaluation_mode(client):
            pieces = [
                features_of(net, scale_images(x, torch.float32).to(row.device, row.dtype))
                for x in data.inputs.split(_BATCH)
            ]
        data = replace(data, inputs=torch.cat(pieces))
    elif not client.takes_integers:
        data = replace(data, inputs=integers_to_floats(data.inputs))
    return data.to(row.device, row.dtype)
