"""W&B's agent can run each sweep file: the command parses and the metric is logged."""

import os
import sys
from pathlib import Path

import pytest
import yaml
from exhaustive import exhaustive_but
from torch import nn
from wandb.sdk.launch.sweeps import utils

from pl_fed.command.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
every_sweep = pytest.mark.parametrize("path", SWEEPS, ids=[path.stem for path in SWEEPS])


def first_command(path):
    """Return the agent's command for the first combination, by the agent's own functions."""
    sweep = utils.load_sweep_config(str(path))
    first = {
        name: {"value": parameter["values"][0]} for name, parameter in sweep["parameters"].items()
    }
    macros = {
        **utils.create_sweep_command_args({"args": first}),
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [sweep["program"]],
    }
    words = []
    for word in utils.create_sweep_command(sweep["command"]):
        macro = word[2:-1] if word.startswith("${") else None
        words += [word] if macro is None else macros[macro]
    return words


def printed_config(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_sweeps_of_the_three_papers_exist():
    assert {path.stem for path in SWEEPS} >= {"ditto_lambda", "flame_rho", "fedtilt_tilts"}


@exhaustive_but("flame_rho")
@every_sweep
def test_agent_command_parses(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = first_command(path)
    assert words[:5] == ["/usr/bin/env", "python", "-m", "pl_fed", "fit"]
    config = printed_config(words[4:], capsys)
    sweep = yaml.safe_load(path.read_text())
    for name, parameter in sweep["parameters"].items():
        section, _, key = name.partition(".")
        value = config[section]["init_args"][key] if key else config[section]
        assert value == parameter["values"][0]
    assert config["trainer"]["logger"][0]["class_path"].endswith("WandbLogger")


@every_sweep
def test_every_value_of_a_sweep_parses(path, capsys, monkeypatch):
    """Each command has the first value of every parameter, but the last value of one."""
    monkeypatch.chdir(ROOT)
    command, sweep = first_command(path)[4:], yaml.safe_load(path.read_text())
    for name, parameter in sweep["parameters"].items():
        printed_config([*command, f"--{name}={parameter['values'][-1]}"], capsys)


@every_sweep
def test_algorithm_logs_the_metric_of_the_sweep(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load(path.read_text())
    part, model, measure = sweep["metric"]["name"].split("/")
    assert (part, measure, sweep["metric"]["goal"]) == ("val", "accuracy", "maximize")
    files = [word for word in sweep["command"] if word.startswith("configs/")]
    config = {}
    for file in files:
        config |= yaml.safe_load((ROOT / file).read_text())
    module, _, name = config["model"]["class_path"].rpartition(".")
    client = getattr(sys.modules[module], name)(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    assert model in client.evaluated


@pytest.mark.parametrize(("sweep", "mode"), [("abc", None), ("", "offline")])
def test_runs_of_a_sweep_stay_online(sweep, mode, monkeypatch):
    """W&B's agent waits for the metrics that they log."""
    for name in ("WANDB_MODE", "WANDB_SWEEP_ID"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    if sweep:
        monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert os.environ.get("WANDB_MODE") == mode
