"""The first line of each shipped config is a command that runs it; it runs for one round here."""

import csv
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from exhaustive import exhaustive_for
from further_cases import mark_if, mark_others
from hugging_face_models import tiny, write_texts
from made_data import (
    write_celeba,
    write_femnist,
    write_mnist,
    write_mnist_writers,
    write_patients,
    write_plays,
    write_scans,
    write_tags,
    write_vehicle,
)
from torchvision import datasets

from pl_fed.command.main import main
from pl_fed.studies.cell_configs import check_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))  # W&B runs the sweeps
SIMILAR = (  # to a config of the same kind that is quicker, or to its tests
    *("lora", "frozen_body", "privacy_robust", "simple_tuning", "pfedme_epochs", "fedadagrad"),
    *("fedadam", "fedavgm", "fedyogi", "stackoverflow_tags", "celeba"),
)
# Fashion-MNIST by another algorithm, or under another attack, whose contracts run everywhere:
# `make test` parses and checks these.
CHECKED = (
    *("a_little_is_enough", "aaggff", "afl", "apfl", "ditto_choice", "ditto_fedprox", "ewc"),
    *("fedala", "fedas", "fedbabu", "feddbe", "feddyn", "fedfv", "fedmgda", "fednova", "fedper"),
    *("fedprox", "fedrep", "fedrod", "finetuning", "flame_reference", "knn_per", "l2sgd"),
    *("label_poisoning", "lp_proj", "mean_regularized", "mocha", "model_replacement", "moon"),
    *("pfedfda", "pfedme", "propfair", "q_ffl", "random_updates", "scaffold", "symmetrized_kl"),
    *("term", "backdoor", "ditto_greedy", "fedbn", "fedtilt", "ifca", "mapper", "outliers"),
    "per_fedavg",
)
FASHION_MNIST = "configs/fashion_mnist.yaml"
FEW_CLIENTS = "{data: {num_clients: 20}, federation: {sampler: {init_args: {cohort_size: 5}}}}"
ONE_ROUND = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]


def get_arguments(config: Path) -> list[str]:
    """Return the arguments of the command in the first line of a config."""
    first_line = config.read_text().splitlines()[0]
    words = shlex.split(first_line.removeprefix("# "))
    assert words[:3] == ["python", "-m", "pl_fed"], f"{config.name} opens with {first_line!r}"
    assert f"configs/{config.name}" in words
    return words[3:]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """A folder with small random data in the file formats of the configs' data sets."""
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder, "FashionMNIST", train=280, test=120)  # 20 samples for each of 20 clients
    write_mnist_writers(folder)
    write_vehicle(folder, range(10))
    write_femnist(folder)
    write_scans(folder)
    write_plays(folder, [(f"Role {k}", 300 * f"a{k} b") for k in range(4)])
    with pytest.MonkeyPatch.context() as patch:
        write_celeba(folder, [k // 5 for k in range(60)], patch)
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    np.savez(folder / "images.npz", x=images, y=np.arange(60) % 10)
    return folder


def overrides_for(config: Path, data_folder: Path) -> list[str]:
    """Return the arguments for running a config within seconds, without a download."""
    if config.stem == "stackoverflow_tags":
        return [
            *("--data.dataset.path", str(write_tags(data_folder, users=6))),
            *("--federation.sampler.cohort_size", "2"),
        ]
    if config.stem == "pfedme":  # 5 steps in each
        return ["--model.local_steps", "4"]
    if config.stem in ("table", "fairfed"):
        return ["--data.dataset.path", str(write_patients(data_folder))]
    if config.stem in ("hugging_face", "lora"):
        for package in ("datasets", "peft", "transformers"):
            pytest.importorskip(package, reason="needs Hugging Face models")
        family, name = {"lora": ("bert", "base")}.get(config.stem, ("distilbert", "pretrained"))
        body = tiny(family, num_hidden_layers=6, num_labels=4)
        body.model.save_pretrained(data_folder / config.stem)
        return [
            *("--data.dataset.dataset", str(write_texts(data_folder / "texts", num_labels=4))),
            *(f"--model.net.{name}", str(data_folder / config.stem)),
        ]
    if config.stem in ("privacy", "privacy_robust"):  # the noise for one round takes longer to find
        return ["--federation.privacy.rounds", "2000", "--federation.privacy.accounting", "rdp"]
    if config.stem == "shakespeare":
        return [
            *("--model.finetune_epochs", "null", "--model.finetune_steps", "1"),
            *("--federation.sampler.cohort_size", "2"),
        ]
    if config.stem == "frozen_body":
        return [
            *("--model.net.weights", "none", "--data.num_clients", "4"),
            *("--data.dataset", "pl_fed.data.Npz"),
            *("--data.dataset.path", str(data_folder / "images.npz")),
            *("--federation.sampler.cohort_size", "2"),
        ]
    if "finetune_epochs" in config.read_text():  # of all clients, before each evaluation
        return ["--model.finetune_epochs", "null", "--model.finetune_steps", "1"]
    return ["--model.local_epochs", "1"] if "fedtilt" in config.name else []


def run_one_round(arguments: list[str], folder: Path) -> Path:
    """Run a command for one round, and return the run's folder."""
    main([*arguments, *ONE_ROUND, "--trainer.default_root_dir", str(folder / "runs")])
    (run,) = (folder / "runs").iterdir()
    wandb.finish()
    return run


def check_files_of(run: Path) -> None:
    """Check that a run has written a checkpoint, its config and its tables."""
    assert (run / "checkpoints" / "last.ckpt").is_file()
    for name in ("config.yaml", "metrics.csv", "per_client.csv"):
        assert (run / name).read_text().count("\n") > 1, name


@pytest.mark.parametrize(
    "config",
    [mark_if(path.stem in (*SIMILAR, *CHECKED), path, id=path.stem) for path in CONFIGS],
)
def test_config_runs_on_small_data(config, data_folder, tmp_path, monkeypatch):
    if config.stem.startswith("privacy"):
        pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PL_FED_DATA", str(data_folder))
    monkeypatch.setattr(datasets.CelebA, "file_list", [])
    arguments = get_arguments(config)
    if FASHION_MNIST in arguments:  # other configs may set other numbers
        (tmp_path / "few.yaml").write_text(FEW_CLIENTS)
        place = arguments.index(FASHION_MNIST) + 1
        arguments[place:place] = ["--config", str(tmp_path / "few.yaml")]
    overrides = [*overrides_for(config, data_folder), "--trainer.accelerator", "cpu"]
    check_files_of(run_one_round([*arguments, *overrides], tmp_path))


@pytest.mark.parametrize("name", CHECKED)
def test_config_is_accepted(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *arguments = get_arguments(ROOT / "configs" / f"{name}.yaml")
    assert command == "fit"
    config = check_config([*arguments, "--trainer.accelerator", "cpu"]).config
    assert config.data.dataset.class_path == "pl_fed.data.FashionMNIST"


@pytest.mark.parametrize(
    "name", mark_others(["fashion_mnist", "mnist_writers", "vehicle"], "vehicle")
)
def test_config_runs_on_real_data(name, tmp_path, monkeypatch, real_data):
    if real_data is None:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    monkeypatch.chdir(ROOT)
    check_files_of(run_one_round(get_arguments(ROOT / "configs" / f"{name}.yaml"), tmp_path))


@exhaustive_for("fedadagrad-*", "fedyogi-*")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("fedadam", "Adam"), ("fedadagrad", "Adagrad"), ("fedavgm", "SGD"), ("fedyogi", "Yogi")],
)
def test_server_optimizer_config_runs_on_top_of_the_quickstart(
    name, optimizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    files = ("--config", "configs/quickstart.yaml", "--config", f"configs/{name}.yaml")
    run = run_one_round(["fit", *files], tmp_path)
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    server = checkpoint["federation"]["server"]
    assert server["optimizer class"] == optimizer
    assert server["optimizer"]["state"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vehicle", "a folder with Vehicle/vehicle_ditto_train.npz but found none in"),
        ("mnist_writers", "a folder with MNIST_writers/mnist_writer_ids.npz but found none in"),
        ("femnist", "run `./preprocess.sh -s niid"),
        ("celeba", "set `data.dataset.download: true` to fetch it"),
        ("medical_mnist", "a folder with MedicalMNIST/<class>/<image> but found none in"),
        ("table", "a CSV file but found none at"),
        ("stackoverflow_tags", "savez(path, x=inputs, y=targets, client=owners)"),
    ],
)
def test_missing_data_are_reported_in_one_sentence(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PL_FED_DATA", str(tmp_path / "none"))
    config = ROOT / "configs" / f"{name}.yaml"
    files = [ROOT / word for word in get_arguments(config) if word.endswith(".yaml")]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", *(f"--config={file}" for file in files), *ONE_ROUND])
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message.startswith("error: Expected argument ")
    assert words in message


def test_training_lowers_the_loss_of_the_multi_label_config(tmp_path, monkeypatch):
    """Each sample has several real-valued targets: the metrics have losses, but no accuracy."""
    monkeypatch.chdir(ROOT)
    path = write_tags(tmp_path, words=200, tags=20, questions_per_user=20)
    main(
        [
            *("fit", "--config", "configs/stackoverflow_tags.yaml", *ONE_ROUND),
            *("--data.dataset.path", str(path), "--trainer.default_root_dir", str(tmp_path)),
            *("--model.net.in_features", "200", "--model.net.num_classes", "20"),
            *("--model.optimizer.lr", "10", "--trainer.max_epochs", "20"),
            *("--trainer.check_val_every_n_epoch", "1", "--trainer.accelerator", "cpu"),
        ]
    )
    (file,) = tmp_path.glob("*/metrics.csv")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert not any("/accuracy" in name for name in rows[0])
    for model in ("global", "personal"):
        losses = [float(row[f"val/{model}/loss"]) for row in rows if row[f"val/{model}/loss"]]
        assert losses[-1] < 0.9 * losses[0]
