"""FedBN: federated averaging except for the normalisation layers, kept by each client.

X. Li, M. Jiang, X. Zhang, M. Kamp and Q. Dou. "FedBN: Federated learning on non-IID features via
local batch normalization". ICLR 2021. arXiv 2102.07623.

Algorithm 1: FedAvg of all layers except batch normalisation. Its parameters and running statistics
stay with the client.

Departs from the paper: by default clients keep layer, group and instance normalisation, too. The
paper covers batch normalisation only.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pl_fed.clients.fedper import FedPer
from pl_fed.nets.rows import frozen_modules

NORMALISATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
)


class FedBN(FedPer):
    """FedBN: the clients share a net, except for its normalisation layers.

    Args:
        net: The net that clients train: see :class:`Client`.
        own: Names of the layers that each client keeps; ``None`` takes all normalisation layers
            with trainable parameters or running statistics.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If the net has no normalisation layer, or lacks a layer in ``own``.

    Example:
        >>> FedBN(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))).own
        ('1',)
    """

    def __init__(self, net: nn.Module, own: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(net, norm_layers(net) if own is None else own, **kwargs)


def norm_layers(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the normalisation layers that training changes.

    Raises:
        ValueError: If the net has none.
    """
    frozen = {id(part) for module in frozen_modules(net) for part in module.modules()}
    names = tuple(
        name
        for name, layer in net.named_modules()
        if isinstance(layer, NORMALISATIONS)
        and id(layer) not in frozen
        and (any(weight.requires_grad for weight in layer.parameters()) or list(layer.buffers()))
    )
    if not names:
        raise ValueError(
            "Expected argument `net` to have a normalisation layer with trainable parameters but"
            f" got {type(net).__name__} with none: list the parts that clients keep in `own`."
        )
    return names
