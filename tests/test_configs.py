"""Every shipped config opens with the command that runs it, and that command runs (shortened)."""

import csv
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from made_data import (
    write_celeba,
    write_femnist,
    write_patients,
    write_scans,
    write_tags,
    write_vehicle,
)

from pl_fed.command.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))  # its sweeps are run by W&B
SHORT = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]


def command(config: Path) -> list[str]:
    """The arguments of the command in the first line of a config."""
    first = config.read_text().splitlines()[0]
    words = shlex.split(first.removeprefix("# "))
    assert words[:3] == ["python", "-m", "pl_fed"], f"{config.name} opens with {first!r}"
    return words[3:]


def tiny_images(folder: Path) -> Path:
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (120, 3, 8, 8), dtype=np.uint8)
    np.savez(folder / "tiny.npz", x=x, y=np.arange(120) % 10)
    return folder / "tiny.npz"


def made(name: str, root: Path, monkeypatch) -> list[str] | None:
    """Write data of the real format, for configs whose real data few have, and say where it is."""
    if name == "vehicle" and "PL_FED_DATA" not in os.environ:
        write_vehicle(root, range(10))
    elif name == "femnist":
        write_femnist(root)
    elif name == "celeba":
        write_celeba(root, [k // 5 for k in range(60)], monkeypatch)
    elif name == "medical_mnist":
        write_scans(root)
    elif name == "stackoverflow_tags":
        return ["--data.dataset.path", str(write_tags(root))]
    elif name == "table":
        return ["--data.dataset.path", str(write_patients(root))]
    else:
        return None
    return ["--data.dataset.root", str(root)]


def shortened(config: Path, folder: Path, monkeypatch) -> list[str]:
    """What makes a config run in seconds, and offline."""
    if arguments := made(config.stem, folder, monkeypatch):
        return [*arguments, "--trainer.accelerator", "cpu"]
    if config.name == "frozen_body.yaml":
        return [
            *("--model.net.weights", "none", "--data.num_clients", "4"),
            *("--data.dataset", "pl_fed.data.Npz", "--data.dataset.path", str(tiny_images(folder))),
            *("--federation.sampler.cohort_size", "2", "--trainer.accelerator", "cpu"),
        ]
    if "mnist" in " ".join(command(config)) and "PL_FED_DATA" not in os.environ:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    if "finetune_epochs" in config.read_text():  # of all clients, before each evaluation
        return ["--model.finetune_epochs", "null", "--model.finetune_steps", "1"]
    return ["--model.local_epochs", "1"] if "fedtilt" in config.name else []


@pytest.mark.parametrize("config", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_config_runs(config, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = command(config)
    assert f"configs/{config.name}" in arguments
    extra = [*shortened(config, tmp_path, monkeypatch), *SHORT]
    main([*arguments, *extra, "--trainer.default_root_dir", str(tmp_path / "runs")])
    (run,) = (tmp_path / "runs").iterdir()
    wandb.finish()
    assert (run / "checkpoints" / "last.ckpt").is_file()
    for name in ("config.yaml", "metrics.csv", "per_client.csv"):
        assert (run / name).read_text().count("\n") > 1, name


@pytest.mark.parametrize("name", ["fedadam", "fedadagrad", "fedavgm", "fedyogi"])
def test_server_optimizers_run_without_any_download(name, tmp_path, monkeypatch):
    """On top of the quickstart's algorithm, as of any other."""
    monkeypatch.chdir(ROOT)
    files = ("--config", "configs/quickstart.yaml", "--config", f"configs/{name}.yaml")
    main(["fit", *files, *SHORT, "--trainer.default_root_dir", str(tmp_path)])
    (checkpoint,) = tmp_path.glob("*/checkpoints/last.ckpt")
    saved = torch.load(checkpoint, weights_only=True)["federation"]["server"]
    expected = {"fedadam": "Adam", "fedadagrad": "Adagrad", "fedavgm": "SGD", "fedyogi": "Yogi"}
    assert saved["optimizer class"] == expected[name]
    assert saved["optimizer"]["state"]


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
def test_data_that_are_not_there_are_one_sentence(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PL_FED_DATA", str(tmp_path / "none"))
    config = ROOT / "configs" / f"{name}.yaml"
    files = [ROOT / word for word in command(config) if word.endswith(".yaml")]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", *(f"--config={file}" for file in files), *SHORT])
    (found,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert found.startswith("error: Expected argument ")
    assert words in found


def test_the_loss_of_tags_falls(tmp_path, monkeypatch):
    """Real-valued targets, several a sample: metrics are losses, and training lowers them."""
    monkeypatch.chdir(ROOT)
    path = write_tags(tmp_path, words=200, tags=20, each=20)
    main(
        [
            *("fit", "--config", "configs/stackoverflow_tags.yaml", *SHORT),
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
