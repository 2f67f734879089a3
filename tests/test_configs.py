"""Every shipped config opens with the command that runs it, and that command runs (shortened)."""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb

from pl_fed.cli import main

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


def shortened(config: Path, folder: Path) -> list[str]:
    """What makes a config run in seconds, and offline."""
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
    extra = [*shortened(config, tmp_path), *SHORT, "--trainer.default_root_dir", str(tmp_path)]
    main([*arguments, *extra])
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
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
