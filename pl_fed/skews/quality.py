"""Quality skew: noise in the inputs that grows with the client's id.

S. Zhu et al. "On ADMM in heterogeneous federated learning: Personalization, robustness, and
fairness" (FLAME). arXiv 2407.16397, section VI, "quality skew"::

    x ← x + N(0, σ i / m)   for client i = 0, ..., m − 1     (variance σ i / m)

Departs from FLAME's code. There σ i / m is the standard deviation (here ``of: "std"``), and every
access to a sample draws new noise. Here a sample keeps its noise, like a picture from a bad camera.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.random import generator
from pl_fed.skews.base import Skew


class Quality(Skew):
    """Quality skew: Gaussian noise that grows with the client's id, added to normalised inputs.

    Args:
        sigma: σ >= 0, the limit of the noise for the largest client ids.
        of: The quantity that grows up to σ: the ``"variance"`` or the ``"std"``.

    Shape:
        inputs [samples, ...].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> x = Quality(0.1, of="std").change(torch.zeros(50_000), 5, num_clients=10, seed=0)
        >>> round(float(x.std()), 3)
        0.05
    """

    after_normalizing = True

    def __init__(self, sigma: float = 0.1, of: Literal["variance", "std"] = "variance") -> None:
        check_nonnegative(sigma=sigma)
        check_choice(("variance", "std"), of=of)
        self.sigma = sigma
        self.of = of

    def change(self, x: Tensor, client: int, num_clients: int, seed: int) -> Tensor:
        """Return the noisy inputs."""
        level = self.sigma * client / num_clients
        std = level if self.of == "std" else level**0.5
        noise = torch.randn(x.shape, generator=generator(seed, "quality", client), dtype=x.dtype)
        return x + std * noise.to(x.device)
