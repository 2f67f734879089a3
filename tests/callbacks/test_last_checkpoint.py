"""What is saved, and when, beside a callback that averages models."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
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


def run(folder, average, rounds, *others, **kwargs):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), engine="one_by_one", seed=0),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[average(), LastCheckpoint(share=1e-9), *others],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    client = seeded(lambda: Ditto(mlp(), optimizer=sgd(0.2)))
    trainer.fit(client, shared_out(classes([9, 7, 5]), val_fraction=0.3), **kwargs)
    return client.row("global").data.clone()


AVERAGES = {"EMA": lambda: EMAWeightAveraging(decay=0.5), "mean": WeightAveraging}


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
