"""The config of a run from Python. Reports label and group runs by it."""

import warnings
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from small_federations import Given, classes, mlp, seeded

import pl_fed
import pl_fed.callbacks.python_config
from pl_fed.clients import FLAME, Ditto, FedAvg
from pl_fed.command.main import main
from pl_fed.data import FederatedData
from pl_fed.reports.group import group_runs
from pl_fed.reports.run import find_runs
from pl_fed.samplers import All

FILE = "python_config.yaml"
WARNING = (
    "The run resumes with other arguments from round 1 on (model.lam 1 → 0.5, trainer.max_epochs"
    " 1 → 2). The previous ones are in config_to_round_1.yaml. Options of optimizers and schedules,"
    " such as learning rates, stay those of the checkpoint."
)


def run(
    folder,
    kind=Ditto,
    seed=0,
    rounds=1,
    ckpt_path=None,
    fast_dev_run=False,
    callbacks=(),
    **options,
):
    client = kind(seeded(mlp), optimizer=partial(torch.optim.SGD, lr=0.1), **options)
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), engine=pl_fed.EngineOptions("one_by_one"), seed=seed),
        run_dir=folder,
        max_epochs=rounds,
        fast_dev_run=fast_dev_run,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FederatedData(Given(classes([20, 30, 25])), batch_size=5, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(client, data, ckpt_path=ckpt_path)
        trainer.test(client, data, verbose=False)
    return folder


@pytest.mark.slow
def test_reports_label_algorithms_and_group_seeds(tmp_path):
    kinds = {"a": Ditto, "b": FLAME, "c": FedAvg}
    for name, kind in kinds.items():
        run(tmp_path / name, kind)
    run(tmp_path / "d", Ditto, seed=1)
    run(tmp_path / "e", Ditto, lam=0.5)
    groups = group_runs(find_runs([tmp_path])[0])
    assert [group.label for group in groups] == [
        "Ditto, lam=1",
        "FLAME",
        "FedAvg",
        "Ditto, lam=0.5",
    ]
    assert groups[0].seeds == "2 seeds"
    assert groups[0].runs[0].planned_rounds == 1


@pytest.mark.slow
def test_config_describes_all_sections(tmp_path):
    run(tmp_path, lam=0.5)
    config = yaml.safe_load((tmp_path / FILE).read_text(encoding="utf-8"))
    assert config["model"]["class_path"] == "pl_fed.clients.Ditto"
    assert config["model"]["init_args"]["lam"] == 0.5
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.1
    assert config["data"]["batch_size"] == 5
    assert config["federation"]["sampler"] == {"class_path": "pl_fed.samplers.All"}
    assert config["trainer"]["max_epochs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_resumed_run_with_other_arguments_keeps_the_earlier_config(tmp_path, lam, monkeypatch):
    before = (run(tmp_path) / FILE).read_text(encoding="utf-8")
    warn = Mock()
    monkeypatch.setattr(pl_fed.callbacks.python_config, "rank_zero_warn", warn)
    run(tmp_path, rounds=2, lam=lam, ckpt_path="last")
    said = [str(call.args[0]) for call in warn.call_args_list]
    assert said == [WARNING] * (lam != 1.0)
    earlier_config = tmp_path / "config_to_round_1.yaml"
    config = yaml.safe_load((tmp_path / FILE).read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["lam"] == lam
    assert earlier_config.exists() == (lam != 1.0)
    assert not earlier_config.exists() or earlier_config.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("content", ["model: {class_path: [", "", "\0", "- model"])
@pytest.mark.slow
def test_run_with_a_damaged_config_resumes_without_a_comparison(tmp_path, content, monkeypatch):
    run(tmp_path)
    (tmp_path / FILE).write_text(content, encoding="utf-8")
    warn = Mock()
    monkeypatch.setattr(pl_fed.callbacks.python_config, "rank_zero_warn", warn)
    run(tmp_path, rounds=2, lam=0.5, ckpt_path="last")
    warn.assert_not_called()
    config = yaml.safe_load((tmp_path / FILE).read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["lam"] == 0.5


class Stop(Callback):
    """Stop: fails before a round, or before its validation."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            raise InterruptedError

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            raise InterruptedError


@pytest.mark.slow
def test_config_of_a_round_that_is_not_yet_validated_is_kept(tmp_path):
    """Also after an attempt with further arguments that saves no round."""
    with pytest.raises(InterruptedError):
        run(tmp_path, callbacks=[Stop()])
    before = (tmp_path / FILE).read_text(encoding="utf-8")
    for lam in (0.5, 0.2):
        with pytest.raises(InterruptedError):
            run(tmp_path, rounds=2, lam=lam, ckpt_path="last", callbacks=[Stop()])
        assert (tmp_path / "config_to_round_1.yaml").read_text(encoding="utf-8") == before
    run(tmp_path, rounds=2, ckpt_path="last")
    assert not (tmp_path / "config_to_round_1.yaml").exists()


def test_fast_dev_run_writes_no_config(tmp_path):
    assert not (run(tmp_path, fast_dev_run=True) / FILE).exists()


def drop(config, path):
    *parents, name = path.split(".")
    for parent in parents:
        config = config[parent]
    del config[name]


NEW_ARGUMENTS = [
    "model.init_args.lam",
    "model.init_args.optimizer.init_args.nesterov",
    "data.batch_size",
    "data.val_fraction",
    "federation.aggregator",
    "federation.storage",
    "federation.adversary.fraction",
]


@pytest.mark.slow
@pytest.mark.parametrize("changed", [None, "data.batch_size"])
def test_arguments_that_an_earlier_version_did_not_have_are_no_change(tmp_path, changed):
    path = run(tmp_path) / FILE
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name in NEW_ARGUMENTS:
        if name != "data.batch_size" or changed:  # 5 is not its default
            drop(config, name)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    run(tmp_path, rounds=2, ckpt_path="last")
    assert (tmp_path / "config_to_round_1.yaml").exists() == (changed is not None)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["federation"]["storage"]


@pytest.mark.slow
def test_command_line_run_has_only_its_own_config(tmp_path):
    options = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    net = ["--model=FedAvg", "--model.net=pl_fed.models.LogisticRegression"]
    net += ["--model.net.in_features=64", "--model.net.num_classes=10"]
    data = ["--data.dataset=Digits", "--data.partitioner=IID", "--data.num_clients=10"]
    root = f"--trainer.default_root_dir={tmp_path}"
    engine = "--federation.engine.name=one_by_one"
    main(["fit", *net, *data, *options, root, engine, "--trainer.accelerator=cpu"])
    (folder,) = tmp_path.iterdir()
    assert (folder / "config.yaml").is_file()
    assert not (folder / FILE).exists()


class Saved(LightningModule):
    """A module that saves its hyperparameters."""

    def __init__(self, width=3, rate=0.25):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0].float()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


@pytest.mark.slow
def test_loggers_get_the_hyperparameters_of_a_module(tmp_path):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), engine=pl_fed.EngineOptions("one_by_one")),
        run_dir=tmp_path / "run",
        logger=CSVLogger(tmp_path / "logs"),
        max_epochs=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(FedAvg(seeded(Saved)), FederatedData(Given(classes([8, 8])), batch_size=4))
    (file,) = (tmp_path / "logs").rglob("hparams.yaml")
    logged = yaml.safe_load(file.read_text())
    assert {"width": 3, "rate": 0.25}.items() <= logged.items()
