"""Participation: rounds per client, and the warning about clients without a round."""

import csv
import statistics
import warnings

import pytest
import torch
import worlds
from small_federations import Cohorts, Given, Only, classes, mlp, sections, seeded, sgd, shared_out
from tables import table_test
from worlds import DivergentDitto

import pl_fed
from pl_fed.attacks import RandomLabels
from pl_fed.clients import IFCA, Ditto, FedAvg, Finetuning, HierFedAvg, Mocha
from pl_fed.data import FederatedData

SIZES = [9, 30, 12, 60, 15, 21]
COHORTS = [[0, 1], [1, 3], [3, 1], [1, 0]]
ROUNDS = [2, 4, 0, 2, 0, 0]


def run_fit(folder, kind=Ditto, rounds=4, first=0, ckpt_path=None, cohorts=COHORTS, **federation):
    client = kind(seeded(mlp), optimizer=sgd(0.1))
    sampler = Cohorts(*map(list, cohorts[first:]))
    federation = pl_fed.Federation(sampler, seed=0, **sections(engine="one_by_one", **federation))
    trainer = pl_fed.Trainer(
        federation,
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = FederatedData(Given(classes(SIZES)), batch_size=5, seed=0)
    trainer.fit(client, data, ckpt_path=ckpt_path)
    return trainer, client, data


def run_fit_and_test(*args, **kwargs):
    """Train and test; return the federation and the warnings about models never trained."""
    trainer, client, data = run_fit(*args, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.test(client, data, verbose=False)
        trainer.test(client, data, verbose=False)
    messages = [
        str(warning.message) for warning in caught if "never took part" in str(warning.message)
    ]
    return trainer.federation, messages


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def benign_rows(path):
    return [row for row in read_rows(path) if row["byzantine"] == "0"]


def column(path):
    return [int(row["rounds"]) for row in read_rows(path)]


@pytest.mark.slow
def test_rounds_are_counted_and_written(tmp_path):
    federation, messages = run_fit_and_test(tmp_path)
    assert federation.participation.tolist() == ROUNDS
    assert column(tmp_path / "per_client.csv") == ROUNDS
    assert column(tmp_path / "per_client_validation.csv") == ROUNDS
    assert federation.clients_without_training().tolist() == [2, 4, 5]
    assert len(messages) == 1, "once"
    assert messages[0].startswith(
        "3 of 6 benign clients never took part: their personal models were never trained."
    )


@pytest.mark.slow
def test_metrics_are_also_over_the_clients_that_took_part(tmp_path):
    """The table of clients gives the same numbers, for every model."""
    run_fit_and_test(tmp_path, attack=RandomLabels(), ids=[0, 2])
    rows = benign_rows(tmp_path / "per_client.csv")
    trained = [row for row in rows if row["rounds"] != "0"]
    assert (len(trained), len(rows)) == (2, 4)
    (logged,) = [row for row in read_rows(tmp_path / "metrics.csv") if row["test/global/loss"]]
    assert float(logged["test/untrained_clients"]) == 2
    for model in ("global", "personal", "hybrid"):
        for name in ("accuracy", "loss"):
            values = [float(row[f"{model}_{name}"]) for row in trained]
            worst = min(values) if name == "accuracy" else max(values)
            expected = (statistics.fmean(values), statistics.pstdev(values), worst)
            for ending, value in zip(("", "_std", "_worst10"), expected):
                actual = float(logged[f"test/{model}/{name}_trained{ending}"])
                assert actual == pytest.approx(value, abs=1e-6), (model, name, ending)


@pytest.mark.slow
def test_validations_count_the_clients_that_never_took_part(tmp_path):
    trainer, *_ = run_fit(tmp_path, cohorts=[[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]])
    assert not [name for name in trainer.callback_metrics if "trained" in name], "outdated"
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["val/untrained_clients"] for row in rows] == ["3", "", "", ""]
    assert [bool(row["val/personal/accuracy_trained"]) for row in rows] == [True] + [False] * 3


@pytest.mark.slow
def test_global_model_replaces_untrained_models_by_option(tmp_path):
    """Only the clients that never took part are affected; the rounds are the same."""
    plain, _ = run_fit_and_test(tmp_path / "own")
    federation, messages = run_fit_and_test(tmp_path / "global", untrained_models="global")
    assert torch.equal(
        plain.store.read("personal", torch.arange(6)),
        federation.store.read("personal", torch.arange(6)),
    )
    assert messages[0].startswith(
        "3 of 6 benign clients never took part: the global model replaces their personal models."
    )
    before, after = (read_rows(tmp_path / n / "per_client.csv") for n in ("own", "global"))
    for old, new in zip(before, after):
        replaced = old["rounds"] == "0"
        model = "global" if replaced else "personal"
        assert new["personal_loss"] == old[f"{model}_loss"]
        assert (new["personal_loss"] != old["personal_loss"]) == replaced
    models = federation.models_of(torch.tensor([1, 2]))
    expected = (plain.model_of(1), plain.model_of(2, "global"))
    for model, other in zip(models, expected):
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@table_test("kind", [HierFedAvg, IFCA])
@pytest.mark.slow
def test_a_center_is_no_untrained_model_of_a_client_that_never_took_part(kind):
    client, sampler = kind(seeded(mlp), optimizer=sgd(0.1)), Only(0, 1, 2)
    federation = pl_fed.Federation(
        sampler, untrained_models="global", **sections(engine="one_by_one"), seed=0
    )
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    federation.run_round(0, client.configure_optimizers())
    assert federation.participation.tolist() == [1, 1, 1, 0, 0, 0]
    assert len(federation.clients_without_training()) == 0
    models = federation.models_of(torch.arange(6))
    rows = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    centers = federation.server_states["centers"].view(2, -1)
    assert all(any(torch.equal(row, center) for center in centers) for row in rows)


def test_unknown_replacement_of_untrained_models_is_refused():
    with pytest.raises(ValueError, match="`untrained_models` to be 'global' or None but got 'x'"):
        pl_fed.Federation(untrained_models="x")


@pytest.mark.slow
def test_resumed_run_continues_the_counts(tmp_path):
    run_fit(tmp_path, rounds=2)
    trainer, *_ = run_fit(tmp_path, first=2, ckpt_path="last")
    assert trainer.federation.participation.tolist() == ROUNDS
    assert trainer.federation.participation.dtype == torch.int32


@pytest.mark.slow
def test_checkpoint_without_participation_is_accepted_without_a_warning(tmp_path):
    run_fit(tmp_path, rounds=2)
    file = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    del checkpoint["federation"]["participation"]
    torch.save(checkpoint, file)
    federation, messages = run_fit_and_test(tmp_path, first=2, ckpt_path="last")
    assert federation.participation is None
    assert not messages
    assert "rounds" not in (tmp_path / "per_client.csv").read_text().splitlines()[0]


def test_a_checkpoint_of_another_number_of_clients_is_refused(tmp_path):
    trainer, *_ = run_fit(tmp_path, rounds=1)
    state = {**trainer.federation.state_dict(), "participation": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"participation of 6 clients but got .* \[2\]"):
        trainer.federation.load_state_dict(state)


@pytest.mark.slow
def test_rejected_local_work_does_not_count(tmp_path, monkeypatch):
    """Client 5's loss is NaN, so that its state stays as it was."""
    monkeypatch.setattr(worlds, "SIZES", SIZES)  # DivergentDitto finds the client by its samples
    federation, messages = run_fit_and_test(tmp_path, DivergentDitto, cohorts=[range(6)] * 4)
    assert federation.participation.tolist() == [4] * 5 + [0]
    assert messages[0].startswith("1 of 6 benign clients never took part")


@pytest.mark.slow
def test_byzantine_clients_are_counted_but_not_reported(tmp_path):
    federation, messages = run_fit_and_test(tmp_path, attack=RandomLabels(), ids=[0, 2])
    assert federation.participation.tolist() == ROUNDS
    assert messages[0].startswith("2 of 4 benign clients never took part")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "personal"), [(FedAvg, 0), (Finetuning, 0), (Mocha, 3)])
def test_only_stored_personal_models_are_reported_as_never_trained(tmp_path, kind, personal):
    """Finetuning trains each client's model anew before an evaluation."""
    federation, messages = run_fit_and_test(tmp_path, kind)
    assert federation.participation.tolist() == ROUNDS
    assert len(federation.clients_without_training()) == personal
    assert bool(messages) == bool(personal)


@pytest.mark.slow
def test_run_continues_the_counts_after_a_test_of_its_checkpoint(tmp_path):
    """A test runs under `torch.inference_mode`; rounds count in place."""
    trainer, client, data = run_fit(tmp_path, rounds=2)
    trainer.test(client, data, ckpt_path=tmp_path / "checkpoints" / "last.ckpt", verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(client, data)
    assert trainer.federation.participation.sum() == 8
