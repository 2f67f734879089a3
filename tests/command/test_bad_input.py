"""Mistakes of the user: one sentence with the expected and the actual value, no traceback."""

import math
import re
import runpy
import shutil
import sys
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from exhaustive import exhaustive_but, exhaustive_for
from further_cases import mark_further, mark_if, mark_others
from lightning.pytorch.loggers import CSVLogger
from tables import table_test

from pl_fed import Adversary, Federation, StorageOptions, Trainer
from pl_fed.aggregators import Clipping, Median
from pl_fed.clients import FedAvg
from pl_fed.command.faults import NEW_PATHS
from pl_fed.command.main import main
from pl_fed.command.messages import summarize
from pl_fed.data import Digits, FederatedData
from pl_fed.models import MLP
from pl_fed.partitioners import IID
from pl_fed.rounds.round import RoundRunner
from pl_fed.samplers import Uniform

CONFIG = {
    "seed_everything": 0,
    "model": {
        "class_path": "pl_fed.clients.Ditto",
        "init_args": {
            "lam": 0.1,
            "local_steps": 1,
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
            "net": {
                "class_path": "pl_fed.models.MLP",
                "init_args": {"in_features": 64, "hidden": [4], "num_classes": 10},
            },
        },
    },
    "data": {
        "dataset": {"class_path": "pl_fed.data.Digits"},
        "partitioner": {
            "class_path": "pl_fed.partitioners.Shards",
            "init_args": {"classes_per_client": 2},
        },
        "num_clients": 6,
    },
    "federation": {
        "sampler": {"class_path": "pl_fed.samplers.Uniform", "init_args": {"cohort_size": 3}}
    },
    "trainer": {
        "default_root_dir": "runs",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "callbacks": [
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"save_last": True, "save_on_train_epoch_end": True},
            }
        ],
    },
}


@pytest.fixture
def config_folder(tmp_path, monkeypatch):
    """A folder with the config in it, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def run(*arguments, subcommand="fit"):
    main([subcommand, "--config", "tiny.yaml", *arguments])


@pytest.fixture
def get_refusal(config_folder, monkeypatch, capsys):
    """Run a command that must be refused before training; return its error sentence."""

    def fail_on_training(*_, **__):
        raise AssertionError("training began")

    def refuse(*arguments, subcommand="fit"):
        with monkeypatch.context() as patch:
            patch.setattr(RoundRunner, "run", fail_on_training)
            with pytest.raises(SystemExit) as stopped:
                run(*arguments, subcommand=subcommand)
        assert stopped.value.code in (1, 2)
        assert runs(config_folder) == [], "no half-made run is left"
        return error_sentence(capsys.readouterr().err)

    return refuse


def runs(folder):
    return sorted((folder / "runs").iterdir()) if (folder / "runs").is_dir() else []


def error_sentence(err):
    """Return the line that the program prints; Lightning logs around it."""
    assert "Traceback" not in err
    assert "usage:" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    hints = [line for line in err.splitlines() if line.startswith("hint: ")]
    assert err.rstrip().endswith("\n".join([line, *hints])), "the user reads it last"
    return line.removeprefix("error: ")


MODEL, NET = "--model.init_args", "--model.init_args.net.init_args"
ADVERSARY = "--federation.adversary"
NOT_YET = f"{ADVERSARY}.start_round=1000"
FLIPPED = f"{ADVERSARY}.attack=pl_fed.attacks.FlippedLabels"

REFUSED = {
    # missing classes, options and files
    "net": (
        ["--model.init_args.net.class_path=pl_fed.models.MPL"],
        "`model.net` to be a class but pl_fed.models has no MPL (did you mean MLP?)",
    ),
    "algorithm": (
        ["--model.class_path=pl_fed.clients.Dito"],
        "`model` to be a class but pl_fed.clients has no Dito (did you mean Ditto?)",
    ),
    "short name": (
        ["--data.dataset=Digit"],
        "`data.dataset` to be the path of a class but got Digit (did you mean Digits?).",
    ),
    "module": (
        ["--federation.aggregator=mine.aggregators.Mine"],
        "`federation.aggregator` to be a class but there is no module mine.",
    ),
    "class of another kind": (
        ["--federation.sampler=pl_fed.models.MLP"],
        "`federation.sampler` to be a subclass of Sampler but got pl_fed.models.MLP",
    ),
    "abstract class": (
        ["--federation.sampler=pl_fed.samplers.Sampler"],
        "`federation.sampler` to name a class that can be made, by its `class_path`, but"
        " pl_fed.samplers.Sampler is abstract: it has no sample and no size_of_cohort.",
    ),
    "no class": (
        ["--data.skew.init_args.std=0.3"],
        "`data.skew` to name a subclass of Skew by its `class_path` but got {'init_args'",
    ),
    "callback": (
        ["--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStoping"],
        "`trainer.callbacks[1]` to be a class but lightning.pytorch.callbacks has no EarlyStoping"
        " (did you mean EarlyStopping?)",
    ),
    "option": (["--federation.cohort=3"], "only options that --help lists but got --federation.co"),
    "beginning of an option": (
        ["--data.augmen=off"],
        "only options that --help lists but got --data.augmen=off.",
    ),
    "option of the trainer": (["--trainer.rounds=3"], "but got --trainer.rounds=3"),
    "option of the algorithm": (
        [f"{MODEL}.lamb=3"],
        "`model` to hold only options of pl_fed.clients.Ditto but got `lamb` (did you mean lam?)",
    ),
    "option of the net": (
        [f"{NET}.width=3"],
        "`model.net` to hold only options of pl_fed.models.MLP but got `width`"
        " (there are: in_features, hidden, num_classes)",
    ),
    "option of the optimizer": (
        [f"{MODEL}.optimizer.init_args.lrr=3"],
        "`model.optimizer` to hold only options of torch.optim.SGD but got `lrr` (did",
    ),
    "longer option of the server's optimizer": (
        ["--federation.server_optimizer=SGD", "--federation.server_optimizer.momentumm.x+=0"],
        "`federation.server_optimizer` to hold only options of torch.optim.SGD but got"
        " `momentumm` (did you mean momentum?).",
    ),
    "section of the algorithm": (
        ["--model.optimizzer.lr+=0"],
        "`model` to hold only options of pl_fed.clients.Ditto but got `optimizzer` (did you mean",
    ),
    "config": (["--config=none.yaml"], "`config` to be a file but found none at "),
    "short name of an algorithm": (["--model=Dito"], "class but got Dito (did you mean Ditto?)."),
    "short name of an aggregator": (
        ["--federation.aggregator=Medain"],
        "class but got Medain (did you mean Median?).",
    ),
    "pre-aggregator as aggregator": (
        ["--federation.aggregator=Clipping"],
        "class but got Clipping: use it with --federation.pre_aggregators+=Clipping.",
    ),
    "config as algorithm": (["--model=FedAdam"], "got FedAdam: use it with --config fedadam."),
    "short name of an optimizer": (
        ["--federation.server_optimizer=Adamm"],
        "class but got Adamm (did you mean Adam?).",
    ),
    "short name of a callback": (
        ["--trainer.callbacks+=EarlyStoping"],
        "class but got EarlyStoping (did you mean EarlyStopping?).",
    ),
    "module of an optimizer": (
        [f"{MODEL}.optimizer=torch.optm.SGD"],
        "`model.optimizer` to be a class but torch has no optm (did you mean optim?).",
    ),
    "missing argument of a class that replaces another": (
        ["--model.net=torch.nn.Linear", "--model.net.in_features=64"],
        "argument `model.net.out_features` to be set but got none.",
    ),
    "missing argument beside a logger that is switched off": (
        [
            '--trainer.logger={"class_path": "lightning.pytorch.loggers.CSVLogger"}',
            *("--trainer.logger=false", "--model.net=torch.nn.Linear"),
        ],
        "argument `model.net.out_features` to be set but got none.",
    ),
    "file of a section": (
        ["--model=none.yaml"],
        "`model` to be a YAML file of its arguments but got none.yaml: No such file or directory",
    ),
    "class of a help page": (["--model.help=Dito"], "to be the path of a class but got Dito (did"),
    "print_config": (["--print_config=all"], "to be one of comments, skip_default or skip_unset"),
    "no algorithm": (["--model=null"], "Expected argument `model` to be set but got none."),
    # of a wrong type
    "a list for a class": (
        ["--federation.aggregator=[1]"],
        "`federation.aggregator` to name a subclass of Aggregator by its `class_path` but got [1].",
    ),
    "class for a section": (
        ['--federation.engine={"class_path": "torch.optim.SGD"}'],
        "`federation.engine` to be a mapping of arguments without a class_path but got the class",
    ),
    "no checkpoint": (
        ["--ckpt_path="],
        "`ckpt_path` to be a checkpoint, last or the folder of a run but got ''",
    ),
    "numbers as keys": (
        ["--trainer.limit_val_batches={0}"],
        "`trainer.limit_val_batches` to be of type int or float but got {0}.",
    ),
    "null within a class": (
        [f"{MODEL}.optimizer.foreach=null"],
        "`model.optimizer.foreach` to be set to null in a config file but got",
    ),
    "null for a section": (
        ["--federation=null"],
        "`federation` to be a mapping of arguments, or a YAML file that holds one, but got null: ",
    ),
    "null for a section within a section": (
        ["--federation.engine=null"],
        "`federation.engine` to be a mapping of arguments, or a YAML file that holds one, but got",
    ),
    "null for a number": (
        ["--data.val_fraction=null"],
        "`data.val_fraction` to be of type float but got null.",
    ),
    "null for a choice in a section": (
        ["--federation.engine.name=null"],
        "'stacked', 'one_by_one_compiled', 'stacked_compiled' but got null.",
    ),
    "no value": ([f"{MODEL}.lam="], "`model.lam` to be of type float but got ''."),
    "no argument": (["--model.lam"], "`model.lam` to be followed by a value but got none."),
    "numbers for a section": (
        ["--data=1,2"],
        "`data` to be a mapping of arguments, or a YAML file that holds one, but got 1,2.",
    ),
    "brackets": (
        [f"{ADVERSARY}.ids=" + 200 * "[" + 200 * "]"],
        "`federation.adversary.ids` to be short YAML but it is nested more than 100 levels deep",
    ),
    "no end of brackets": (
        [f"{ADVERSARY}.ids", 3000 * "["],
        f"`federation.adversary.ids` to be of type list but got {160 * '['}….",
    ),
    "NUL": (["--trainer.default_root_dir=a\0b"], "to have no NUL characters but got"),
    "half a character": (
        ["--trainer.default_root_dir=a\udcff"],
        "`trainer.default_root_dir` to be text in UTF-8 but got 'a\\udcff'.",
    ),
    "a seed to be drawn": (
        ["--seed_everything=true"],
        "`seed_everything` to be an integer from 0 to 4294967295 but got true: set a number",
    ),
    "rounds without end": (
        ["--trainer.max_epochs=1e30"],
        "`trainer.max_epochs` to be of type int but got 1e30.",
    ),
    "more rounds than numbers": (
        [f"--trainer.max_epochs={2**63}"],
        "`trainer.max_epochs` to be an integer of at most 64 bits, up to 2^63 - 1, but got 92233",
    ),
    "more epochs than can be counted": (
        ["--model=Finetuning", f"--model.finetune_epochs={2**62}"],
        "`model.finetune_epochs` to be at most 2147483647 but got 4611686018427387904.",
    ),
    "integer": (["--data.batch_size=ten"], "`data.batch_size` to be of type int but got ten"),
    "number": ([f"{MODEL}.lam=much"], "`model.lam` to be of type float but got much"),
    "list": (
        [f"{NET}.hidden=many"],
        "`model.net.hidden` to be of type Sequence but got many",
    ),
    "number or null": (
        [f"{ADVERSARY}.fraction=some"],
        "`federation.adversary.fraction` to be of type float but got some",
    ),
    "learning rate": (
        [f"{MODEL}.optimizer.init_args.lr=fast"],
        "`model.optimizer.lr` to be of type float but got fast",
    ),
    "choice": (
        ["--data.split=offical"],
        "`data.split` to be one of 'own', 'official' but got offical",
    ),
    "choice or list": (
        ["--data.normalize=chanel"],
        "`data.normalize` to be one of 'none', 'channel', 'feature', or of type list but got chan",
    ),
    # out of range
    "lam": ([f"{MODEL}.lam=-1"], "`model.lam` to be at least 0"),
    "learning rate NaN": (
        [f"{MODEL}.optimizer.init_args.lr=.nan"],
        "`model.optimizer.lr` to be a number but got NaN.",
    ),
    "infinite learning rate": (
        [f"{MODEL}.optimizer.init_args.lr=.inf"],
        "`model.optimizer.lr` to be a finite number but got inf.",
    ),
    "infinite weight decay of the server": (
        ["--federation.server_optimizer=SGD", "--federation.server_optimizer.weight_decay=.inf"],
        "`federation.server_optimizer.weight_decay` to be a finite number but got inf.",
    ),
    "infinite factor of a schedule": (
        [f"{MODEL}.lr_scheduler=ExponentialLR", f"{MODEL}.lr_scheduler.gamma=.inf"],
        "`model.lr_scheduler.gamma` to be a finite number but got inf.",
    ),
    "NaN anywhere": (
        ["--model=FedTilt", "--model.tau=.nan"],
        "`model.tau` to be a number but got NaN.",
    ),
    "differentiable steps": (
        [f"{MODEL}.optimizer.init_args.differentiable=true"],
        "`model.optimizer` to build an optimizer without differentiable steps but got",
    ),
    "differentiable steps of the server": (
        ["--federation.server_optimizer=Adam", "--federation.server_optimizer.differentiable=true"],
        "`federation.server_optimizer` to build an optimizer without differentiable steps but got",
    ),
    "no optimizer": (
        [f"{MODEL}.optimizer=null"],
        "`model.optimizer` to build an optimizer, such as functools.partial(torch.optim.SGD,"
        " lr=0.1), or torch.optim.SGD in a config, but got None: leave the argument out for the",
    ),
    "negative learning rate": (
        [f"{MODEL}.optimizer.init_args.lr=-1"],
        "`model.optimizer` to build a local optimizer from parameter groups but that failed:"
        " Invalid learning rate: -1.0",
    ),
    "negative learning rate of the server": (
        ["--federation.server_optimizer=SGD", "--federation.server_optimizer.lr=-1"],
        "`federation.server_optimizer` to build an optimizer but that failed: Invalid learning"
        " rate: -1.0",
    ),
    "steps and epochs": (
        [f"{MODEL}.local_epochs=2"],
        "only one of `model.local_steps` and `model.local_epoch",
    ),
    "batch size": (["--data.batch_size=0"], "`data.batch_size` to be at least 1 but got 0"),
    "too few for Krum": (
        ["--federation.aggregator=Krum", f"{ADVERSARY}.expected=8"],
        "`federation.sampler.cohort_size` to be at least 11 for Krum",
    ),
    "too few for what is chained": (
        [
            *("--federation.aggregator=TrimmedMean", f"{ADVERSARY}.expected=3"),
            "--federation.pre_aggregators+=Bucketing",
        ],
        "`uploads` to have more than 6 rows, because TrimmedMean",
    ),
    "byzantine ids": (
        [FLIPPED, f"{ADVERSARY}.ids=[2, 9]"],
        "`federation.adversary.ids` to be client ids from 0 to 5 but got [9]: there are 6 clients.",
    ),
    "no attack": (
        [f"{ADVERSARY}.fraction=0.5"],
        "`federation.adversary.attack` to be given with `federation.adversary.fraction` = 0.5 but",
    ),
    "compile mode": (
        ["--federation.engine.compile_mode=quick"],
        "`federation.engine.compile_mode` to be a mode of torch.compile but got 'quick': Unrecogn",
    ),
    "engine": (
        ["--federation.engine.name=fast"],
        "`federation.engine.name` to be one of 'auto', 'fastest', 'one_by_one', ",
    ),
    "name in place of a section": (
        ["--federation.storage=memory"],
        "holds one, but got memory.",
    ),
    "option of a section": (
        [f"{ADVERSARY}.fractions=0.2"],
        "but got --federation.adversary.fractions=0.2 (did you mean fraction?).",
    ),
    "target of a backdoor": (
        [f"{ADVERSARY}.attack=Backdoor", f"{ADVERSARY}.attack.target=77", NOT_YET],
        "`federation.adversary.attack.target` to be one of the 10 classes but got 77",
    ),
    "square of a backdoor": (
        [
            *(f"{ADVERSARY}.attack=Backdoor", f"{ADVERSARY}.attack.target=7", NOT_YET),
            f"{ADVERSARY}.attack.size=9",
        ],
        "`federation.adversary.attack.size` to fit inputs of shape [1, 8, 8] but got 9",
    ),
    # arguments that contradict each other
    "classes per client": (
        ["--data.partitioner.init_args.classes_per_client=11"],
        "`data.partitioner.classes_per_client` to be at most the number of classes (10) but got 11",
    ),
    "clients": (
        ["--data.num_clients=2000"],
        "`data.num_clients` to be at most the number of samples (1797) but got 2000",
    ),
    "no training data": (
        ["--data.partitioner=IID", "--data.num_clients=1797", "--data.val_fraction=0.5"],
        "every client to have training samples but got none for 1797 of 1797 clients",
    ),
    "cohort": (
        ["--federation.sampler.init_args.cohort_size=7"],
        "`federation.sampler.cohort_size` to be at most the number of clients (6) but got 7",
    ),
    "outputs": (
        [f"{NET}.num_classes=9"],
        "`model.net` to return one number for each of the 10 classes, shape [batch, 10], but got"
        " [2, 9]",
    ),
    "inputs": (
        [f"{NET}.in_features=63"],
        "`model.net` to take inputs of shape [1, 8, 8] (torch.float32) but MLP failed: ",
    ),
    "clients to predict": (["--data.predict_clients=[1, 6]"], "to be ids from 0 to 5 but got [6]"),
    # settings that a round cannot honour
    "precision": (["--trainer.precision=bf16-true"], "`precision` to be one of 32-true, 64-true, "),
    "accumulation": (
        ["--trainer.accumulate_grad_batches=0"],
        "`accumulate_grad_batches` to be an integer, at least 1, but got 0",
    ),
    "never validated": (
        ["--trainer.check_val_every_n_epoch=0"],
        "`check_val_every_n_epoch` to be at least 1 but got 0",
    ),
    "a folder that is a file": (
        ["--federation.storage.folder=tiny.yaml"],
        "`federation.storage.folder` to be a folder that can be written but got tiny.yaml: ",
    ),
    # missing files
    "data root": (
        ["--data.dataset=MNIST", "--data.dataset.root=nowhere"],
        "`data.dataset.root` to be a folder with MNIST but got ",
    ),
    "npz": (
        ["--data.dataset=Npz", "--data.dataset.path=no.npz"],
        "`data.dataset.path` to be an .npz file but found none at ",
    ),
    "checkpoint": (
        ["--ckpt_path=no.ckpt"],
        "`ckpt_path` to be a checkpoint, last or the folder of a run but got no.ckpt: no such file",
    ),
    "a run's folder": (
        ["--ckpt_path=."],
        "but got .: a folder without checkpoints/last.ckpt",
    ),
    "seed": (
        ["--seed_everything=-1"],
        "`seed_everything` to be an integer from 0 to 4294967295 but got -1",
    ),
    "best checkpoint": (["--ckpt_path=best"], "last or the folder of a run but got best: no such"),
    "no devices": (["--trainer.devices=0"], "`trainer.devices` to be auto or a number of at least"),
    "tiny share": (["--trainer.overfit_batches=1e-300"], "`trainer.overfit_batches`, or the"),
    "TPU": (["--trainer.accelerator=tpu"], "`trainer.accelerator` to be auto, cpu or cuda but got"),
    "FSDP": (["--trainer.strategy=fsdp"], "`trainer.strategy` to be auto or ddp but got fsdp: set"),
    "no nodes": (["--trainer.num_nodes=0"], "`trainer.num_nodes` to be an integer of at least 1"),
    "profiler": (["--trainer.profiler=x"], "`trainer.profiler` to be simple, advanced or pytorch"),
    "name of an engine": (["--federation.engine=stackd"], "got stackd (did you mean stacked?)"),
}
LIKE_OTHERS = {  # the same rule refuses another argument
    *("algorithm", "short name of an aggregator", "short name of an optimizer"),
    *("short name of a callback", "option of the net", "option of a section"),
    *("null for a section within a section", "integer", "number or null", "learning rate"),
    *("learning rate NaN", "infinite weight decay of the server", "infinite factor of a schedule"),
    *("best checkpoint", "option of the optimizer", "section of the algorithm"),
    *("module of an optimizer", "differentiable steps of the server", "null for a number", "list"),
    *("choice or list", "option of the trainer", "short name of an algorithm"),
    *("name of an engine", "a list for a class", "name in place of a section"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", mark_further(REFUSED, LIKE_OTHERS))
def test_mistake_is_refused_in_one_sentence(get_refusal, mistake):
    arguments, words = REFUSED[mistake]
    refusal = get_refusal(*arguments)
    assert refusal.startswith("Expected ")
    assert words in refusal


@pytest.mark.slow
def test_moved_argument_is_suggested_at_its_new_path(get_refusal):
    for old, new in NEW_PATHS.items():
        if old != "engine":
            expected = f"but got --federation.{old}=1 (did you mean federation.{new}?)."
            assert get_refusal(f"--federation.{old}=1").endswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("limit_train_batches=3.5", "invalid value 3.5 for limit_train_batches"),
        ("gradient_clip_algorithm=x", "`gradient_clip_algorithm` x is invalid"),
    ],
)
def test_refusals_of_lightning_keep_their_text(get_refusal, argument, words):
    assert words in get_refusal(f"--trainer.{argument}")


@pytest.mark.slow
def test_internal_error_is_raised_with_its_traceback(config_folder, monkeypatch):
    def raise_bug(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(RoundRunner, "run", raise_bug)
    with pytest.raises(RuntimeError, match="a bug"):
        run()


@pytest.mark.slow
def test_error_of_torch_is_raised_although_it_begins_like_a_refusal(config_folder, monkeypatch):
    def mix_devices(*_, **__):
        torch.empty(2, device="meta") + torch.empty(2)

    def check_in_torch(*_, **__):
        torch._check(False, lambda: "Expected all tensors to be on the same device")

    for failure in (mix_devices, check_in_torch):
        monkeypatch.setattr(RoundRunner, "run", failure)
        with pytest.raises(RuntimeError):
            run()


@pytest.mark.slow
def test_base_config_runs(config_folder):
    run()
    (folder,) = runs(config_folder)
    assert (folder / "per_client.csv").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("section", ["model", "data.dataset", "model.init_args.net"])
def test_missing_argument_is_named(config_folder, get_refusal, section):
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    *path, last = section.split(".")
    inner = config
    for name in path:
        inner = inner[name]
    del inner[last]
    (config_folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    short_section = section.replace(".init_args", "")
    assert get_refusal() == f"Expected argument `{short_section}` to be set but got none."


@pytest.mark.slow
def test_all_missing_arguments_are_named(config_folder, get_refusal):
    (config_folder / "tiny.yaml").write_text("{}")
    assert get_refusal() == "Expected argument `data.dataset` and `model` to be set but got none."


NET_ARGUMENTS = ["--model.net=torch.nn.Linear", "--model.net.in_features=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [[], ["--model=FedAvg", *NET_ARGUMENTS, "--model.net.out_features=1"]]
)
def test_missing_dataset_prints_a_hint(config_folder, capsys, arguments):
    with pytest.raises(SystemExit):
        main(["fit", *arguments])
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: Expected argument `data.dataset` ")
    assert hint.startswith("hint: ")
    assert hint.endswith("--config quickstart")


@pytest.mark.slow
def test_second_config_with_only_an_empty_model_is_refused(config_folder, get_refusal):
    (config_folder / "empty.yaml").write_text("model:\n")
    assert get_refusal("--config=empty.yaml") == (
        "Expected argument `config` to be a file of YAML with sections but got one that holds only"
        " an empty model."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"model: [\n", "(line 2)"),
        (b"model: x: y\n", "(line 1)"),
        (b"- 3\n- 4\n", "it holds a list"),
        (b"", "it is empty"),
        (b"PK\xff", "byte 0xff in line 1 is not UTF-8: save it as UTF-8."),
        ("a: 1".encode("utf-16"), "byte 0xff in line 1 is not UTF-8"),
        ("a: 1\nb: é".encode("latin-1"), "byte 0xe9 in line 2 is not UTF-8"),
        (b'a: "\\ud800"', "Unicode character escape code (line 1)"),
    ],
    ids=["not closed", "two colons", "list", "empty", "binary", "utf-16", "latin-1", "surrogate"],
)
def test_second_config_that_is_no_config_is_refused(config_folder, get_refusal, content, wrong):
    (config_folder / "more.yaml").write_bytes(content)
    refusal = get_refusal("--config=more.yaml")
    expected = "Expected argument `config` to be a file of YAML with sections but got more.yaml: "
    assert refusal.startswith(expected)
    assert wrong in refusal


@pytest.mark.slow
def test_config_may_start_with_a_byte_order_mark(config_folder):
    (config_folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8-sig")
    run("--trainer.fast_dev_run=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "empty",
    mark_others(["data:", "federation:", "trainer:", "federation: {}"], "data:", "federation: {}"),
)
def test_empty_section_gets_its_defaults(config_folder, empty):
    (config_folder / "more.yaml").write_text(f"{empty}  # all is commented out\nseed_everything: 3")
    run("--config=more.yaml", "--trainer.fast_dev_run=true")


def write_changed_config(config_folder, path, value):
    """Write the config with one value exchanged."""
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    *parents, last = path.split(".")
    section = config
    for name in parents:
        section = section[name]
    section[last] = value
    (config_folder / "tiny.yaml").write_text(yaml.safe_dump(config))


def test_empty_model_gets_no_default(config_folder, get_refusal):
    write_changed_config(config_folder, "model", None)
    assert get_refusal() == "Expected argument `model` to be set but got none."


OPTIMIZER, SCHEDULE = "model.init_args.optimizer", "model.init_args.lr_scheduler"
NET_PATH = "model.init_args.net"
ATTACK = {"class_path": "pl_fed.attacks.SameValue"}
A_CLASS = "to name a class by its `class_path` but got"


@pytest.mark.slow
@pytest.mark.parametrize(  # the same rule refuses another argument, where a case is marked
    ("path", "value", "words"),
    [
        ("model", {}, "`model` to name a subclass of Client by its `class_path` but got {}."),
        ("model", [1], "the section `model` should hold a class_path (line"),
        mark_if(True, "data", [1], "the section `data` should hold arguments by name (line"),
        ("federation", [1], "the section `federation` should hold arguments by name (line"),
        mark_if(True, "trainer", 3, "the section `trainer` should hold arguments by name (line"),
        ("federation", "x", "`federation` to be a mapping of arguments, or a YAML file"),
        ("federation", {"federation": {}}, "the section `federation` contains itself"),
        ("data.dataset", 1, "`data.dataset` to name a subclass of DataSource by its `class_path`"),
        ("data.dataset", {"class_path": None}, f"`data.dataset` {A_CLASS} a class_path of type"),
        mark_if(
            True,
            "data.dataset",
            {"class_path": {}},
            f"`data.dataset` {A_CLASS} a class_path of type dict",
        ),
        mark_if(
            True, "model.class_path", {"a": 1}, f"`model` {A_CLASS} a class_path of type dict."
        ),
        ("federation.aggregator", {"init_args": {}}, "`federation.aggregator` to name a subclass"),
        mark_if(
            True, "federation.pre_aggregators", [1], "subclass of PreAggregator by its `class_path`"
        ),
        (
            OPTIMIZER,
            1,
            "`model.optimizer` to name a subclass of Optimizer by its `class_path` but got 1",
        ),
        mark_if(
            True,
            OPTIMIZER,
            ATTACK,
            "to be a subclass of Optimizer but got pl_fed.attacks.SameValue.",
        ),
        (
            OPTIMIZER,
            {"class_path": "torch.optim.SGD", "init_args": {"dampening": "x"}},
            "`model.optimizer.dampening` to be of type float but got x.",
        ),
        (
            OPTIMIZER,
            {"class_path": "torch.optim.SGD", "init_args": 3},
            "`model.optimizer` to have a mapping of arguments as `init_args` but got one of type"
            " int.",
        ),
        (
            OPTIMIZER,
            {"class_path": "torch.optim.SGD", "init_args": {"rate": 1}},
            "(there are: lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, ",
        ),
        (SCHEDULE, {}, f"`model.lr_scheduler` {A_CLASS} none."),
        (
            SCHEDULE,
            {"gamma": 1},
            "`model.lr_scheduler` to name a subclass of LRScheduler or ReduceLROnPlateau by its"
            " `class_path` but got {'gamma': 1}.",
        ),
        mark_if(
            True,
            SCHEDULE,
            ATTACK,
            "subclass of LRScheduler or ReduceLROnPlateau but got pl_fed.attacks.",
        ),
        (
            "modle",
            {"a": 1},
            "only options that --help lists but got modle.a (did you mean model?).",
        ),
        (
            "federation.aggregator",
            {"class_path": "pl_fed.aggregators.Term", "init_args": {"t": None}},
            "`federation.aggregator.t` to be of type float but got null.",
        ),
        (
            f"{OPTIMIZER}.init_args",
            {"lr": 0.1, "momentum": None},
            "`model.optimizer.momentum` to be of type float but got null.",
        ),
        (
            f"{OPTIMIZER}.init_args.lr",
            None,
            "`model.optimizer.lr` to be of type float or Tensor but got null.",
        ),
        ("federation.server_optimizer", None, "server_optimizer` to build an optimizer, such as"),
        ("seed_everything", None, "`seed_everything` to be an integer from 0 to 4294967295 but"),
        mark_if(
            True, "data.val_fraction", None, "`data.val_fraction` to be of type float but got null."
        ),
        ("data.normalize", None, "`data.normalize` to be 'none', 'channel' or 'feature' but got"),
        mark_if(
            True,
            "federation.max_rejected",
            None,
            "`federation.max_rejected` to be of type float but got",
        ),
        mark_if(
            True,
            "trainer.detect_anomaly",
            None,
            "`trainer.detect_anomaly` to be of type bool but got",
        ),
        (
            "trainer.overfit_batches",
            None,
            "`trainer.overfit_batches` to be of type int or float but got null.",
        ),
        mark_if(
            True,
            "trainer.strategy",
            None,
            "`trainer.strategy` to be of type str or Strategy but got",
        ),
        ("trainer.max_steps", None, "`trainer.max_steps` to be an integer of at least -1, for no"),
        ("data.dataset.class_path", " ", "`data.dataset` to be the path of a class but got ''."),
        mark_if(
            True,
            "data.dataset.class_path",
            "\x1b[31m",
            "to be the path of a class but got \\x1b[31m.",
        ),
        mark_if(
            True, "federation", " ", "`federation` to be a mapping of arguments, or a YAML file"
        ),
        (
            "federation.storage",
            {"folder": "a\0b"},
            "`federation.storage.folder` to be text without",
        ),
        ("federation.adversary", None, "`federation.adversary` to be a mapping of arguments but"),
        (
            "federation.engine",
            {"chunk_size": "1."},
            "`federation.engine.chunk_size` to be of type int but got 1..",
        ),
        mark_if(True, "federation.engine", "stackd", "got stackd (did you mean stacked?)."),
        mark_if(
            True,
            "federation.adversary",
            {"attackk": 1},
            "adversary.attackk (did you mean attack?).",
        ),
        (
            "federation.adversary",
            {"class_path": "pl_fed.attacks.RandomLabels"},
            "`federation.adversary` to be a mapping of arguments without a class_path but got the",
        ),
        mark_if(
            True,
            "federation.agregator",
            "Median",
            "federation.agregator (did you mean aggregator?).",
        ),
        ("federation.byzantine", 0.2, "(did you mean federation.adversary.fraction?)."),
        (
            "federation.adversary",
            {"attack": {"class_path": "Combined", "init_args": {"attacks": ["SignFliping"]}}},
            "adversary.attack.attacks[0]` to be the path of a class but got SignFliping (did you",
        ),
        (
            "trainer.callbacks",
            [{"class_path": "EarlyStopping", "init_args": {"monitr": "x"}}],
            "`trainer.callbacks[0]` to hold only options of lightning.pytorch.callbacks.EarlySt",
        ),
        ("trainer.callbacks", ["Timer", 3], "`trainer.callbacks[1]` to name a subclass of Callba"),
        mark_if(
            True,
            f"{NET_PATH}.width",
            3,
            "to hold only options of pl_fed.models.MLP but got `width` (th",
        ),
        (f"{NET_PATH}.hidden", [3], "arguments below `init_args` but got `hidden` beside `class_p"),
        (f"{NET_PATH}.init_args.hidden", [4, "x"], "`model.net.hidden[1]` to be of type int but"),
        (f"{NET_PATH}.init_args.hidden", None, "`model.net.hidden` to be of type Sequence but got"),
        mark_if(
            True,
            f"{NET_PATH}.class_path",
            "own_net.Nett",
            "but own_net has no Nett (did you mean Net?).",
        ),
        (f"{NET_PATH}.class_path", "own_nt.Net", "no module own_nt (did you mean own_net?)."),
        (
            f"{NET_PATH}.class_path",
            "own_broken.Net",
            "the import of own_broken failed: ZeroDivisionError: division by zero.",
        ),
        ("data.split", True, "got True: put it in quotes if it is a name, because YAML reads yes"),
        ("data.held_out_clients", [3], "str but got 3: put it in quotes if it is a name, because"),
    ],
)
def test_config_with_a_wrong_value_is_refused(
    config_folder, get_refusal, monkeypatch, path, value, words
):
    monkeypatch.syspath_prepend(config_folder)
    (config_folder / "own_net.py").write_text("import torch\nclass Net(torch.nn.Linear): ...\n")
    (config_folder / "own_broken.py").write_text("1 / 0\n")
    write_changed_config(config_folder, path, value)
    refusal = get_refusal()
    assert words in refusal
    assert refusal.startswith("Expected ")


@pytest.mark.slow
@exhaustive_but("content0-*-data", "content1-*-model", "content2-*-data")
@pytest.mark.parametrize("section", ["data", "model"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"batch_size: 1\nbatch_size: 2", "`batch_size` appears twice in one section (lines 1"),
        (b"batch_size: &a [*a]", "an anchor contains itself (line 1)"),
        (b"batch_size: \xff", "UTF-8"),
    ],
)
def test_invalid_file_of_a_section_is_refused(config_folder, get_refusal, section, content, reason):
    (config_folder / "section.yaml").write_bytes(content)
    assert reason in get_refusal(f"--{section}=section.yaml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "but got none"),
        (["train"], "predict, study, partition, report, export, list, but got 'train'"),
    ],
)
def test_missing_and_unknown_subcommands_are_refused(capsys, arguments, words):
    with pytest.raises(SystemExit):
        main(arguments)
    refusal = error_sentence(capsys.readouterr().err)
    assert refusal.startswith("Expected a subcommand, one of ")
    assert words in refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (None, "to be an .npz file of arrays of numbers but got"),
        ({"x": np.zeros((9, 64))}, "to hold an array `y` but got x."),
        ({"x": np.zeros((9, 64)), "y": np.zeros(8, int)}, "`y` to have 9 rows"),
        ({"x": np.zeros((9, 63)), "y": np.arange(9)}, "`model.net` to take inputs of shape [63]"),
        ({"x": np.full((9, 64), np.nan), "y": np.arange(9)}, "`x` to hold finite numbers"),
        ({"x": np.zeros((9, 64)), "y": np.arange(9)}, "each of the 9 classes"),
        (
            {"x": np.zeros((9, 64)), "y": np.zeros((9, 3))},
            "`model.criterion` to be a loss of real-valued targets",
        ),
    ],
)
def test_invalid_npz_file_is_refused(config_folder, get_refusal, arrays, words):
    if arrays is None:
        (config_folder / "mine.npz").write_bytes(b"PK not quite a zip")
    else:
        np.savez(config_folder / "mine.npz", **arrays)
    options = ["--data.dataset=Npz", "--data.dataset.path=mine.npz", "--data.partitioner=IID"]
    assert words in get_refusal(*options)


# Checkpoints


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """The folder of a run of two rounds; tests copy it."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run()
    (run_folder,) = runs(folder)
    return run_folder


@pytest.fixture
def checkpoint(config_folder, good_run):
    """The argument that resumes from a copy of its checkpoint."""
    shutil.copy(good_run / "checkpoints" / "last.ckpt", config_folder / "good.ckpt")
    return "--ckpt_path=good.ckpt"


@pytest.mark.slow
@exhaustive_for("arguments[123]-*-predict")
@pytest.mark.parametrize("subcommand", ["fit", "predict"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([f"{NET}.hidden=[5]"], "the net layers.1.weight [5, 64]; "),
        (["--model.class_path=pl_fed.clients.FedAvg"], "algorithm FedAvg but got one with Dit"),
        (["--data.num_clients=7"], "number of clients 7 but got one with 6"),
        (["--data.val_fraction=0.3"], "the fractions or the seed differ"),
    ],
)
def test_checkpoint_of_another_federation_is_refused(
    checkpoint, get_refusal, subcommand, arguments, words
):
    refusal = get_refusal(checkpoint, *arguments, subcommand=subcommand)
    assert refusal.startswith("Expected a checkpoint with ")
    assert words in refusal


@pytest.mark.slow
def test_checkpoint_without_training_state_is_refused(config_folder, get_refusal):
    run("--trainer.callbacks.save_weights_only=true")
    (path,) = config_folder.glob("runs/*/checkpoints/last.ckpt")
    path.rename(config_folder / "models.ckpt")
    shutil.rmtree(config_folder / "runs")
    refusal = get_refusal("--ckpt_path=models.ckpt", "--trainer.max_epochs=3")
    assert "one that was written with `save_weights_only`" in refusal


@pytest.mark.slow
def test_checkpoint_of_another_server_optimizer_is_refused(checkpoint, get_refusal):
    refusal = get_refusal(checkpoint, "--federation.server_optimizer.class_path=torch.optim.Adam")
    assert "with the server optimizer Adam but got one with SGD" in refusal


@pytest.mark.slow
def test_broken_checkpoint_is_refused(checkpoint, config_folder, get_refusal):
    (config_folder / "half.ckpt").write_bytes((config_folder / "good.ckpt").read_bytes()[:5000])
    (config_folder / "empty.ckpt").touch()
    for name in ("half.ckpt", "empty.ckpt"):
        assert f"but got {name}: broken" in get_refusal(f"--ckpt_path={name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@exhaustive_for("empty", "other bytes")
@pytest.mark.parametrize("damage", ["empty", "half", "other bytes"])
def test_damaged_last_checkpoint_is_refused_and_changes_no_file(
    config_folder, good_run, capsys, damage
):
    shutil.copytree(good_run.parent, config_folder / "runs")
    (path,) = config_folder.glob("runs/*/checkpoints/last.ckpt")
    intact = path.read_bytes()
    largest = max(zipfile.ZipFile(path).infolist(), key=lambda part: part.file_size)
    place = largest.header_offset + 200 + largest.file_size // 2
    parts = {
        "empty": b"",
        "half": intact[: len(intact) // 2],
        "other bytes": intact[:place]
        + bytes(b ^ 255 for b in intact[place : place + 8])
        + intact[place + 8 :],
    }
    path.write_bytes(parts[damage])
    before = {file: file.read_bytes() for file in path.parent.parent.rglob("*") if file.is_file()}
    for subcommand in ("test", "fit"):
        with pytest.raises(SystemExit):
            run("--ckpt_path=last", "--trainer.max_epochs=3", subcommand=subcommand)
        assert "`ckpt_path` to be a complete checkpoint" in error_sentence(capsys.readouterr().err)
    assert {file: file.read_bytes() for file in before} == before


class Faulty(torch.nn.Module):
    """A net with a mistake in it."""

    def __init__(self, width: int = 3):
        super().__init__()
        if width % 2:
            raise RuntimeError(f"a width of {width}\nis odd")


@pytest.mark.slow
def test_failing_class_is_named_with_file_and_line(get_refusal):
    refusal = get_refusal(f"--model.init_args.net={__name__}.Faulty")
    line = Faulty.__init__.__code__.co_firstlineno + 3
    assert refusal == (
        f"Expected {__name__}.Faulty to be a class that can be made but got RuntimeError: a width"
        f" of 3 is odd (test_bad_input.py, line {line})."
    )


class FaultyLogger(CSVLogger):
    def __init__(self, save_dir: str = "."):
        raise OSError("the store is read only")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["{}", "[{{class_path: {}}}]"])
def test_failing_logger_is_named_with_its_own_error(get_refusal, form):
    refusal = get_refusal(f"--trainer.logger={form.format(f'{__name__}.FaultyLogger')}")
    assert f"{__name__}.FaultyLogger to be a class that can be made" in refusal
    assert "OSError: the store is read only (test_bad_input.py, line " in refusal


class Untyped(torch.nn.Sequential):
    """A net with untyped arguments."""

    def __init__(self, inputs, classes=10):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(inputs, classes))


@pytest.mark.slow
def test_missing_untyped_argument_is_named(get_refusal):
    refusal = get_refusal(f"--model.init_args.net={__name__}.Untyped")
    assert "got TypeError" in refusal
    assert refusal.endswith("): `inputs` was not given.")
    run(f"--model.init_args.net={__name__}.Untyped", "--model.init_args.net.inputs=64")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["Lightning", "torch"])
def test_checkpoint_of_another_program_is_refused(checkpoint, config_folder, get_refusal, of):
    state = torch.load(config_folder / "good.ckpt", weights_only=True)
    del state["federation"]
    torch.save(state if of == "Lightning" else state["state_dict"], config_folder / "other.ckpt")
    refusal = get_refusal("--ckpt_path=other.ckpt")
    assert (
        "to be a checkpoint of pl_fed but got other.ckpt, which contains no federation" in refusal
    )


# In the middle of a run


@pytest.mark.slow
def test_nan_loss_names_round_client_and_cause(config_folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(f"{MODEL}.optimizer.init_args.lr=1e20", "--trainer.max_epochs=9")
    assert stopped.value.code == 1
    refusal = error_sentence(capsys.readouterr().err)
    assert "in round 1 client " in refusal
    assert "the learning rate is too high" in refusal
    (folder,) = runs(config_folder)
    assert (folder / "metrics.csv").read_text().count("\n") == 2, "the header and round 0"
    good = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert good["epoch"] == 0
    run("--ckpt_path=last", subcommand="validate")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_failed_run_and_refused_resume_keep_the_folder(config_folder):
    """Also where the mistake shows in a later round only."""
    with pytest.raises(SystemExit):
        run(f"{MODEL}.optimizer.init_args.lr=1e20", "--trainer.max_epochs=9")
    with pytest.raises(SystemExit):
        run("--ckpt_path=last", f"{NET}.hidden=[5]")
    (folder,) = runs(config_folder)
    assert (folder / "checkpoints" / "last.ckpt").is_file()


# From Python

DIGITS = partial(FederatedData, Digits(), num_clients=6)
KINDS = {
    "sampler": (partial(Federation, 10), "Sampler but got 10"),
    "a class": (partial(Federation, Uniform), "Sampler but got the class Uniform"),
    "aggregator": (partial(Federation, aggregator="Median"), "Aggregator but got 'Median'"),
    "pre_aggregators": (partial(Federation, pre_aggregators=Clipping()), "list but got Clipping"),
    "each of them": (partial(Federation, pre_aggregators=[Median()]), "PreAggregator but got Med"),
    "adversary": (partial(Federation, adversary=0.2), "type Adversary but got 0.2: give pl_fed."),
    "engine": (partial(Federation, engine="stacked"), "type EngineOptions but got 'stacked': give"),
    "storage": (partial(Federation, storage=None), "type StorageOptions but got None: give pl_fed"),
    "attack": (partial(Adversary, attack="RandomLabels"), "Attack but got 'RandomLabels'"),
    "folder": (partial(StorageOptions, folder=123), "storage.folder` to be a folder but got 123"),
    "dataset": (partial(FederatedData, "mine.npz"), "DataSource but got 'mine.npz'"),
    "partitioner": (partial(DIGITS, "IID"), "Partitioner but got 'IID'"),
    "skew": (partial(DIGITS, IID(), skew=[]), "Skew but got []"),
}


@table_test("kind", KINDS)
def test_object_of_another_class_is_refused(kind):
    make, words = KINDS[kind]
    with pytest.raises(TypeError, match=r"^Expected argument `") as get_refusal:
        make()
    assert words in str(get_refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_optimizer_options_must_be_finite(tmp_path, option, value):
    build = partial(torch.optim.SGD, **{"lr": 0.1, option: value})
    words = "to build an optimizer with options that are finite in float32 but got"
    words = re.escape(f"{words} {option} = {value}")
    with pytest.raises(ValueError, match=f"`server_optimizer` {words}"):
        Federation(Uniform(3), server_optimizer=build)
    trainer = Trainer(Federation(Uniform(3)), default_root_dir=tmp_path, logger=False)
    with pytest.raises(ValueError, match=f"`optimizer` {words}"):
        trainer.fit(FedAvg(MLP(64, [4], 10), optimizer=build), DIGITS(IID()))


@pytest.mark.slow
def test_learning_rates_of_a_schedule_must_be_finite(tmp_path):
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda _: math.nan)
    trainer = Trainer(Federation(Uniform(3)), default_root_dir=tmp_path, logger=False)
    with pytest.raises(ValueError, match="`lr_scheduler` to build an optimizer with options tha"):
        trainer.fit(FedAvg(MLP(64, [4], 10), lr_scheduler=schedule), DIGITS(IID()))


@pytest.mark.slow
def test_arguments_of_trainer_and_federation_are_checked(tmp_path):
    federation, client, data = Federation(Uniform(3)), FedAvg(MLP(64, [4], 10)), DIGITS(IID())
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(federation, default_root_dir=tmp_path, max_epochs=1, **options)
    with pytest.raises(TypeError, match="`datamodule` to be an object of a subclass of Federated"):
        trainer.fit(client, [1, 2])
    trainer.fit(client, data)
    assert str(data) == "FederatedData(Digits, IID, 6 clients)"
    with pytest.raises(ValueError, match="`client` to be at most 5 but got 6"):
        federation.model_of(6)
    with pytest.raises(ValueError, match="`client` to be at least 0 but got -1"):
        federation.model_of(-1)
    with pytest.raises(TypeError, match="`client` to be an integer but got '3'"):
        federation.model_of("3")


# As a program


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "code"), [("net", 2), ("classes per client", 1)])
def test_program_exits_with_one_sentence_and_a_status(
    config_folder, monkeypatch, capfd, mistake, code
):
    arguments, words = REFUSED[mistake]
    monkeypatch.setattr(sys, "argv", ["pl_fed", "fit", "--config", "tiny.yaml", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("pl_fed", run_name="__main__")
    out, err = capfd.readouterr()
    assert stopped.value.code == code
    assert words in error_sentence(err)
    assert out == ""
    assert runs(config_folder) == []


def test_accelerator_that_lightning_does_not_find_is_named():
    for message, name in (
        ("No supported gpu backend found!", "gpu: torch finds no GPU that it can use"),
        (
            "`CUDAAccelerator` can not run on your system",
            "cuda: torch finds no GPU that it can use",
        ),
        ("`XLAAccelerator` can not run on your system", "XLAAccelerator"),
    ):
        start = "Expected argument `trainer.accelerator` to be available here but got"
        assert summarize(message) == f"{start} {name}."


def test_card_that_the_machine_lacks_is_named_by_its_argument():
    message = "You requested gpu: [0, 1]\n But your machine only has: [0]"
    assert summarize(message) == (
        "Expected argument `trainer.devices` to name GPUs of this machine, [0], but got [0, 1]."
    )


def test_foreign_message_becomes_one_line():
    assert summarize("something\n  else  went\nwrong") == "something else went wrong"


@pytest.mark.parametrize(
    ("message", "summary"),
    [
        (
            'Parser key "model":\n  A new message: Namespace(a=1). Got value: Namespace(b=2)',
            "Expected argument `model` to be as --help says but got: another.",
        ),
        (
            'Parser key "data.skew":\n  Something is odd',
            "Expected argument `data.skew` to be as --help says but got: Something is odd.",
        ),
        (
            "Parser key \"a\":\n  <function f at 0x7f>\nGiven value: NestedArg(key='a', val='7')",
            "Expected argument `a` to be as --help says but got: another.",
        ),
        (
            'Parser key "data.normalize":\n  Does not validate against any of the Union subtypes\n'
            "  Errors:\n    - Expected a <class 'list'>\n  Given value: None",
            "Expected argument `data.normalize` to be as --help says but got: None.",
        ),
        ("Namespace(x=1)", "Expected a valid config but got: another."),
    ],
)
def test_message_shows_no_jsonargparse_internals(message, summary):
    assert summarize(message) == summary


def test_own_sentence_that_quotes_a_class_stays():
    message = "Expected `training_step` of Net to take x but that failed: got <class 'list'>."
    assert summarize(message) == message


def test_own_sentence_is_extracted_from_nested_errors():
    message = (
        "Does not validate against any of the Union subtypes\n"
        "Subtypes: [<class 'pl_fed.clients.base.Client'>, <class 'NoneType'>]\n"
        "Errors:\n"
        "  - Expected argument `lam` to be at least 0 but got -1.0.\n"
        "  - Expected a <class 'NoneType'>\n"
        "Given value type: <class 'jsonargparse._namespace.Namespace'>\n"
        "Given value: Namespace(class_path='pl_fed.clients.Ditto')"
    )
    assert summarize(message) == "Expected argument `lam` to be at least 0 but got -1.0."
