"""Benign uploads with forged uploads among them, for comparisons with other implementations."""

import torch

KINDS = {  # forged uploads as functions of benign uploads and noise of their shape
    "random": lambda honest, noise: noise,
    "far": lambda honest, noise: 1e30 * noise.sign(),
    "together": lambda honest, noise: 50 + 0.01 * noise,
    "mirrored": lambda honest, noise: -3 * honest.mean(0) + 0.1 * noise,
    "a little": lambda honest, noise: honest.mean(0) + 1.5 * honest.std(0) + 1e-3 * noise,
}


def hostile_uploads(kind, n, f, d=40, seed=0):
    """Return float64 uploads [n, d], f of them hostile, in any order."""
    draw = torch.Generator().manual_seed(1000 * seed + n)
    honest = torch.randn(n - f, d, generator=draw, dtype=torch.float64) + 0.5
    noise = torch.randn(f, d, generator=draw, dtype=torch.float64)
    rows = torch.cat([honest, KINDS[kind](honest, noise)])
    return rows[torch.randperm(n, generator=draw)]
