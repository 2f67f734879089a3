"""``OMP_NUM_THREADS=1 python experiments/benchmarks/products.py``: products by MKL and by oneDNN.

Compares two ways on one CPU thread, as medians in turns: torch's own, and oneDNN for large products
as in compiled steps on processors where MKL uses only AVX2 (``pl_fed/engine/products.py``). Rows
are the matrix products of local steps, and a compiled round of FLAME's MLP (10 clients × 10 steps,
minibatches of 100).
"""

import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from local_steps import CASES, ByPlFed
from report import table

from pl_fed.engine import compiled
from pl_fed.engine.products import is_mkl_slow

SHAPES = {  # rows, inner, columns
    "784-128 forward, 100 samples": (100, 784, 128),
    "its gradient": (128, 100, 784),
    "784-300 forward, 10 samples": (10, 784, 300),
    "its gradient ": (300, 10, 784),
    "3136-1024 forward, 16 samples": (16, 3136, 1024),
    "its gradient  ": (1024, 16, 3136),
}
TURNS = 31


def medians(*functions: Callable[[], object], repeat: int) -> list[float]:
    """Return the median seconds of each, in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(TURNS):
        for function, found in zip(functions, times):
            started = time.perf_counter()
            for _ in range(repeat):
                function()
            found.append((time.perf_counter() - started) / repeat)
    return [statistics.median(found[1:]) for found in times]


def main() -> None:
    torch.set_num_threads(1)
    print(f"MKL is slow here: {is_mkl_slow()}\n")
    rows = []
    for name, (m, k, n) in SHAPES.items():
        a, b = torch.randn(m, k), torch.randn(k, n)
        products = [lambda a=a, b=b: a @ b, lambda a=a, b=b: torch.ops.pl_fed.product(a, b)]
        found = [2e-9 * m * k * n / seconds for seconds in medians(*products, repeat=100)]
        rows.append([name.strip(), f"{m} × {k} × {n}", *(f"{gflops:.0f}" for gflops in found)])
    print(table(["product", "shape", "torch, GFLOP/s", "oneDNN"], rows))
    rounds = []
    for way in (False, True):
        with mock.patch.object(compiled, "is_mkl_slow", lambda way=way: way):
            program = ByPlFed(CASES["mlp-100"], CASES["mlp-100"].data(), "one_by_one_compiled")
            program.round()
            rounds.append(program.round)
    cells = [f"{1e3 * seconds:.2f}" for seconds in medians(*rounds, repeat=5)]
    print(table(["a round", "torch, ms", "oneDNN"], [[CASES["mlp-100"].title, *cells]]))


if __name__ == "__main__":
    main()
