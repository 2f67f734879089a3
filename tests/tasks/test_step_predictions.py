"""The results of ``predict_step`` for several batches of a client become one for its samples."""

import csv

import numpy as np
import pytest
import torch
from lit_federations import float32, numbers, set_up
from lit_modules import LitRegression
from small_federations import seeded, shared_out

import pl_fed
from pl_fed.callbacks.predictions import Predictions
from pl_fed.clients import FedAvg
from pl_fed.evaluation import model_runner
from pl_fed.samplers import All
from pl_fed.tasks.step_predictions import PerSample, join_predictions


def test_arrays_and_lists_of_all_batches_are_joined():
    """They had the entries of one batch alone."""
    batches = [
        {"prediction": np.array([1, 2]), "name": ["a", "b"], "pair": (torch.ones(2), "x")},
        {"prediction": np.array([3]), "name": ["c"], "pair": (torch.zeros(1), "x")},
    ]
    for are_own in (False, True):
        own = [{**batch, "pair": None} for batch in batches] if are_own else batches
        joined = join_predictions(own, [2, 1], are_own)
        assert joined["prediction"].tolist() == [1, 2, 3]
        assert joined["name"] == PerSample(["a", "b", "c"])
    assert join_predictions(batches, [2, 1], False)["pair"][0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], r"shape \[\]"),
        ([{"x": 2}, {"x": 1}], "int"),
        ([["a"], ["b", "c"]], "list"),
        ([{1}, {1}], "set"),
        ([torch.ones(2, 5), torch.ones(1, 4)], r"\[5\] and \[4\]: define one that returns a list"),
    ],
)
def test_predictions_without_an_entry_for_each_sample_are_refused(batches, words):
    with pytest.raises(ValueError, match=f"^Expected `predict_step` to return .* but got {words}"):
        join_predictions(batches, [2, 1], are_own=False)


class LitColumns(LitRegression):
    """Predicts further columns."""

    def predict_step(self, batch, batch_idx):
        outputs = self.net(batch[0])[:, 0]
        columns = {"note, text": ["=" for _ in outputs], "double": 2 * outputs}
        return {"prediction": outputs, "probability": [0.5 for _ in outputs], **columns}


@pytest.mark.slow
def test_entries_of_predict_step_are_columns_of_the_file(tmp_path):
    trainer, client, data = set_up(
        LitColumns, float32(numbers([16, 24])), FedAvg, tmp_path=tmp_path
    )
    trainer.callbacks.append(Predictions(tmp_path))
    trainer.predict(client, data)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(data.clients.test.index)
    for row in rows:
        assert float(row["double"]) == 2 * float(row["prediction"].strip("[]"))
        assert (row["note, text"], row["probability"]) == ("'=", "0.5")


class LitDraws(LitRegression):
    """Predicts by random draws, with the index of each batch."""

    def predict_step(self, batch, batch_idx):
        rows = torch.ones(len(batch[0]))
        return {"prediction": torch.rand_like(rows), "batch": batch_idx * rows}


def test_random_predictions_have_the_keys_of_their_clients(monkeypatch):
    """They depended on the calls before, and on the process that holds the client."""
    monkeypatch.setattr(model_runner, "_BATCH", 2)
    client = FedAvg(seeded(LitDraws))
    data = shared_out(float32(numbers([6, 4, 4])), val_fraction=0.0, test_fraction=0.5)
    federation = pl_fed.Federation(All(), seed=0)
    federation.setup(client, data, "predict")
    first, *others = federation.predict(torch.arange(3))
    assert first["batch"].tolist() == [0, 0, 1]
    for again in (federation.predict(torch.tensor([2, 1])), others[::-1]):
        assert [table["prediction"].tolist() for table in again] == [
            table["prediction"].tolist() for table in others[::-1]
        ]
    assert others[0]["prediction"].tolist() != others[1]["prediction"].tolist()


class LitSilent(LitRegression):
    """Predicts, and keeps it to itself."""

    def predict_step(self, batch, batch_idx):
        self.net(batch[0])


def test_a_predict_step_without_predictions_is_refused():
    """Its file had no row."""
    federation = pl_fed.Federation(All(), seed=0)
    data = shared_out(float32(numbers([4])), test_fraction=0.5)
    federation.setup(FedAvg(seeded(LitSilent)), data, "predict")
    with pytest.raises(ValueError, match="to return the predictions for its batch but got None:"):
        federation.predict(torch.arange(1))
