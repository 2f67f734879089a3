"""The share of broken clients that ends a run."""

import math

import pytest
import torch
from tables import table_test

from pl_fed.distributed.work_share import WorkShare
from pl_fed.nets.rows import finite_rows
from pl_fed.rounds.broken_clients import NonFiniteLossError, check_broken_share
from pl_fed.rounds.trained_cohort import CohortResults, TrainedCohort, UploadStatus


def broken_check(losses, rows, byzantine=(), max_share=0.0, misshapen=()):
    is_byzantine = torch.zeros(6, dtype=torch.bool)
    is_byzantine[list(byzantine)] = True
    clients = torch.tensor([5, 0, 3])
    losses, finite = torch.tensor(losses), finite_rows(torch.tensor(rows))
    sent = torch.where(finite & losses.isfinite(), UploadStatus.VALID, UploadStatus.NOT_FINITE)
    sent[list(misshapen)] = UploadStatus.MALFORMED
    benign = ~is_byzantine[clients]
    trained = TrainedCohort(
        share=WorkShare.single_process(clients),
        broadcast=losses[:0],
        metrics={"loss": losses},
        status=sent,
        has_uploads=True,
        start_losses=losses[:0],
        group_counts=losses[:0],
        idle=None,
        group=None,
        proposed=[],
        own=CohortResults(3, None),
    )
    return int(check_broken_share(trained, benign, 7, max_share).sum())


GOOD_ROWS = [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("max_share", "raises"), [(0.0, True), (0.3, True), (0.34, False), (1, False)]
)
def test_allowed_share_of_broken_uploads(max_share, raises):
    if raises:
        with pytest.raises(NonFiniteLossError, match="client 0 got a loss of nan: "):
            broken_check([1.0, math.nan, 3.0], GOOD_ROWS, max_share=max_share)
    else:
        assert broken_check([1.0, math.nan, 3.0], GOOD_ROWS, max_share=max_share) == 1


def test_error_names_one_broken_client_and_counts_the_others():
    match = "client 5 got a loss of nan, as did 1 more of 3: "
    with pytest.raises(NonFiniteLossError, match=match):
        broken_check([math.nan, 1.0, math.inf], GOOD_ROWS, max_share=0.5)


def test_error_distinguishes_wrong_length_from_divergence():
    with pytest.raises(NonFiniteLossError, match="client 3 got rows of another kind or length"):
        broken_check([1.0, 2.0, 3.0], GOOD_ROWS, misshapen=[2])


def test_finite_uploads_are_accepted():
    broken_check([1.0, 3e38, 0.0], GOOD_ROWS)


@table_test("loss", [math.nan, math.inf, -math.inf])
def test_error_of_a_broken_loss_names_round_client_and_cause(loss):
    with pytest.raises(
        NonFiniteLossError, match=rf"in round 7 client 3 got a loss of {loss}: .* learning rate"
    ):
        broken_check([1.0, 2.0, loss], GOOD_ROWS)


@table_test("number", [math.nan, math.inf])
def test_broken_model_with_a_finite_loss_is_an_error(number):
    with pytest.raises(
        NonFiniteLossError, match="in round 7 client 0 got a model with NaN or infinity"
    ):
        broken_check([1.0, 2.0, 3.0], [[1.0], [number], [3.0]])


def test_byzantine_clients_may_diverge():
    broken_check([1.0, math.nan, 3.0], [[1.0], [math.inf], [3.0]], byzantine=[0])
    with pytest.raises(NonFiniteLossError, match="client 5"):
        broken_check([math.nan, math.nan, 3.0], GOOD_ROWS, byzantine=[0])
