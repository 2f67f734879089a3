"""Tables of results have the names of classes and owners, if the data has names."""

import csv

import pytest
from small_federations import sgd
from torch import nn
from torch.utils.data import Dataset

import pl_fed
from pl_fed.callbacks.predictions import Predictions
from pl_fed.clients import FedAvg
from pl_fed.data import Arrays, FederatedData, Table, TorchDataset
from pl_fed.reports.run import read_run
from pl_fed.samplers import All

pytest.importorskip("pyarrow")

STAYS = """age,stay,clinic
1.0,readmit,north
2.0,home,north
3.0,readmit,north
4.0,home,north
5.0,home,"a, south"
6.0,readmit,"a, south"
7.0,home,"a, south"
8.0,readmit,"a, south"
"""


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "stays.csv").write_text(STAYS)
    data = FederatedData(
        Table(str(tmp_path / "stays.csv"), "stay", client="clinic"), batch_size=4,
        val_fraction=0.25, test_fraction=0.5, seed=0,
    )  # fmt: skip
    federation, run = pl_fed.Federation(All(), seed=0), tmp_path / "run"
    trainer = pl_fed.Trainer(
        federation, run_dir=run, max_epochs=1, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Predictions(run)],
    )  # fmt: skip
    client = FedAvg(nn.Linear(1, 2), optimizer=sgd())
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    trainer.predict(client, data)
    return run


@pytest.mark.slow
def test_tables_name_classes_and_owners(folder):
    names = {"0": "home", "1": "readmit"}
    rows = read(folder / "predictions.csv")
    assert len(rows) == 4
    for row in rows:
        assert row["target_name"] == names[row["target"]]
        assert row["prediction_name"] == names[row["prediction"]]
        assert row["owner"] == ["a, south", "north"][int(row["client"])]
    for row in read(folder / "per_class.csv"):
        assert row["class_name"] == names[row["class"]]
    assert not read_run(folder).damage


class Animals(Dataset):
    class_to_idx = {"cat": 0, "dog": 1}

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return [float(place)], place % 2


def test_names_of_a_data_set_are_those_of_its_classes():
    data = FederatedData(TorchDataset(Animals(), client=[0, 0, 1, 1]))
    assert data.clients.class_names == ("cat", "dog")


def test_wrong_number_of_names_is_refused(tmp_path):
    (tmp_path / "stays.csv").write_text(STAYS)
    arrays = Table(str(tmp_path / "stays.csv"), "stay", client="clinic").load()
    assert arrays.class_names == ("home", "readmit")
    with pytest.raises(ValueError, match="`class_names` to name 2 classes but got 1 names"):
        Arrays(arrays.inputs, arrays.targets, num_classes=2, class_names=["home"])
