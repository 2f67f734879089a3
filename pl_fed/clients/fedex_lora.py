"""FedEx-LoRA: federated averaging of low-rank adapters whose products are averaged exactly.

R. Singhal, K. Ponkshe and P. Vepakomma. "FedEx-LoRA: Exact Aggregation for Federated and Efficient
Fine-Tuning of Foundation Models". 2024. arXiv 2410.09432.

The mean of adapters is not the mean of their products. The residual of a layer is::

    R = mean_i(B_i A_i) − mean_i(B_i) mean_i(A_i)

The server adds s R to the frozen weight of the layer, where s is the scale of the adapters, so that
the next broadcast has the mean of the clients' weights W + s B_i A_i.

Departs from the paper: the server keeps the sum of the residuals instead of changed weights.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from pl_fed.clients.contract import ClientRound
from pl_fed.clients.fedavg import FedAvg
from pl_fed.models import Adapter, LoRA


class FedExLoRA(FedAvg):
    """FedEx-LoRA: FedAvg of adapters, with the residual of their products in the frozen body.

    A client also sends its products, which are as long as the adapted weights. Its server merges
    by :class:`pl_fed.aggregators.Mean` with equal weights. Attacks that forge uploads are refused,
    since they would not change the products: the body would undo them.

    Args:
        net: A :class:`pl_fed.models.LoRA` with adapters of linear layers, and a body in the
            precision of the adapters.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        TypeError: If the net is no ``LoRA``.
        ValueError: If an adapted layer is not linear, or the body has a lower precision.

    Example:
        >>> import pytest
        >>> peft = pytest.importorskip("peft")
        >>> net = LoRA(nn.Sequential(nn.Linear(4, 3)), r=1, target_modules=["0"])
        >>> client = FedExLoRA(net)
        >>> client.server_state_defaults()["products"].shape  # 3 · 4 numbers of B A
        torch.Size([12])
    """

    needs_plain_mean = True

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        if not isinstance(net, LoRA):
            raise TypeError(
                "Expected argument `net` to be a pl_fed.models.LoRA for FedExLoRA but got"
                f" {type(net).__name__}."
            )
        check_adapters(net)
        net.body_changes = True
        super().__init__(net, **kwargs)
        self.register_buffer("first_body", self._body())
        self.add_server_state("products", self._current_products)

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Upload the change of the adapters, and propose the mean of the products."""
        own = self._products(client.models["global"].parameters)
        change = own - self._products(client.broadcast.parameters)
        client.proposals["products"] = client.server_states["products"] + change
        return super().end_round(client)

    def update_body(self, server_states: Mapping[str, Tensor]) -> None:
        """Set each adapted weight to its first value and the residuals of all rounds."""
        residual = server_states["products"] - self._products(self.row("global").data)
        body, begin = cast(Tensor, self.first_body) + residual, 0
        with torch.no_grad():
            for adapter in self._adapters().values():
                end = begin + adapter.weight.numel()
                adapter.weight.copy_(body[begin:end].view_as(adapter.weight))
                begin = end

    def _current_products(self) -> Tensor:
        """Return the products of the global model, and the residuals that the body has already."""
        return self._products(self.initial_row()) + (self._body() - cast(Tensor, self.first_body))

    def _body(self) -> Tensor:
        """Return the adapted weights, flat: [length]."""
        weights = [adapter.weight.detach() for adapter in self._adapters().values()]
        return torch.cat([weight.flatten() for weight in weights])

    def _adapters(self) -> dict[str, Adapter]:
        """Return the adapters of the net by name."""
        return cast(LoRA, self.global_model).adapters()

    def _products(self, parameters: Tensor) -> Tensor:
        """Return s B A of all adapters in the shape of their weights, flat: [..., length].

        Args:
            parameters: Rows of the trainable parameters, [..., numel].
        """
        views = self.row("global").layout.views(parameters)
        products = []
        for adapter in self._adapters().values():
            a = views.get(adapter.name_a, adapter.a)  # a frozen A is in no row
            product = adapter.scale * views[adapter.name_b] @ a
            products.append((product.mT if adapter.transposed else product).flatten(-2))
        return torch.cat(products, -1)


def check_adapters(net: LoRA) -> None:
    """Refuse adapters whose product is not a change of the weight in full precision.

    Raises:
        ValueError: If a layer is not linear, or its weight has another dtype than the adapters.
    """
    adapters = net.adapters()
    plain = [adapter for adapter in adapters.values() if adapter.is_plain]
    names = {name for adapter in plain for name in (adapter.name_a, adapter.name_b)}
    for name, parameter in net.named_parameters():
        is_factor = "lora_" in name and not name.endswith(".bias")  # the mean of biases is exact
        if parameter.requires_grad and is_factor and name not in names:
            raise ValueError(
                "Expected plain adapters of linear layers for FedExLoRA but got another kind at"
                f" {name}: change `target_modules` or `peft_options`."
            )
    for name, adapter in adapters.items():
        if adapter.weight.dtype != adapter.b.dtype:
            raise ValueError(
                f"Expected a body of {adapter.b.dtype} for FedExLoRA, which adds small numbers to"
                f" it, but got {adapter.weight.dtype} at {name}: remove `body_dtype`."
            )
