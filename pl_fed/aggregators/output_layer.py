"""The output layer of a net: the positions of its weight and bias in an upload."""

from dataclasses import dataclass

from torch import Tensor

from pl_fed.nets.rows import RowLayout


@dataclass(frozen=True)
class OutputLayer:
    """Output layer: the last linear layer of a net, with K outputs and F inputs.

    Attributes:
        name: The name of the weight.
        weight_begin: The first position of the weight in an upload.
        bias_begin: The first position of the bias; ``None`` for a layer without bias.
        num_outputs: K.
        num_inputs: F.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
        >>> OutputLayer.find(RowLayout.from_parameters(net), "DeepSight")
        OutputLayer(name='2.weight', weight_begin=9, bias_begin=21, num_outputs=4, num_inputs=3)
    """

    name: str
    weight_begin: int
    bias_begin: int | None
    num_outputs: int
    num_inputs: int

    @classmethod
    def find(cls, layout: RowLayout | None, owner: str) -> "OutputLayer":
        """Return the last layer whose weight is a matrix.

        Args:
            layout: The layout of an upload.
            owner: The name of the aggregator for messages.

        Raises:
            ValueError: If there is no layout, or no weight that is a matrix.
        """
        if layout is None:
            raise ValueError(
                "Expected `context.layout` to give the position of each tensor in an upload for"
                f" {owner} but got None."
            )
        begins = dict(zip(layout.names, layout.offsets))
        shapes = dict(zip(layout.names, layout.shapes))
        for name in reversed(layout.names):
            prefix, _, last = name.rpartition(".")
            if last == "weight" and len(shapes[name]) == 2:
                num_outputs, num_inputs = shapes[name]
                bias = f"{prefix}.bias" if prefix else "bias"
                has_bias = shapes.get(bias) == (num_outputs,)
                bias_begin = begins[bias] if has_bias else None
                return cls(name, begins[name], bias_begin, num_outputs, num_inputs)
        raise ValueError(
            f"Expected argument `net` to end with a linear layer for {owner} but got trainable"
            f" tensors {', '.join(layout.names)}: use another `federation.aggregator`."
        )

    def read_weight(self, rows: Tensor) -> Tensor:
        """Return a view of the weights of rows [..., d]: [..., K, F]."""
        end = self.weight_begin + self.num_outputs * self.num_inputs
        shape = (*rows.shape[:-1], self.num_outputs, self.num_inputs)
        return rows[..., self.weight_begin : end].view(shape)

    def read_bias(self, rows: Tensor) -> Tensor:
        """Return a view of the biases of rows [..., d] of a layer with bias: [..., K]."""
        begin = self.bias_begin or 0
        return rows[..., begin : begin + self.num_outputs]
