"""Weights of compiled steps on CPUs: SGD's update as one product, added in place.

The gradient of a linear layer's weight is a product of two small matrices, but as large as the
weight. W ← W − η AB, added in place, neither writes nor reads this gradient. In a stack of clients
the weights are in no fast cache, so such passes over memory take most of a step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_OPS = torch.ops.aten
_MIN_NUMBERS = 1 << 12  # of a weight; below, a few µs for an operator in Python do not pay off
_PRODUCTS = (_OPS.mm.default, _OPS.bmm.default)
_VIEWS = (_OPS.permute.default, _OPS.expand.default, _OPS.reshape.default)


def _add_product(weight: Tensor, a: Tensor, b: Tensor) -> None:
    weight.addmm_(a, b) if weight.dim() == 2 else weight.baddbmm_(a, b)


def _change_nothing(weight: Tensor, a: Tensor, b: Tensor) -> None:
    pass


_LIBRARY = torch.library.Library("pl_fed", "FRAGMENT")
_LIBRARY.define(
    "add_product(Tensor(a!) weight, Tensor a, Tensor b) -> ()", tags=torch.Tag.flexible_layout
)
_LIBRARY.impl("add_product", _add_product, "CPU")
_LIBRARY.impl("add_product", _change_nothing, "Meta")


def add_products_in_place(graph: Graph) -> None:
    """Replace W ← where(running, W − η AB, W) by one product that is added to W in place.

    A client that does not run adds 0 · B: its samples must be finite.

    Args:
        graph: The graph of a step's operators, which writes its results at its end.
    """
    writes = graph.find_nodes(op="call_function", target=_OPS.copy_.default)
    written = {write.args[0] for write in writes}
    for write in writes:
        weight, result = write.args
        factors = _read_update(weight, result)
        if factors is None:
            continue
        running, rate, a, b = factors
        if _find_base(a) in written or _find_base(b) in written:
            continue  # the product would read a weight after its update
        with graph.inserting_before(write):
            zero = _call(graph, _OPS.mul.Tensor, rate, 0)
            scaled = _call(graph, _OPS.mul.Tensor, a, _call(graph, _OPS.neg.default, rate))
            scaled = _call(graph, _OPS.where.self, running, scaled, zero)
            graph.call_function(torch.ops.pl_fed.add_product.default, (weight, scaled, b))
        graph.erase_node(write)
    graph.eliminate_dead_code()


def _read_update(weight: Any, result: Any) -> tuple[Node, Node, Node, Node] | None:
    """Return the factors of an update: running, η, A and B; ``None`` for another update."""
    value = weight.meta["val"]
    is_input = weight.op == "placeholder" and value.device.type == "cpu"
    if not is_input or value.numel() < _MIN_NUMBERS:
        return None
    if not _is_call(result, _OPS.where.self):
        return None
    running, difference, otherwise = result.args
    if otherwise is not weight or not _is_call(difference, _OPS.sub.Tensor):
        return None
    before, change = difference.args
    if before is not weight or not _is_call(change, _OPS.mul.Tensor):
        return None
    rate, product = change.args
    if not _is_call(product, *_PRODUCTS) or product.meta["val"].shape != value.shape:
        return None
    return running, rate, *product.args


def _is_call(node: Any, *operators: Any) -> bool:
    """Return whether a node calls one of the operators for a single further node."""
    return isinstance(node, Node) and node.target in operators and len(node.users) == 1


def _find_base(node: Node) -> Node:
    """Return the node of which a node is a view."""
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _call(graph: Graph, operator: Any, *args: Any) -> Node:
    """Add a call to a graph, with the shape of its result."""
    node = graph.call_function(operator, args)
    node.meta["val"] = operator(*(getattr(arg, "meta", {"val": arg})["val"] for arg in args))
    return node
