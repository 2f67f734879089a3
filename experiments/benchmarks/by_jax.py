"""The same federation by hand in JAX: one compiled call for a whole round.

Install jax in a separate environment: see ``README.md``. Two forms of a round compete:

- ``jax``: ``lax.map`` over the clients, ``lax.scan`` over the steps, weights [inputs, outputs].
- ``jax-tuned``: the mean is accumulated client by client, the steps are unrolled, and weights are
  [outputs, inputs].
"""

import os

os.environ.setdefault(  # one thread, as for pl_fed; jax reads it on import
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import numpy as np
import torch
from cases import LR, Case
from jax import Array, lax
from jax import numpy as jnp
from local_steps import ByPlFed
from torch import nn

from pl_fed.data import FederatedData
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData

jax.config.update("jax_cpu_enable_async_dispatch", False)

Layers = list[tuple[Array, Array]]  # weight and bias of each linear layer

_TOLERANCE = 1e-5  # of a weight after a round, in float32


class ByJax:
    """FedAvg of linear layers with ReLU between them, as one function that JAX compiles.

    NumPy draws the minibatches: it is faster than ``jax.random``.

    Args:
        case: The federation to run; all its clients take part.
        data: The clients' data, on the CPU.
        tuned: Whether to run ``jax-tuned``.
    """

    def __init__(self, case: Case, data: ClientData, tuned: bool) -> None:
        self.case, self.tuned = case, tuned
        torch.manual_seed(0)
        linears = [layer for layer in case.build().modules() if isinstance(layer, nn.Linear)]
        self.layers: Layers = [
            (jnp.array(self._turn(layer.weight.detach().numpy())), jnp.array(layer.bias.detach()))
            for layer in linears
        ]
        self.x, self.y = jnp.array(data.inputs.flatten(1)), jnp.array(data.targets)
        owned = [data.train.samples(client).numpy() for client in range(case.clients)]
        self.owned = np.stack(owned).astype(np.int32)
        self.generator = np.random.default_rng(0)
        self.train = jax.jit(self._train, donate_argnums=0)

    def round(self) -> None:
        """Run one round."""
        order = self.generator.permuted(self.owned, axis=1)
        self.run(order[:, : self.case.steps * self.case.batch_size])

    def run(self, order: np.ndarray) -> None:
        """Run a round on samples in an order, [clients, steps · batch]."""
        batches = order.reshape(self.case.clients, self.case.steps, self.case.batch_size)
        self.layers, loss = self.train(self.layers, self.x, self.y, batches)
        float(loss)  # waits for the round

    def weights(self) -> list[torch.Tensor]:
        """Return the weights and biases of the layers, as torch orders them."""
        arrays = [a for weight, bias in self.layers for a in (self._turn(weight), bias)]
        return [torch.from_numpy(np.array(a)) for a in arrays]

    def _turn(self, weight: np.ndarray | Array) -> np.ndarray | Array:
        """Turn a weight from torch's layout into that of this round, or back."""
        return weight if self.tuned else weight.T

    def _loss(self, layers: Layers, x: Array, y: Array) -> Array:
        for number, (weight, bias) in enumerate(layers):
            x = jax.nn.relu(x) if number else x
            x = x @ (weight.T if self.tuned else weight) + bias
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

    def _train_client(self, layers: Layers, x: Array, y: Array, batches: Array) -> tuple:
        """Return a client's layers after its steps, and its mean loss."""

        def step(layers: Layers, batch: Array) -> tuple[Layers, Array]:
            loss, gradients = jax.value_and_grad(self._loss)(layers, x[batch], y[batch])
            return jax.tree.map(lambda a, g: a - LR * g, layers, gradients), loss

        unroll = self.case.steps if self.tuned else 1
        layers, losses = lax.scan(step, layers, batches, unroll=unroll)
        return layers, losses.mean()

    def _train(self, layers: Layers, x: Array, y: Array, batches: Array) -> tuple[Layers, Array]:
        """Return the mean of the clients' layers, and their mean loss."""
        if not self.tuned:
            trained, losses = lax.map(lambda own: self._train_client(layers, x, y, own), batches)
            return jax.tree.map(lambda rows: rows.mean(0), trained), losses.mean()

        def add(total: Layers, own: Array) -> tuple[Layers, Array]:
            trained, loss = self._train_client(layers, x, y, own)
            return jax.tree.map(lambda s, a: s + a / self.case.clients, total, trained), loss

        mean, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, layers), batches)
        return mean, losses.mean()


def check_equal_rounds(case: Case, data: FederatedData) -> None:
    """Compare rounds of pl_fed and of both forms in JAX on the same minibatches.

    Raises:
        ValueError: If a weight differs by more than rounding.
    """
    pl_fed = ByPlFed(case, data, "one_by_one")
    both = [ByJax(case, data.clients, tuned) for tuned in (False, True)]
    clients, steps = torch.arange(case.clients), [case.steps] * case.clients
    for number in range(2):
        pl_fed.round()
        rule = BatchRule(case.batch_size)
        order = Batches(data.clients, clients, steps, rule, seed=0, round=number).sample_ids()
        for by_jax in both:
            by_jax.run(order.view(case.clients, -1).numpy())
    expected = list(pl_fed.client.global_model.parameters())
    for by_jax in both:
        for weight, other in zip(expected, by_jax.weights(), strict=True):
            difference = float((weight.detach().cpu() - other).abs().max())
            if not difference < _TOLERANCE:
                raise ValueError(f"Expected equal weights but they differ by {difference}.")
