"""Messages print the names of folders literally."""

from types import SimpleNamespace

import pytest
import torch
from small_federations import classes, shared_out

from pl_fed.callbacks.predictions import Predictions
from pl_fed.callbacks.summary import Summary


@pytest.mark.parametrize("name", ["[lam=0.1]", "a[/b]c", "plain"])
def test_folder_names_with_brackets_are_printed_literally(tmp_path, capsys, name):
    folder = tmp_path / name
    first = SimpleNamespace(is_global_zero=True, fast_dev_run=False)
    federation = SimpleNamespace(
        metrics=lambda part: {},
        held_out_metrics=lambda part: {},
        monitored_metric="accuracy",
        privacy_statement=lambda: None,
        session=SimpleNamespace(datamodule=shared_out(classes([4]))),
        is_byzantine=torch.tensor([False]),
    )
    Summary(federation, folder).on_test_end(first, None)
    assert f"The run's files are in {folder}\n" in capsys.readouterr().out
    Predictions(folder).on_predict_end(first, None)
    assert capsys.readouterr().out == f"The predictions are in {folder}/predictions.csv\n"
