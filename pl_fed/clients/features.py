"""The features of a frozen body: computed once, they replace the inputs in training.

A net opts in by three members: ``keep_features`` is true, ``features(x)`` computes features of
inputs by frozen layers only, and ``forward`` takes features as well as inputs.
:class:`~pl_fed.models.FrozenBody` is such a net.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData, integers_to_floats, scale_images
from pl_fed.nets.modes import evaluation_mode
from pl_fed.trees import leaves
from pl_fed.types import Batch

_BATCH = 128  # samples of one call of the body, because a pretrained body has large images


def keeps_features(net: nn.Module) -> bool:
    """Return whether a federation should compute the features of a net once."""
    return bool(getattr(net, "keep_features", False))


def compute_features(net: nn.Module, x: Tensor) -> Tensor:
    """Return the features of inputs, by a net that keeps features."""
    return cast(Callable[[Tensor], Tensor], net.features)(x)


def compute_batch_features(client: Client, batch: Batch) -> Batch:
    """Return a batch with features in place of inputs, if the net keeps features."""
    net = client.global_model
    if not keeps_features(net) or not batch.size:
        return batch
    with torch.no_grad(), evaluation_mode(client):
        return batch._replace(inputs=compute_features(net, batch.inputs))


def place_data(client: Client, data: ClientData) -> ClientData:
    """Return the data on the device of the client's models, in their precision.

    If the net keeps features, features replace the inputs, and the inputs are not moved.

    Args:
        client: The algorithm.
        data: The data of the federation.
    """
    net, row = client.global_model, client.row("global").data
    if keeps_features(net):
        with torch.no_grad(), evaluation_mode(client):
            pieces = [
                compute_features(net, scale_images(x, torch.float32).to(row.device, row.dtype))
                for x in data.inputs.split(_BATCH)
            ]
        data = replace(data, inputs=torch.cat(pieces), mapped=False)
    elif not client.takes_integers and data.mapped:
        data = replace(data, keeps_integers=False)
    elif not client.takes_integers:
        _warn_of_rounding(data, row.dtype)
        data = replace(data, inputs=integers_to_floats(data.inputs, row.dtype))
    return data.to(row.device, row.dtype)


def _warn_of_rounding(data: ClientData, dtype: torch.dtype) -> None:
    """Warn if integers, such as ids, become floating-point numbers of too few bits."""
    exact = 1 << 24  # float32 holds all integers up to it
    for leaf in leaves(data.inputs):
        is_wide = not leaf.is_floating_point() and leaf.dtype.itemsize > 2
        if dtype != torch.float64 and is_wide and int(leaf.abs().max()) > exact:
            rank_zero_warn(
                f"The net takes no integers, so integer inputs become {dtype}, which rounds those"
                f" above {exact:,} (largest: {int(leaf.abs().max()):,}): set `trainer.precision:"
                " 64-true`, scale them, or number ids from 0."
            )
