"""A round happens as a whole, or not at all."""

import pytest
import torch
from small_federations import classes, seeded, sgd, shared_out

import pl_fed
from pl_fed.clients import Ditto
from pl_fed.models import MLP
from pl_fed.samplers import All, Uniform


class Breaks(Ditto):
    """Fails in the last client of the second round."""

    ends = 0

    def end_round(self, rows):
        self.ends += 1
        if self.ends == 2 * 4:
            raise RuntimeError("broken")
        return super().end_round(rows)


def made(kind):
    net = seeded(lambda: MLP(4, [3], 3))
    return kind(net, optimizer=sgd(0.1)), pl_fed.Federation(All(), chunk_size=1, seed=0)


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
