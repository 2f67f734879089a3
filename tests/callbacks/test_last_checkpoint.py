"""What is saved, and when, beside a callback that averages models."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed.callbacks import LastCheckpoint
from pl_fed.clients import Ditto
from pl_fed.samplers import All


class Stops(Callback):
    """Breaks off in the third round's validation."""

    def on_validation_batch_end(self, trainer, *args):
        if trainer.current_epoch == 2 and not trainer.sanity_checking:
            raise RuntimeError("stopped")


def quiet_trainer(folder, rounds, **kwargs):
    return pl_fed.Trainer(
        pl_fed.Federation(All(), engine=pl_fed.EngineOptions("one_by_one"), seed=0),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def started():
    client = seeded(lambda: Ditto(mlp(), optimizer=sgd(0.2)))
    return client, shared_out(classes([9, 7, 5]), val_fraction=0.3)


def run(folder, average, rounds, *others, **kwargs):
    callbacks = [average(), LastCheckpoint(share=1e-9), *others]
    client, data = started()
    quiet_trainer(folder, rounds, callbacks=callbacks).fit(client, data, **kwargs)
    return client.row("global").data.clone()


AVERAGES = {"EMA": lambda: EMAWeightAveraging(decay=0.5), "mean": WeightAveraging}


@pytest.mark.slow
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("stopped", ["after a round", "in a validation"])
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint")
def test_a_run_that_averages_goes_on_as_if_it_had_not_stopped(tmp_path, average, stopped):
    whole = run(tmp_path / "whole", average, 5)
    if stopped == "after a round":
        run(tmp_path / "parts", average, 3)
    else:
        with pytest.raises(RuntimeError, match="stopped"):
            run(tmp_path / "parts", average, 5, Stops())
    assert torch.equal(run(tmp_path / "parts", average, 5, ckpt_path="last"), whole)


@pytest.mark.slow
def test_the_last_checkpoint_is_of_the_last_round_also_beside_the_best(tmp_path):
    """Lightning's own is of the last round that was among the best: here the first."""
    best = ModelCheckpoint(monitor="round", mode="min", save_last=True, filename="best")
    trainer = quiet_trainer(tmp_path, 4, callbacks=best)
    trainer.fit(*started())
    files = {path.stem: torch.load(path) for path in (tmp_path / "checkpoints").iterdir()}
    assert {name: each["global_step"] for name, each in files.items()} == {"best": 1, "last": 4}
    client, data = started()
    quiet_trainer(tmp_path, 6, callbacks=best).fit(client, data, ckpt_path="last")
    whole, data = started()
    quiet_trainer(tmp_path / "whole", 6).fit(whole, data)
    assert torch.equal(client.row("global").data, whole.row("global").data)


def test_a_run_is_not_written_over_by_another(tmp_path):
    trainer = quiet_trainer(tmp_path, 2)
    client, data = started()
    trainer.fit(client, data)
    before = (tmp_path / "metrics.csv").read_text()
    with pytest.raises(ValueError, match=r"`run_dir` to be a folder without a run but got .*go on"):
        quiet_trainer(tmp_path, 1).fit(*started())
    assert (tmp_path / "metrics.csv").read_text() == before
    trainer.fit_loop.max_epochs = 3
    trainer.fit(client, data)  # its own
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4
