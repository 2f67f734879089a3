"""Rows of clients and of their classes, after a test and after a validation."""

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


def trained(folder, data, outputs, **federation):
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


def test_a_row_for_each_client_and_class_that_it_has_test_samples_of(tmp_path):
    """Against the models, asked sample by sample."""
    attack = {"attack": RandomLabels(), "ids": [2]}
    _, client, data = trained(tmp_path, classes(SIZES), 3, **attack)
    found = rows(tmp_path / "per_class.csv")
    names = ["global_accuracy", "personal_accuracy", "hybrid_accuracy"]
    assert list(found[0]) == ["client", "byzantine", "class", "samples", *names]
    right: dict = {}
    for one in range(len(SIZES)):
        for sample in data.clients.test.samples(one).tolist():
            x, y = data.clients.inputs[sample], int(data.clients.targets[sample])
            with torch.no_grad():
                hit = int(client.global_model(x[None]).argmax()) == y
            right.setdefault((one, y), []).append(hit)
    assert [(int(row["client"]), int(row["class"])) for row in found] == sorted(right)
    for row in found:
        hits = right[int(row["client"]), int(row["class"])]
        assert int(row["samples"]) == len(hits)
        assert float(row["global_accuracy"]) == pytest.approx(sum(hits) / len(hits))
        assert row["byzantine"] == str(int(row["client"] == "2"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["global", "personal", "hybrid"])
def test_classes_add_up_to_clients(tmp_path, model):
    trained(tmp_path, classes(SIZES), 3)
    found = rows(tmp_path / "per_class.csv")
    for client in rows(tmp_path / "per_client.csv"):
        assert client["owner"] == client["client"]
        own = [row for row in found if row["client"] == client["client"]]
        assert sum(int(row["samples"]) for row in own) == int(client["test_samples"])
        hits = sum(int(row["samples"]) * float(row[f"{model}_accuracy"]) for row in own)
        share = float(client[f"{model}_accuracy"])
        assert hits / int(client["test_samples"]) == pytest.approx(share)


def test_names_are_utf8_and_no_formulas(tmp_path):
    names = ["=1+1", "é☃", "-2+3", "-2"]
    trained(tmp_path, replace(classes(SIZES), names=names), 3)
    found = rows(tmp_path / "per_client.csv")
    assert [row["owner"] for row in found] == ["'=1+1", "é☃", "'-2+3", "-2"]


def test_real_valued_targets_have_no_classes(tmp_path):
    owner = torch.arange(3).repeat_interleave(20)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)).double()
    (tmp_path / "per_class.csv").write_text("of an earlier test\n")
    trained(tmp_path, reals(x, x[:, :3].softmax(1), owner), 3)
    assert len(rows(tmp_path / "per_client.csv")) == 3
    assert not (tmp_path / "per_class.csv").exists()


def test_the_last_validation_has_rows_of_its_own(tmp_path):
    trainer, client, data = trained(tmp_path, classes(SIZES), 3)
    file = tmp_path / "per_client_validation.csv"
    found = rows(file)
    assert [row["val_samples"] for row in found] == [
        str(n) for n in data.clients.val.sizes.tolist()
    ]
    for row in found:
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
    assert not file.exists(), "a test writes nothing of it"
