"""Seventeen code bases of plain Lightning, federated by at most four lines."""

import importlib
import warnings

import pytest
import torch
from further_cases import mark_others
from small_federations import run_tried_rounds, seeded

from experiments.bring_your_own import run as experiment
from experiments.bring_your_own.code_bases import CODE_BASES
from pl_fed.aggregators import Median
from pl_fed.attacks import SignFlipping
from pl_fed.clients import APFL, Ditto, FedAvg, FedRep
from pl_fed.data import FederatedData, LightningData
from pl_fed.partitioners import IID

# class ids, boxes in lists, sequences, own batches of graphs, and two views of a sample
VARIED = ("images", "detection", "graphs")
OPTIONAL = {"hugging_face": "transformers", "timm_net": "timm", "molecules": "torch_geometric"}


def build(name):
    """Return a module and its clients' data, as its lines say."""
    base = CODE_BASES[name]
    file = importlib.import_module(f"experiments.bring_your_own.{name}")
    module, datamodule = getattr(file, f"Lit{base.name}"), getattr(file, f"{base.name}Data")()
    options = dict(line.split() for line in base.lines)
    names = ("client", "target", "batches")
    roles = {role: options.get(f"--data.dataset.{role}") for role in names}
    if function := options.get("--data.dataset.client_fn"):
        roles["client_fn"] = getattr(file, function.rpartition(".")[2])
    split = (IID(), 6) if "--data.num_clients" in options else (None, None)
    return module, FederatedData(
        LightningData(datamodule, **roles), *split, batch_size=4, drop_last=True, seed=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others(CODE_BASES, *VARIED))
def test_code_base_runs_under_algorithms_and_an_attack(name):
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name], reason="the code base imports it")
    assert len(CODE_BASES[name].lines) <= 4
    module, data = build(name)
    another = (FedAvg, Ditto, APFL)[[*CODE_BASES].index(name) % 3]
    for algorithm in (FedRep, another):  # FedRep splits the net
        client = algorithm(seeded(module), local_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about stacking
            outcome = run_tried_rounds(
                client, data, rounds=1, engine="stacked", attack=SignFlipping(), fraction=0.34,
                aggregator=Median(),
            )  # fmt: skip
        report = outcome.reports[-1]
        assert report["train/byzantine"] == data.clients.num_clients // 3
        assert torch.isfinite(torch.as_tensor(report["train/loss"]))
        assert torch.isfinite(outcome.w).all()


@pytest.mark.slow
def test_lines_run_from_the_command_line():
    short = ("--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1")
    row = experiment.federate(CODE_BASES["tabular"], "Ditto", "attacked", short)
    assert row["engine"] == "stacked"
    assert 0 < float(row["metric"]) <= 1
    plain = experiment.fit_plainly(CODE_BASES["tabular"], epochs=1)
    assert 0 < float(plain["metric"]) <= 1


def test_table_has_a_row_for_each_code_base_and_leaves_failures_out():
    row = {"metric": "0.9", "engine": "stacked", "seconds": "2", "failed": ""}
    keys = dict(zip(experiment.NAMES, ("images", "Ditto", "clean")))
    failed = {**row, "code_base": "graphs", "algorithm": "Ditto", "setting": "clean", "failed": "E"}
    table = experiment.table([{**row, **keys}, failed])
    assert "| images | acc | 4 | stacked | – | – | – | 0.9 |" in table
    assert "| graphs | acc | 4 |  | – |" in table
    assert table.count("--model.net") == len(CODE_BASES)
