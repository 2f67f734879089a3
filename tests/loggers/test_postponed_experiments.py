"""Experiments of loggers begin at their first use."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from small_federations import Only, classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed.aggregators import CenteredClipping
from pl_fed.clients import Ditto
from pl_fed.loggers.postponed_experiments import forget_postponed, postpone_experiments
from pl_fed.run_folder import last_checkpoint


class Beginning(Logger):
    """Counts how often its experiment begins."""

    name = version = "beginning"

    def __init__(self):
        super().__init__()
        self._experiment, self.begun = None, 0

    @property
    def experiment(self):
        if self._experiment is None:
            self._experiment, self.begun = ["an experiment"], self.begun + 1
        return self._experiment

    def log_metrics(self, metrics, step=None):
        self.experiment.append(metrics)

    def log_hyperparams(self, *_, **__):
        pass

    def finalize(self, status):
        if self._experiment is not None:
            self.experiment.append(status)


def test_experiment_begins_at_its_first_use():
    logger = Beginning()
    postpone_experiments([logger, CSVLogger("nowhere")])
    assert not logger.experiment
    assert logger.begun == 0
    assert logger.experiment.index("an experiment") == 0
    assert (logger.begun, logger.experiment) == (1, ["an experiment"])
    postpone_experiments([logger])
    assert logger.begun == 1, "it has begun"
    forget_postponed([logger])
    assert logger.experiment == ["an experiment"]


def fit(folder, logger=None, ckpt_path=None, **settings):
    client = Ditto(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Only(0, 1, 2), seed=0, **settings.pop("federation", {})),
        run_dir=folder, logger=logger, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, **{"max_epochs": 2, **settings},
    )  # fmt: skip
    trainer.fit(client, shared_out(classes([5] * 4)), ckpt_path=ckpt_path)


def read_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def spoil(folder, find):
    """Write NaN into a tensor of the last checkpoint."""
    path = last_checkpoint(folder)
    checkpoint = torch.load(path, weights_only=True)
    find(checkpoint).view(-1)[1] = torch.nan
    torch.save(checkpoint, path)


def find_global(checkpoint):
    return next(t for name, t in checkpoint["state_dict"].items() if name.endswith("weight"))


def find_personal(checkpoint):
    return checkpoint["federation"]["store"]["personal"]["rows"][0]


REFUSED = {
    "fewer epochs": ({"max_epochs": 1}, None, "`trainer.max_epochs` to be at least 2, the number"),
    "fewer steps": (
        {"max_epochs": 5, "max_steps": 1}, None, "`trainer.max_steps` to be at least 2",
    ),
    "another aggregator": (
        {"federation": {"aggregator": CenteredClipping()}}, None, "with the aggregator Centered",
    ),
    "NaN in the global model": (
        {"max_epochs": 3}, find_global, "finite models but got NaN or infinity in `global_model",
    ),
    "NaN in a personal model": (
        {"max_epochs": 3}, find_personal, "finite models but got NaN or infinity in `personal`",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "find", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused_resume_changes_no_file_and_begins_no_experiment(
    tmp_path, settings, find, sentence
):
    fit(tmp_path)
    if find is not None:
        spoil(tmp_path, find)
    before, logger = read_files(tmp_path), Beginning()
    with pytest.raises(ValueError, match=sentence):
        fit(tmp_path, logger, "last", **settings)
    assert read_files(tmp_path) == before
    assert logger.begun == 0
    if find is None:
        fit(tmp_path, logger, "last", max_epochs=3)
        assert logger.begun == 1


@pytest.mark.slow
def test_run_without_a_limit_of_broken_clients_goes_on_with_a_destroyed_model(tmp_path):
    federation = {"max_rejected": 1.0}
    fit(tmp_path, federation=federation)
    spoil(tmp_path, find_global)
    with pytest.warns(UserWarning, match="pl_fed left out the uploads"):
        fit(tmp_path, None, "last", federation=federation, max_epochs=3)
