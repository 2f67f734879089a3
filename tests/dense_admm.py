"""Algorithm 1 of FLAME, and least squares to run it on, in dense float64: nothing of pl_fed's.

Clients observe y = X θ_i + noise; f_i(θ) = 1/(2 n_i) ‖X_i θ − y_i‖².
"""

from dataclasses import dataclass

import numpy as np
import torch
from small_federations import reals


@dataclass(frozen=True)
class LeastSquares:
    """The clients' X_i [n_i, d] and y_i [n_i]."""

    x: list
    y: list

    @classmethod
    def drawn(cls, sizes, d=3, b=None, seed=0, spread=1.0, noise=0.5):
        """Draw one; with ``b`` given, X_iᵀ X_i = n_i b_i I up to the rounding of float32.

        Numbers are those of float32, in which data sets are kept.
        """
        draw = np.random.default_rng(seed)
        x, y = [], []
        for i, n in enumerate(sizes):
            own = draw.normal(size=(n, d))
            if b is not None:
                own = np.linalg.qr(own)[0] * np.sqrt(n * b[i])
            truth = 1.0 + spread * draw.normal(size=d)
            x.append(own)
            y.append(own @ truth + noise * draw.normal(size=n))
        return cls(*([one.astype("f").astype("d") for one in each] for each in (x, y)))

    @property
    def arrays(self):
        """The same as a data set."""
        owner = np.repeat(np.arange(len(self.x)), [len(y) for y in self.y])
        y = torch.from_numpy(np.concatenate(self.y))[:, None]
        return reals(torch.from_numpy(np.concatenate(self.x)), y, torch.from_numpy(owner))

    @property
    def sizes(self):
        return np.array([len(y) for y in self.y])

    @property
    def hessians(self):
        return [x.T @ x / len(x) for x in self.x]

    @property
    def estimates(self):
        """θ̂_i of (130)."""
        return np.stack([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(self.x, self.y)])

    @property
    def smoothness(self):
        """L: the largest curvature of any f_i."""
        return max(np.linalg.eigvalsh(hessian)[-1] for hessian in self.hessians)

    def loss(self, i, theta):
        return float(np.square(self.x[i] @ theta - self.y[i]).mean() / 2)

    def gradient(self, i, theta):
        return self.x[i].T @ (self.x[i] @ theta - self.y[i]) / len(self.y[i])

    def alpha(self, weights="uniform"):
        if weights == "samples":
            return self.sizes / self.sizes.sum()
        return np.full(len(self.x), 1 / len(self.x))

    def solution(self, lam, weights="uniform"):
        """w* and the θ_i* of (135), for any α_i: the linear system (134), solved as a whole."""
        m, d = self.estimates.shape
        alpha = self.alpha(weights)
        matrix, right = np.zeros(((m + 1) * d, (m + 1) * d)), np.zeros((m + 1) * d)
        one = np.eye(d)
        for i in range(m):
            here = slice(i * d, (i + 1) * d)
            matrix[here, here] = self.hessians[i] + lam * one
            matrix[here, m * d :] = -lam * one
            matrix[m * d :, here] = -alpha[i] * one
            right[here] = self.x[i].T @ self.y[i] / len(self.y[i])
        matrix[m * d :, m * d :] = one
        found = np.linalg.solve(matrix, right).reshape(m + 1, d)
        return found[m], found[:m]


@dataclass
class Iterate:
    """P^t of the paper, and the u_i; w is the server's model after the round."""

    theta: np.ndarray
    local: np.ndarray
    dual: np.ndarray
    w: np.ndarray
    rho: float

    @property
    def u(self):
        return self.local + self.dual / self.rho


def algorithm_1(problem, start, cohorts, lam, rho, eta, steps, weights="uniform", pull_to="own"):
    """Yield the iterates of Algorithm 1 after each round, with so many steps on full gradients."""
    m, alpha = len(problem.x), problem.alpha(weights)
    theta, local = np.tile(start, (m, 1)), np.tile(start, (m, 1))
    dual = np.zeros_like(theta)
    for cohort in cohorts:
        w = (local + dual / rho).mean(0)
        for i in cohort:
            centre = local[i] if pull_to == "own" else w
            for _ in range(steps):
                theta[i] -= eta * (problem.gradient(i, theta[i]) + lam * (theta[i] - centre))
            local[i] = (lam * alpha[i] * theta[i] + rho * w - dual[i]) / (lam * alpha[i] + rho)
            dual[i] += rho * (local[i] - w)
        after = (local + dual / rho).mean(0)
        yield Iterate(theta.copy(), local.copy(), dual.copy(), after, rho)
