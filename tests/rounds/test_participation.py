"""In how many rounds each client took part, and what is said of those that never did."""

import csv
import warnings

import pytest
import torch
from small_federations import Cohorts, Given, classes, mlp, sections, seeded, sgd
from worlds import DivergentDitto

import pl_fed
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto, FedAvg, Finetuning, Mocha
from pl_fed.data import FederatedData

SIZES = [9, 30, 12, 60, 15, 21]
COHORTS = [[0, 1], [1, 3], [3, 1], [1, 0]]
ROUNDS = [2, 4, 0, 2, 0, 0]


def trained(folder, kind=Ditto, rounds=4, first=0, ckpt_path=None, cohorts=COHORTS, **federation):
    client = kind(seeded(mlp), optimizer=sgd(0.1))
    drawn = Cohorts(*map(list, cohorts[first:]))
    federation = pl_fed.Federation(drawn, seed=0, **sections(engine="one_by_one", **federation))
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


def evaluated(*how, **kwargs):
    """Train and test; return the federation and the warnings about models never trained."""
    trainer, client, data = trained(*how, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.test(client, data, verbose=False)
        trainer.test(client, data, verbose=False)
    said = [str(each.message) for each in caught if "never took part" in str(each.message)]
    return trainer.federation, said


def column(path):
    with path.open(newline="") as file:
        return [int(row["rounds"]) for row in csv.DictReader(file)]


def test_rounds_are_counted_and_written(tmp_path):
    federation, said = evaluated(tmp_path)
    assert federation.participation.tolist() == ROUNDS
    assert column(tmp_path / "per_client.csv") == ROUNDS
    assert column(tmp_path / "per_client_validation.csv") == ROUNDS
    assert federation.clients_without_training().tolist() == [2, 4, 5]
    assert len(said) == 1, "once"
    assert said[0].startswith(
        "3 of 6 benign clients never took part: their personal models were never trained."
    )


def test_a_resumed_run_goes_on_counting(tmp_path):
    trained(tmp_path, rounds=2)
    trainer, *_ = trained(tmp_path, first=2, ckpt_path="last")
    assert trainer.federation.participation.tolist() == ROUNDS
    assert trainer.federation.participation.dtype == torch.int32


def test_a_checkpoint_that_does_not_tell_is_taken_and_nothing_is_claimed(tmp_path):
    trained(tmp_path, rounds=2)
    file = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    del checkpoint["federation"]["participation"]
    torch.save(checkpoint, file)
    federation, said = evaluated(tmp_path, first=2, ckpt_path="last")
    assert federation.participation is None
    assert not said
    assert "rounds" not in (tmp_path / "per_client.csv").read_text().splitlines()[0]


def test_a_checkpoint_of_another_number_of_clients_is_refused(tmp_path):
    trainer, *_ = trained(tmp_path, rounds=1)
    state = {**trainer.federation.state_dict(), "participation": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"participation of 6 clients but got .* \[2\]"):
        trainer.federation.load_state_dict(state)


def test_work_that_was_left_out_does_not_count(tmp_path):
    """Client 5's loss is NaN, so that its state stays as it was."""
    federation, said = evaluated(tmp_path, DivergentDitto, cohorts=[range(6)] * 4)
    assert federation.participation.tolist() == [4] * 5 + [0]
    assert said[0].startswith("1 of 6 benign clients never took part")


def test_byzantine_clients_are_counted_but_not_said(tmp_path):
    federation, said = evaluated(tmp_path, attack=RandomLabels(), ids=[0, 2])
    assert federation.participation.tolist() == ROUNDS
    assert said[0].startswith("2 of 4 benign clients never took part")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "personal"), [(FedAvg, 0), (Finetuning, 0), (Mocha, 3)])
def test_only_models_that_clients_keep_are_never_trained(tmp_path, kind, personal):
    """Finetuning trains each client's model anew before an evaluation."""
    federation, said = evaluated(tmp_path, kind)
    assert federation.participation.tolist() == ROUNDS
    assert len(federation.clients_without_training()) == personal
    assert bool(said) == bool(personal)


def test_a_run_goes_on_counting_after_a_test_of_its_checkpoint(tmp_path):
    """A test runs under `torch.inference_mode`; rounds count in place."""
    trainer, client, data = trained(tmp_path, rounds=2)
    trainer.test(client, data, ckpt_path=tmp_path / "checkpoints" / "last.ckpt", verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(client, data)
    assert trainer.federation.participation.sum() == 8
