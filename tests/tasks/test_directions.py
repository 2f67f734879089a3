"""Directions of metrics: known ones are found, and doubtful ones are never guessed."""

import pytest
from torchmetrics import MeanMetric, MeanSquaredError, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy

from pl_fed.tasks.directions import guess_direction, metric_direction


@pytest.mark.parametrize("name", ["loss", "recon_error", "log-loss", "valMAE", "rmse", "cv/nll"])
def test_losses_are_better_if_smaller(name):
    assert guess_direction(name) is False


@pytest.mark.parametrize("name", ["acc", "balanced_accuracy", "macro_f1", "AUROC"])
def test_accuracies_are_better_if_larger(name):
    assert guess_direction(name) is True


DIFFERENCES = ["1-acc", "drop_in_accuracy", "std_acc", "forget_acc", "delta_f1", "d_loss"]
DOUBTFUL = "smape wape crps mase rmsle fid hd95 ce kl bce hinge lpips eer nrmse regret cost"


@pytest.mark.parametrize(
    "name",
    [
        *DOUBTFUL.split(),
        *DIFFERENCES,
        "neg_mse",
        "attack_accuracy",
        "mse_skill",
        "accloss",
        "lossless",
    ],
)
def test_doubtful_names_have_no_direction(name):
    assert guess_direction(name) is None


def test_metrics_of_torchmetrics_know_their_direction():
    assert metric_direction(MeanSquaredError()) is False
    assert metric_direction(MinMaxMetric(BinaryAccuracy())) is True
    assert metric_direction(MeanMetric()) is None
    assert metric_direction(1 - BinaryAccuracy()) is None
