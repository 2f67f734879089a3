"""One client changes the sum before noise by at most the declared sensitivity.

The walk through the package tries every allowed algorithm. A client's data are replaced by any
other data, or the client sends nothing. In the second round both federations have the same global
model, as an observer conditions on it, and different states of the client.
"""

import functools

import pytest
import torch
from further_cases import mark_further, mark_others
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rounds import build, model_row, private, run, set_cohort, silence
from small_federations import classes, shared_out

pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")

from algorithms import ALGORITHMS, CLIENTS, make

from pl_fed import EngineOptions
from pl_fed.data.source import Arrays
from pl_fed.preflight.privacy_rules import describe_unfit_algorithm

pytestmark = pytest.mark.slow

CLIP_NORM = 0.05
# one model, two, a kept part, own sums, personal rows, and solvers
STACKED_APART = ("FedAvg", "Ditto", "FedRep", "FLAME", "APFL", "PFedMe", "MeanRegularized")
SIMILAR = (  # to Ditto, FedAvg or Finetuning in what they upload, or run by the stacked test below
    *("DittoChoice", "DittoGreedy", "FedProx", "Mapper", "Moon", "PFedMe", "PFedMeEpochs"),
    *("PerFedAvg", "PropFair", "SimpleTuning"),
)
ALLOWED = [name for name in ALGORITHMS if describe_unfit_algorithm(make(name)) is None]


def make_data(size, scale, shift):
    """Return data in which client 0 has other samples: ``size`` of them, scaled and shifted.

    They come last, so that the other clients' samples are the same.
    """
    arrays = classes([6] * (CLIENTS - 1) + [12])
    count = 6 * (CLIENTS - 1) + size
    x, y = arrays.inputs[:count], arrays.targets[:count]
    x[-size:] = x[-size:] * scale + shift
    y[-size:] = (y[-size:] + int(shift)) % 3
    owner = (torch.arange(count) // 6 + 1).clamp(max=CLIENTS) % CLIENTS
    return shared_out(Arrays(x, y, owner, num_classes=3))


def sums_of_two_rounds(name, data, cohort, released, engine, dtype):
    """Return the sums before noise of two rounds, and the global model between them.

    Args:
        name: The algorithm.
        data: The data.
        cohort: The clients of both rounds.
        released: The global model between the rounds; ``None`` keeps the federation's own.
        engine: The name of the engine.
        dtype: The dtype of the models.
    """
    federation, optimizer = build(
        make(name),
        private(clip_norm=CLIP_NORM, amplification=False),
        data,
        max_rejected=1.0,
        model_selection=None,
        engine=EngineOptions(engine),
        dtype=dtype,
    )
    set_cohort(silence(federation), *cohort)
    denominator = federation.session.rounds.privacy.denominator
    first = run(federation, optimizer, 0)[0] * denominator
    if released is not None:
        model_row(federation).copy_(released)
    between = model_row(federation).clone()
    return first, run(federation, optimizer, 1)[0] * denominator, between


def test_walk_finds_the_allowed_algorithms():
    assert {"FedAvg", "Ditto", "FedRep", "MeanRegularized", "FLAME", "Finetuning"} <= {*ALLOWED}
    assert not {"Scaffold", "Mocha", "Local"} & {*ALLOWED}


@pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")
@pytest.mark.parametrize("name", mark_further(ALLOWED, SIMILAR))
@settings(deadline=None, max_examples=2)
@given(
    size=st.integers(1, 12),
    scale=st.sampled_from([1.0, 100.0, 1e30]),
    shift=st.floats(-10, 10),
)
def test_sum_before_noise_changes_by_at_most_the_sensitivity(name, size, scale, shift):
    check_sensitivity(name, make_data(size, scale, shift), tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")
@pytest.mark.filterwarnings("ignore:Clients are run one by one")
@pytest.mark.parametrize("name", mark_others(ALLOWED, *STACKED_APART))
def test_sensitivity_of_stacked_clients_in_float32(name):
    """Samples of 1e30 overflow, and the client has the only full minibatches of the stack."""
    check_sensitivity(name, make_data(8, 1e30, 0.0), 1e-5, "stacked", torch.float32)


def check_sensitivity(name, changed, tolerance, engine="one_by_one", dtype=torch.float64):
    """Compare the sums before noise of neighbouring federations."""
    first, second, released = sums_with_plain_data(name, 0, engine, dtype)
    replaced = sums_of_two_rounds(name, changed, range(CLIENTS), released, engine, dtype)
    neighbours = {
        CLIP_NORM: sums_with_plain_data(name, 1, engine, dtype),  # without client 0
        2 * CLIP_NORM: replaced,
    }
    for sensitivity, (other_first, other_second, _) in neighbours.items():
        for own, other in ((first, other_first), (second, other_second)):
            assert float((own - other).norm()) <= sensitivity * (1 + tolerance)


@functools.lru_cache(4)
def sums_with_plain_data(name, first_client, engine, dtype):
    """Return the sums with plain data of the clients from ``first_client`` on."""
    released = sums_with_plain_data(name, 0, engine, dtype)[2] if first_client else None
    cohort = range(first_client, CLIENTS)
    return sums_of_two_rounds(name, make_data(6, 1.0, 0.0), cohort, released, engine, dtype)
