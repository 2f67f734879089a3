"""Tables of clients and of their classes, after a test and after a validation."""

import csv
from dataclasses import replace

import pytest
import torch
from small_federations import Given, classes, reals, sections, seeded

import pl_fed
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto
from pl_fed.data import FederatedData
from pl_fed.samplers import All

SIZES = [20, 35, 15, 40]


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def fit_and_test(folder, data, outputs, **federation):
    data = FederatedData(Given(data), batch_size=8, seed=0)
    client = seeded(lambda: Ditto(torch.nn.Linear(4, outputs), local_steps=3))
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), seed=0, **sections(engine="one_by_one", **federation)),
        run_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    return trainer, client, data


@pytest.mark.slow
def test_per_class_has_a_row_for_each_tested_class_of_each_client(tmp_path):
    """The table equals a loop over the samples."""
    attack = {"attack": RandomLabels(), "ids": [2]}
    _, client, data = fit_and_test(tmp_path, classes(SIZES), 3, **attack)
    table = rows(tmp_path / "per_class.csv")
    names = ["global_accuracy", "personal_accuracy", "hybrid_accuracy"]
    assert list(table[0]) == ["client", "owner", "byzantine", "class", "samples", *names]
    hits_by_class: dict = {}
    for client_id in range(len(SIZES)):
        for sample in data.clients.test.samples(client_id).tolist():
            x, y = data.clients.inputs[sample], int(data.clients.targets[sample])
            with torch.no_grad():
                hit = int(client.global_model(x[None]).argmax()) == y
            hits_by_class.setdefault((client_id, y), []).append(hit)
    assert [(int(row["client"]), int(row["class"])) for row in table] == sorted(hits_by_class)
    for row in table:
        hits = hits_by_class[int(row["client"]), int(row["class"])]
        assert int(row["samples"]) == len(hits)
        assert float(row["global_accuracy"]) == pytest.approx(sum(hits) / len(hits))
        assert row["byzantine"] == str(int(row["client"] == "2"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["global", "personal", "hybrid"])
def test_hits_of_classes_add_up_to_those_of_clients(tmp_path, model):
    fit_and_test(tmp_path, classes(SIZES), 3)
    table = rows(tmp_path / "per_class.csv")
    for client in rows(tmp_path / "per_client.csv"):
        assert client["owner"] == client["client"]
        own = [row for row in table if row["client"] == client["client"]]
        assert sum(int(row["samples"]) for row in own) == int(client["test_samples"])
        hits = sum(int(row["samples"]) * float(row[f"{model}_accuracy"]) for row in own)
        share = float(client[f"{model}_accuracy"])
        assert hits / int(client["test_samples"]) == pytest.approx(share)


@pytest.mark.slow
def test_owner_names_are_utf8_and_no_formulas(tmp_path):
    names = ["=1+1", "é☃", "-2+3", "-2"]
    fit_and_test(tmp_path, replace(classes(SIZES), names=names), 3)
    table = rows(tmp_path / "per_client.csv")
    assert [row["owner"] for row in table] == ["'=1+1", "é☃", "'-2+3", "-2"]


@pytest.mark.slow
def test_real_valued_targets_have_no_classes(tmp_path):
    owner = torch.arange(3).repeat_interleave(20)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)).double()
    (tmp_path / "per_class.csv").write_text("of an earlier test\n")
    fit_and_test(tmp_path, reals(x, x[:, :3].softmax(1), owner), 3)
    assert len(rows(tmp_path / "per_client.csv")) == 3
    assert not (tmp_path / "per_class.csv").exists()


@pytest.mark.slow
def test_validation_writes_its_own_table(tmp_path):
    trainer, client, data = fit_and_test(tmp_path, classes(SIZES), 3)
    file = tmp_path / "per_client_validation.csv"
    table = rows(file)
    assert [row["val_samples"] for row in table] == [
        str(n) for n in data.clients.val.sizes.tolist()
    ]
    for row in table:
        index = data.clients.val.samples(int(row["client"]))
        x, y = data.clients.inputs[index], data.clients.targets[index]
        with torch.no_grad():
            outputs = client.global_model(x)
        accuracy = (outputs.argmax(1) == y).double().mean()
        assert float(row["global_accuracy"]) == pytest.approx(float(accuracy))
        loss = torch.nn.functional.cross_entropy(outputs, y)
        assert float(row["global_loss"]) == pytest.approx(float(loss), rel=1e-5)
    file.unlink()
    trainer.test(client, data, verbose=False)
    assert not file.exists(), "a test removes the table of the validation"
