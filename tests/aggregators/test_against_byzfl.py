"""Aggregators against byzfl 0.0.11.

It differs in: the neighbours that Krum counts, n − f − 1 where the paper has n − f − 2, so that our
f is its f less 1; the geometric median, of which it takes a few steps from 0; and CAF and SMEA,
whose eigenvalues it estimates by a step of the power method from a random direction. In torch its
median of an even number is the lower of the two middle values; here it is given numpy arrays. It
has no Bulyan, k-norm and k-loss.
"""

import itertools

import numpy as np
import pytest
import torch
from byzfl_reference import byzfl
from hostile_uploads import KINDS, hostile_uploads

from pl_fed.aggregators import (
    MDA,
    CenteredClipping,
    GeometricMedian,
    Krum,
    MeaMed,
    Mean,
    Median,
    TrimmedMean,
)
from pl_fed.types import RoundContext

PAIRS = {  # name -> ours and theirs, given n and f
    "Mean": lambda n, f: (Mean(), byzfl.Average()),
    "Median": lambda n, f: (Median(), byzfl.Median()),
    "TrimmedMean": lambda n, f: (TrimmedMean(f), byzfl.TrMean(f)),
    "Krum": lambda n, f: (Krum(num_byzantine=f - 1), byzfl.Krum(f)),
    "multi-Krum": lambda n, f: (Krum(n - f, num_byzantine=f - 1), byzfl.MultiKrum(f)),
    "GeometricMedian": lambda n, f: (
        GeometricMedian(smoothing=0.1, num_steps=3, start="zero"),
        byzfl.GeometricMedian(nu=0.1, T=3),
    ),
    "GeometricMedian, in the end": lambda n, f: (
        GeometricMedian(start="zero"),
        byzfl.GeometricMedian(nu=1e-6, T=3000),
    ),
    "CenteredClipping": lambda n, f: (
        CenteredClipping(tau=2.0, num_steps=4),
        byzfl.CenteredClipping(L=4, tau=2.0),
    ),
    "MDA": lambda n, f: (MDA(f), byzfl.MDA(f)),
    "MeaMed": lambda n, f: (MeaMed(f), byzfl.Meamed(f)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_results_equal_byzfl(name):
    for kind, (n, f) in itertools.product(KINDS, [(5, 1), (10, 2), (11, 4)]):
        check_against_byzfl(name, n, f, kind)


def check_against_byzfl(name, n, f, kind):
    """Check two rounds of an aggregator against byzfl's; the second depends on its memory."""
    aggregator, reference = PAIRS[name](n, f)
    context = RoundContext(clients=torch.arange(n))
    for round_number in range(2):
        uploads = hostile_uploads(kind, n, f, seed=round_number)
        merged = aggregator(uploads, torch.ones(n), context).numpy()
        expected = reference(uploads.numpy())
        largest = np.abs(uploads.numpy()).max() if name == "Mean" else np.abs(expected).max()
        assert np.abs(merged - expected).max() <= 1e-9 * largest
