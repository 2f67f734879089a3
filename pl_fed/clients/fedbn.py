"""FedBN: normalisation layers of one's own.

X. Li, M. Jiang, X. Zhang, M. Kamp and Q. Dou. "FedBN: Federated learning on non-IID features via
local batch normalization". ICLR 2021. arXiv 2102.07623.

Algorithm 1: FedAvg of all layers but batch normalisation, whose parameters and running statistics
stay with the client.

Departs from the paper, which has batch normalisation only: layer, group and instance normalisation
count too, unless ``own`` says otherwise.
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
    """A shared net in which each client has normalisation layers of its own.

    Args:
        net: See :class:`FedPer`, as for all that is not named here.
        own: Names of the layers that are a client's own; ``None`` takes all normalisation layers
            with trainable parameters or running statistics.
        **kwargs: ``optimizer``, ``lr_scheduler``, ``local_steps``, ``local_epochs``, ``criterion``.

    Raises:
        ValueError: If the net has no such layer, or ``own`` names what the net does not have.

    Example:
        >>> FedBN(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))).own
        ('1',)
    """

    def __init__(self, net: nn.Module, own: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(net, norm_layers(net) if own is None else own, **kwargs)


def norm_layers(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the normalisation layers that hold anything which training changes.

    Raises:
        ValueError: If there is none.
    """
    frozen = {id(each) for module in frozen_modules(net) for each in module.modules()}
    found = tuple(
        name
        for name, layer in net.named_modules()
        if isinstance(layer, NORMALISATIONS)
        and id(layer) not in frozen
        and (any(p.requires_grad for p in layer.parameters()) or list(layer.buffers()))
    )
    if not found:
        raise ValueError(
            "Expected argument `net` to have a normalisation layer with trainable parameters but"
            f" got {type(net).__name__} with none: name a client's own parts by `own`."
        )
    return found
