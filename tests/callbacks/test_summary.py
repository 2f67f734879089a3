"""The table at the end of a fit."""

from types import SimpleNamespace

import pytest
import torch

from pl_fed.callbacks.summary import Summary

CLASSES = {"accuracy": 0.9, "accuracy_std": 0.1, "accuracy_worst10": 0.7, "accuracy_best10": 1.0}
CLASSES |= {"accuracy_weighted": 0.91, "loss": 0.3}


def print_summary(
    capsys,
    never_trained=0,
    untrained_models=None,
    logged=None,
    held_out_models=None,
    test_samples=1,
    **models,
):
    metrics, held_out = (
        {name: SimpleNamespace(compute=lambda v=v: v) for name, v in tables.items()}
        for tables in (models, held_out_models or {})
    )
    benign, untrained = torch.zeros(9, dtype=torch.bool), torch.arange(never_trained)
    federation = SimpleNamespace(
        metrics=lambda part: metrics,
        held_out_metrics=lambda part: held_out,
        session=SimpleNamespace(
            central=None,
            datamodule=SimpleNamespace(
                clients=SimpleNamespace(
                    part=lambda _: SimpleNamespace(sizes=torch.full((9,), test_samples))
                )
            ),
        ),
        is_byzantine=benign,
        monitored_metric="accuracy",
        clients_without_training=lambda: untrained,
        untrained_models=untrained_models,
        privacy_statement=lambda: None,
    )
    trainer = SimpleNamespace(is_global_zero=True, callback_metrics=logged or {})
    Summary(federation).on_test_end(trainer, None)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_summary_of_a_classification(capsys):
    lines = print_summary(capsys, **{"global": CLASSES, "personal": {**CLASSES, "accuracy": 0.95}})
    assert lines[0] == "test accuracy of benign clients"
    (row,) = [line for line in lines if "mean over clients" in line]
    assert row.split("│")[2:4] == ["       0.9000 ", "         0.9500 "]
    assert any("over all samples" in line for line in lines)
    assert not any("backdoor" in line for line in lines)


def test_summary_has_a_table_of_held_out_clients(capsys):
    held_out = {"global": {**CLASSES, "accuracy": 0.8}}
    lines = print_summary(capsys, held_out_models=held_out, **{"global": CLASSES})
    begin = lines.index("test accuracy of held-out clients")
    (row,) = [line for line in lines[begin:] if "mean over clients" in line]
    assert "0.8000" in row


@pytest.mark.parametrize("success", [{}, {"backdoor_success": 0.25}])
def test_summary_has_no_empty_row(capsys, success):
    lines = print_summary(capsys, **{"global": {"loss": 0.5, **success}})
    assert lines[0] == "test results of benign clients"
    assert not any("mean over clients" in line for line in lines)
    assert sum("0.5000" in line for line in lines) == 1
    assert sum("backdoor success rate" in line for line in lines) == len(success)


def test_summary_without_test_data_is_one_sentence(capsys):
    models = {"global": {}, "personal": {}}
    assert print_summary(capsys, test_samples=0, **models) == ["no benign client has test data"]


def test_summary_without_metrics_says_so(capsys):
    assert print_summary(capsys, **{"global": {}}) == [
        "no metrics: log some in `test_step` of the net, or set `federation.metrics`"
    ]


@pytest.mark.parametrize("never_trained", [0, 3])
def test_summary_counts_untrained_personal_models(capsys, never_trained):
    lines = print_summary(capsys, never_trained, **{"global": CLASSES, "personal": CLASSES})
    sentence = "3 of 9 benign clients never took part: their personal models were never trained."
    assert (sentence in lines) == bool(never_trained)


def test_summary_reports_that_the_global_model_replaces_untrained_models(capsys):
    lines = print_summary(capsys, 3, "global", **{"global": CLASSES, "personal": CLASSES})
    sentence = "3 of 9 benign clients never took part: the global model replaces their personal"
    assert any(line.startswith(sentence) for line in lines)


def test_summary_shows_the_trained_clients(capsys):
    trained = {"accuracy_trained": 0.97, "accuracy_trained_std": 0.02, "loss_trained": 0.1}
    lines = print_summary(capsys, 3, **{"global": CLASSES, "personal": {**CLASSES, **trained}})
    rows = [line.split("│")[1:4] for line in lines if "trained clients" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["mean over trained clients", "-", "0.9700"],
        ["std over trained clients", "-", "0.0200"],
    ]


def test_summary_of_a_user_metric(capsys):
    figures = {"mae": 0.5, "mae_std": 0.1, "mae_worst10": 0.9, "loss": 2.0, "r2": 0.25}
    lines = print_summary(capsys, **{"global": {**figures, "r2_worst10": 0.1}})
    text = "\n".join(lines)
    assert lines[0] == "test results of benign clients"
    for number in ("mae, mean over clients", "mae, worst 10 % of clients", "0.9000", "r2, mean"):
        assert number in text
    assert "r2, worst" not in text, "other metrics have only their mean"


def test_summary_shows_a_number_that_the_user_logs_for_a_model(capsys):
    logged = {
        "test/personal/gini": torch.tensor(0.125),
        "test/personal/accuracy": torch.tensor(0.1),  # the metric's own value stays
        "val/personal/gini": torch.tensor(0.5),
        "train/loss": torch.tensor(2.0),
    }
    lines = print_summary(capsys, logged=logged, **{"global": CLASSES, "personal": CLASSES})
    (row,) = [line for line in lines if "gini" in line]
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["-", "0.1250"]
    assert not any("0.1000 │        0.1" in line for line in lines)
