"""A round happens as a whole, or not at all."""

import pytest
import torch
from small_federations import classes, run_rounds, seeded, sgd, shared_out

import pl_fed
import pl_fed.state.row_table
from pl_fed.clients import Ditto
from pl_fed.models import MLP
from pl_fed.samplers import All, Uniform


class Breaks(Ditto):
    """Fails in the last client of the second round."""

    ends = 0

    def end_round(self, client):
        self.ends += 1
        if self.ends == 2 * 4:
            raise RuntimeError("broken")
        return super().end_round(client)


def made(kind):
    net = seeded(lambda: MLP(4, [3], 3))
    return kind(net, optimizer=sgd(0.1)), pl_fed.Federation(
        All(), engine=pl_fed.EngineOptions(chunk_size=1), seed=0
    )


def fit(folder, client, federation, rounds):
    trainer = pl_fed.Trainer(
        federation,
        max_epochs=rounds,
        default_root_dir=folder,
        accelerator="cpu",
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(client, shared_out(classes([5, 6, 7, 8])))


def test_an_error_in_the_middle_leaves_models_and_states_as_before_the_round(tmp_path):
    client, federation = made(Breaks)
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, client, federation, rounds=2)
    whole, other = made(Ditto)
    fit(tmp_path, whole, other, rounds=1)
    everyone = torch.arange(4)
    assert torch.equal(client.row("global").data, whole.row("global").data)
    expected = other.store.read("personal", everyone)
    assert torch.equal(federation.store.read("personal", everyone), expected)


class Counting(Uniform):
    """Counts how often it draws."""

    draws = 0

    def sample(self, num_clients, sizes, generator):
        self.draws += 1
        return super().sample(num_clients, sizes, generator)


def test_a_cohort_is_drawn_once(tmp_path):
    """The loop shows it to the hooks, which may do with it as they like, and the round takes it."""

    class Scribbles(Ditto):
        def on_train_batch_start(self, batch, batch_idx):
            batch.zero_()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["train/cohort"] == 3

    sampler = Counting(3)
    client, federation = made(Scribbles)
    federation.sampler = sampler
    fit(tmp_path / "a", client, federation, rounds=4)
    assert sampler.draws <= 5, "one of them for the round after the last"
    whole, other = made(Ditto)
    other.sampler = Uniform(3)
    fit(tmp_path / "b", whole, other, rounds=4)
    assert torch.equal(client.row("global").data, whole.row("global").data)


def test_other_data_have_other_cohorts():
    client, federation = made(Ditto)
    federation.setup(client, shared_out(classes([5, 6, 7, 8])), "fit")
    assert len(federation.draw_cohort(0)) == 4
    federation.setup(client, shared_out(classes([5, 6])), "fit")
    assert len(federation.draw_cohort(0)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2, 5])
@pytest.mark.parametrize("rows_in_memory", [0, 2, 4])
def test_where_states_are_changes_no_bit(monkeypatch, chunk_size, rows_in_memory):
    """Rows in memory, on disk, or some here and some there; the disk's are fetched ahead."""
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 1)
    net = seeded(lambda: MLP(4, [3], 3))
    size = sum(parameter.numel() for parameter in net.parameters()) * 8
    client, data = Ditto(net, optimizer=sgd(0.1)), shared_out(classes([5, 6, 7, 8, 9]))
    settings = {"sampler": Uniform(3), "rounds": 4, "chunk_size": chunk_size}
    found = run_rounds(client, data, memory=rows_in_memory * size, **settings)
    assert found.distance(run_rounds(client, data, **settings)) == 0


def test_what_comes_next_is_fetched_while_clients_are_trained(monkeypatch):
    """Chunk after chunk of the cohort, and then the first of the next round's."""
    asked = []
    monkeypatch.setattr(
        pl_fed.state.ClientStore, "prefetch", lambda _, clients: asked.append(clients.tolist())
    )
    client = Ditto(seeded(lambda: MLP(4, [], 3)), optimizer=sgd(0.1))
    data = shared_out(classes([5] * 9))
    run_rounds(client, data, sampler=Uniform(3), rounds=3, chunk_size=2, memory=0)
    federation = pl_fed.Federation(Uniform(3), seed=0)
    federation.setup(client, data, "fit")
    cohorts = [federation.draw_cohort(round).tolist() for round in range(4)]
    coming = [cohort[:2] for cohort in cohorts[1:]]
    coming[0] = []  # nothing is on disk before the first round ends
    for cohort, following in zip(cohorts, coming):
        assert asked[:2] == [cohort[2:], following]
        del asked[:2]
