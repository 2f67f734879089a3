"""The numbers that an algorithm declares to send are those that cross the network."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exhaustive import exhaustive_for

sys.path.append(str(Path(__file__).parents[1] / "privacy"))

from algorithms import ALGORITHMS, CLIENTS, make
from equal_trials import trials_skipped
from small_federations import classes, mlp, sgd, shared_out

import pl_fed
from pl_fed.aggregators import Chain, Mean, PreAggregator
from pl_fed.aggregators.base import PreparedUploads
from pl_fed.clients import FedAvg, FedDyn, Scaffold
from pl_fed.rounds.traffic import Traffic
from pl_fed.samplers import All


def crossing(client, arrays, rounds):
    """Return the span of the uploads that a client can send, and the lengths of its proposals."""
    uploads, proposed = [], {}
    end_round = client.run_end_round

    def watch(round):
        upload, states = end_round(round)
        uploads.append(upload.detach().clone())
        proposed.update({name: row.shape[1] for name, row in round.proposals.items()})
        return upload, states

    client.run_end_round = watch
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), engine=pl_fed.EngineOptions("one_by_one")),
        max_epochs=rounds, logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_checkpointing=False, limit_val_batches=0,
    )  # fmt: skip
    with trials_skipped():
        trainer.fit(client, shared_out(arrays))
    rows = torch.cat(uploads).double()
    return rows, sum(proposed.values())


@exhaustive_for(
    "APFL",
    "Ditto",
    "DittoChoice",
    "DittoGreedy",
    "FedProx",
    "FedTilt",
    "Finetuning",
    "HierFedAvg",
    "KNNPer",
    "Mapper",
    "Moon",
    "PFedMe",
    "PFedMeEpochs",
    "PerFedAvg",
    "PropFair",
    "SimpleTuning",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"Local", "Mocha"}))
def test_declared_uploads_are_the_numbers_that_cross(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client, rounds = make(name), 8 if name == "LpProj" else 2  # its span grows with the rounds
    rows, proposed = crossing(client, classes([8] * CLIENTS), rounds)
    sent = int((rows != 0).any(0).sum())
    if name == "LpProj":  # lifted: as many numbers as the span has dimensions
        sent = int(torch.linalg.matrix_rank(rows, rtol=1e-4))
    if name == "FedDyn":  # the server computes the mean of the drifts from the uploads
        proposed = 0
    assert client.upload_numbers == sent + proposed


class Tenth(PreAggregator):
    """Tenth: the first tenth of an upload."""

    def sent_numbers(self, numbers):
        return numbers // 10

    def forward(self, uploads, weights, context):
        uploads = uploads.clone()
        uploads[:, uploads.shape[1] // 10 :] = 0
        return PreparedUploads(uploads, weights, context)


@pytest.mark.slow
def test_a_round_reports_its_bytes(tmp_path):
    client = FedAvg(mlp(), optimizer=sgd())
    federation = pl_fed.Federation(All(), pre_aggregators=[Tenth()])
    trainer = pl_fed.Trainer(
        federation, max_epochs=1, logger=False, run_dir=tmp_path, accelerator="cpu"
    )
    trainer.fit(client, shared_out(classes([8, 8, 8])))
    row = client.row("global").data
    bytes_of = {name: float(trainer.callback_metrics[f"train/{name}_bytes"])
                for name in ("upload", "download")}  # fmt: skip
    assert bytes_of["upload"] == 3 * (len(row) // 10) * row.element_size()
    assert bytes_of["download"] == 3 * len(row) * row.element_size()


def test_a_later_fit_in_64_bits_sends_twice_the_bytes():
    client, data = FedAvg(mlp(), optimizer=sgd()), shared_out(classes([8, 8, 8]))
    federation, sent = pl_fed.Federation(All()), []
    with trials_skipped():
        for dtype in (torch.float32, torch.float64):
            federation.setup(client.to(dtype), data, "fit")
            optimizer = client.train().configure_optimizers()
            sent.append(federation.run_round(0, optimizer)["train/upload_bytes"])
    assert sent[1] == 2 * sent[0]


def test_proposals_are_sent_in_full():
    client = Scaffold(mlp(), optimizer=sgd())
    traffic = Traffic(client, Chain([Tenth()], Mean()), None)
    row = client.row("global").data
    assert traffic.client_bytes[0] == (len(row) // 10 + len(row)) * row.element_size()


def test_server_of_feddyn_reads_exact_changes_beside_a_compressed_upload():
    client = FedDyn(mlp(), optimizer=sgd())
    row = client.row("global").data
    channel = SimpleNamespace(layout=client.sent_layout, count_bytes=lambda size: 9)
    traffic = Traffic(client, Mean(), channel)
    assert traffic.client_bytes[0] == 9 + len(row) * row.element_size()
    assert Traffic(client, Mean(), None).client_bytes[0] == len(row) * row.element_size()


def test_local_training_sends_nothing():
    assert make("Local").upload_numbers == make("Local").download_numbers == 0
