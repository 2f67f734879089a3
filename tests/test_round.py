"""A round changes models and states completely, or not at all."""

import pytest
import torch
from further_cases import covering
from lightning.pytorch import Callback
from small_federations import classes, run_rounds, seeded, sgd, shared_out

import pl_fed
import pl_fed.state.row_table
from pl_fed.clients import Ditto, FedRep
from pl_fed.models import MLP
from pl_fed.samplers import All, Uniform


class FailingDitto(Ditto):
    """Fails in the last client of the second round."""

    ends = 0

    def end_round(self, client):
        self.ends += 1
        if self.ends == 2 * 4:
            raise RuntimeError("broken")
        return super().end_round(client)


def make_client_and_federation(kind):
    net = seeded(lambda: MLP(4, [3], 3))
    return kind(net, optimizer=sgd(0.1)), pl_fed.Federation(
        All(), engine=pl_fed.EngineOptions(chunk_size=1), seed=0
    )


def fit(folder, client, federation, rounds, callbacks=None):
    trainer = pl_fed.Trainer(
        federation,
        max_epochs=rounds,
        callbacks=callbacks,
        default_root_dir=folder,
        accelerator="cpu",
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(client, shared_out(classes([5, 6, 7, 8])))


@pytest.mark.slow
def test_failed_round_leaves_models_and_states_unchanged(tmp_path):
    client, federation = make_client_and_federation(FailingDitto)
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, client, federation, rounds=2)
    intact, other = make_client_and_federation(Ditto)
    fit(tmp_path, intact, other, rounds=1)
    all_clients = torch.arange(4)
    assert torch.equal(client.row("global").data, intact.row("global").data)
    expected = other.store.read("personal", all_clients)
    assert torch.equal(federation.store.read("personal", all_clients), expected)


class Counting(Uniform):
    """Counts its draws."""

    draws = 0

    def sample(self, num_clients, sizes, generator):
        self.draws += 1
        return super().sample(num_clients, sizes, generator)


@pytest.mark.slow
def test_cohort_is_drawn_once(tmp_path):
    """Hooks get a copy of the cohort. Their changes do not affect the round."""

    class ZeroedBatch(Ditto):
        def on_train_batch_start(self, batch, batch_idx):
            batch.zero_()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["train/cohort"] == 3

    sampler = Counting(3)
    client, federation = make_client_and_federation(ZeroedBatch)
    federation.sampler = sampler
    fit(tmp_path / "a", client, federation, rounds=4)
    assert sampler.draws <= 5, "one draw is for the round after the last"
    unchanged, other = make_client_and_federation(Ditto)
    other.sampler = Uniform(3)
    fit(tmp_path / "b", unchanged, other, rounds=4)
    assert torch.equal(client.row("global").data, unchanged.row("global").data)


@pytest.mark.slow
def test_other_data_have_other_cohorts():
    client, federation = make_client_and_federation(Ditto)
    federation.setup(client, shared_out(classes([5, 6, 7, 8])), "fit")
    assert len(federation.draw_cohort(0)) == 4
    federation.setup(client, shared_out(classes([5, 6])), "fit")
    assert len(federation.draw_cohort(0)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("rows_in_memory", "chunk_size"), covering([0, 2, 4], [1, 2, 5]))
def test_placement_of_states_changes_no_result(monkeypatch, chunk_size, rows_in_memory):
    """Rows are in memory, on disk, or in both. Rows on disk are prefetched."""
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 1)
    net = seeded(lambda: MLP(4, [3], 3))
    size = sum(parameter.numel() for parameter in net.parameters()) * 8
    client, data = Ditto(net, optimizer=sgd(0.1)), shared_out(classes([5, 6, 7, 8, 9]))
    settings = {"sampler": Uniform(3), "rounds": 4, "chunk_size": chunk_size}
    result = run_rounds(client, data, memory=rows_in_memory * size, **settings)
    assert result.distance(run_rounds(client, data, **settings)) == 0


@pytest.mark.slow
def test_next_chunk_is_prefetched_during_training(monkeypatch):
    """The chunks of the cohort are prefetched, and then the first chunk of the next round."""
    prefetched = []
    monkeypatch.setattr(
        pl_fed.state.ClientStore, "prefetch", lambda _, clients: prefetched.append(clients.tolist())
    )
    client = Ditto(seeded(lambda: MLP(4, [], 3)), optimizer=sgd(0.1))
    data = shared_out(classes([5] * 9))
    run_rounds(client, data, sampler=Uniform(3), rounds=3, chunk_size=2, memory=0)
    federation = pl_fed.Federation(Uniform(3), seed=0)
    federation.setup(client, data, "fit")
    cohorts = [federation.draw_cohort(round).tolist() for round in range(4)]
    first, second, third, next_cohort = cohorts
    assert (
        prefetched
        == [
            first[2:],  # nothing is on disk before the first round ends
            *(second[2:], third[:2]),
            *(third[2:], next_cohort[:2]),
        ]
    )


class OfTwoRounds(Uniform):
    """A sampler that has cohorts for two rounds."""

    def draw_round(self, round, num_clients, sizes, generator):
        assert round < 2
        return super().draw_round(round, num_clients, sizes, generator)


def test_last_round_reads_no_samples_of_a_round_after_the_run(tmp_path):
    federation = pl_fed.Federation(
        OfTwoRounds(2), storage=pl_fed.StorageOptions(memory=0, folder=tmp_path / "rows"), seed=0
    )
    client = Ditto(seeded(lambda: MLP(4, [], 3)), optimizer=sgd(0.1))
    fit(tmp_path, client, federation, rounds=2)
    assert federation.session.states.participation.sum() == 2 * 2


@pytest.mark.parametrize("starts_frozen", [False, True])
def test_parameters_that_a_callback_freezes_or_unfreezes_are_refused(tmp_path, starts_frozen):
    """One by one, clients would train another part of the global model than in a stack."""

    class Toggle(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trains = (trainer.current_epoch == 0) != starts_frozen
            pl_module.global_model.layers[1].requires_grad_(trains)

    net = seeded(lambda: MLP(4, [3], 3))
    net.layers[1].requires_grad_(not starts_frozen)
    federation = pl_fed.Federation(All(), seed=0)
    words = r"`requires_grad` of .* `layers.1.weight`, `layers.1.bias` before round 1: set it in"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, Ditto(net, optimizer=sgd(0.1)), federation, rounds=2, callbacks=Toggle())


@pytest.mark.parametrize("kind", [Ditto, FedRep])
def test_parameters_that_are_frozen_after_the_copies_were_made_are_refused(kind):
    net = seeded(lambda: MLP(4, [3], 3))
    client = kind(net, optimizer=sgd(0.1))
    net.layers[1].requires_grad_(False)
    words = r"`layers.1.bias`, `layers.1.weight` of the global model than of `\w+`: freeze parts"
    with pytest.raises(ValueError, match=words):
        run_rounds(client, shared_out(classes([5, 6, 7, 8])))
