"""Arguments of the trainer that are refused with their path, before Lightning refuses them."""

import pytest
import yaml
from tables import table_test

from pl_fed.command.config_files import check_values, name_engine, name_engine_in_text
from pl_fed.command.trainer_arguments import check_trainer_arguments

GOOD = [
    {},
    {"devices": "auto", "accelerator": "auto", "strategy": "ddp", "num_nodes": 2, "max_steps": -1},
    {"devices": 2, "strategy": "auto", "profiler": "simple", "max_steps": 5},
    {"devices": "3", "strategy": {"class_path": "DDPStrategy"}, "profiler": None},
    {"devices": -1, "accelerator": "cuda"},
    {"devices": [0, 1], "accelerator": "gpu"},
]
BAD = {
    "devices": [0, -1, "x", "0", [], -2, ""],
    "accelerator": ["tpu", "hpu", "null", "x"],
    "strategy": ["fsdp", "deepspeed", "x"],
    "num_nodes": [0, -1, None],
    "profiler": ["x", "Simple"],
    "max_steps": [None],
}


@pytest.mark.parametrize("trainer", GOOD)
def test_usable_arguments_pass(trainer):
    check_trainer_arguments(trainer)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in BAD for v in BAD[name]])
def test_sentence_has_path_value_and_remedy(name, value, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    got = "null" if value is None else str(value)
    with pytest.raises(ValueError, match=rf"^Expected argument `trainer\.{name}` to be ") as error:
        check_trainer_arguments({name: value})
    assert f" but got {got}: set, for example, " in str(error.value)


@table_test("value", [[None], "x", 3, None])
def test_section_of_another_kind_is_refused(value):
    with pytest.raises(ValueError, match=r"`federation\.storage` to be a mapping of arguments but"):
        check_values({"federation": {"storage": value}})


def test_name_of_an_engine_is_its_section():
    for text in ("federation:\n  engine: stacked\n  seed: 1\n", "federation: {engine: 'stacked'}"):
        federation = yaml.safe_load(name_engine_in_text(text))["federation"]
        assert federation["engine"] == {"name": "stacked"}
    for text in ("federation: {engine: {name: stacked}}", "federation:", "a: 1", "", "[1]"):
        assert name_engine_in_text(text) == text
    assert name_engine(["--federation.engine=stacked"]) == ["--federation.engine.name=stacked"]
    for unchanged in (
        ["--federation.engine", "{name: auto}"],
        ["--federation.engine", "my.yaml"],
        ["--federation.engine.name", "auto"],
        ["--federation.engine"],
    ):
        assert name_engine(unchanged) == unchanged
