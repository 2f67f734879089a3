"""The configs in the package, by their names."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import pl_fed
from pl_fed.command import shipped_configs
from pl_fed.command.main import main
from pl_fed.command.shipped_configs import (
    find_configs,
    put_configs_first,
    resolve_config_names,
)

ROOT = Path(__file__).parents[2]


def test_configs_are_those_of_the_repository():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == find_configs().keys()


def test_name_is_resolved_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ditto = str(find_configs()["ditto"])
    words = ["fit", "--config", "ditto", "--config=ditto.yaml", "--model", "ditto"]
    assert resolve_config_names(words)[2:] == [ditto, f"--config={ditto}", "--model", "ditto"]
    (tmp_path / "ditto").touch()
    assert resolve_config_names(words)[2] == "ditto"
    assert resolve_config_names(["fit", "--config"]) == ["fit", "--config"]
    for name in ("none_such", "a\0b", "{a: 1}", "x" * 5000):
        assert resolve_config_names(["--config", name]) == ["--config", name]


def test_wheel_folder_takes_precedence(tmp_path, monkeypatch):
    (tmp_path / "quickstart.yaml").touch()
    monkeypatch.setattr(shipped_configs, "_FOLDERS", (tmp_path, ROOT / "configs"))
    assert find_configs() == {"quickstart": tmp_path / "quickstart.yaml"}
    monkeypatch.setattr(shipped_configs, "_FOLDERS", (tmp_path / "none",))
    assert find_configs() == {}


@pytest.mark.slow
def test_fit_takes_names_of_configs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", "--config", "fedavg", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"] == "pl_fed.clients.FedAvg"
    assert config["data"]["dataset"]["class_path"] == "pl_fed.data.Digits"


@pytest.mark.slow
def test_build_copies_the_configs_into_the_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel's files")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build_py"]
    subprocess.run([*command, "-d", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    built = {path.relative_to(tmp_path / "pl_fed" / "configs") for path in tmp_path.rglob("*.yaml")}
    assert built == {path.relative_to(ROOT / "configs") for path in ROOT.glob("configs/**/*.yaml")}
    assert (tmp_path / "pl_fed" / "py.typed").is_file()


def test_project_has_the_version_and_the_console_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == pl_fed.__version__
    assert project["scripts"] == {"pl_fed": "pl_fed.__main__:main"}


@given(st.lists(st.sampled_from(["--config", "--config=b", "-c", "a", "--model", "--x=1"])))
@pytest.mark.slow
def test_configs_come_first_in_their_order(words):
    words = ["fit", *words]
    arranged = put_configs_first(words)
    assert sorted(arranged) == sorted(words)
    assert put_configs_first(arranged) == arranged
    names = [word for word in words if word.startswith("--config=")]
    assert [word for word in arranged if word.startswith("--config=")] == names


@pytest.mark.slow
def test_options_before_a_config_win_over_it(capsys):
    """It has batch_size 10 and 60 rounds, and names a class of model."""
    options = ["--data.batch_size", "77", "--trainer.max_epochs=3", "--model", "FedAvg"]
    with pytest.raises(SystemExit):
        main(["fit", *options, "--config", "quickstart", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"]["batch_size"] == 77
    assert config["trainer"]["max_epochs"] == 3
    assert config["model"]["class_path"] == "pl_fed.clients.FedAvg"


@pytest.mark.slow
def test_options_of_the_sampler_need_no_class(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config=fedavg", "--federation.sampler.cohort_size", "7", "--print_config"])
    sampler = yaml.safe_load(capsys.readouterr().out)["federation"]["sampler"]
    assert sampler == {"class_path": "pl_fed.samplers.Uniform", "init_args": {"cohort_size": 7}}


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["model.optimizer", "federation.server_optimizer"])
def test_replaced_default_leaves_the_defaults_of_the_new_class(capsys, argument):
    with pytest.raises(SystemExit):
        main(["fit", "--config=fedavg", f"--{argument}=AdamW", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    section, name = argument.split(".")
    optimizer = config[section].get("init_args", config[section])[name]["init_args"]
    assert optimizer["weight_decay"] == 0.01, "of AdamW, not of the default SGD"
    assert optimizer["lr"] == {"model": 0.05, "federation": 1.0}[section], "of the default"
