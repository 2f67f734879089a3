"""Loading configs section by section gives what loading them in one piece gives."""

import pytest
import yaml
from tables import table_test

from pl_fed.reports import configs
from pl_fed.reports.record import read_run

USUAL = """# pl_fed==0.1.0
seed_everything: 3
model:
  class_path: pl_fed.clients.Ditto
  init_args:
    lam: 0.1
# a comment at the margin

trainer: {max_epochs: 4,
  logger: false}
data:
  text: |
    model: no key

federation:
"""
TEXTS = {
    "usual": USUAL,
    "alias": "model: &m {a: [1]}\ndata: *m\n",
    "alias within": "model:\n  a: &m [1]\n  b: *m\ndata: 1\n",
    "repeated key": "model: 1\ndata: 2\nmodel: 3\n",
    "quoted key": "'model': 1\ndata: 2\n",
    "key of another type": "model: 1\n2: 3\n",
    "quoted lines": 'data: "x\n\n  b: y"\nmodel: 1\n',
    "lines at the margin": 'data: "x\nmodel: y"\ntrainer: [1,\n2]\n',
    "flow": "{model: 1,\ndata: 2}",
    "markers": "---\nmodel: 1\n...\n",
    "carriage returns": "model: 1\rdata: 2\r\ntrainer: 3\r\n",
    "class": "class_path: a.B\ninit_args: {x: 1}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_sections_are_the_whole_config(name):
    config, whole = configs.load(TEXTS[name]), yaml.safe_load(TEXTS[name])
    assert config == whole
    assert [*config] == [*whole]
    assert list(configs.flatten(config).items()) == list(configs.flatten(whole).items())
    for seeds in (False, True):
        assert configs.settings(config, seeds) == configs.settings(whole, seeds)
    assert configs.dump(config) == configs.dump(whole) == yaml.safe_dump(whole, sort_keys=False)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- 1\n", "a"])
def test_text_without_keys_is_no_config(text):
    assert configs.load(text) is None


@table_test("text", ["model: 1\n---\ndata: 2\n", "model: [1\n", "model: 1\ndata: *a\n"])
def test_invalid_yaml_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        configs.load(text)


def test_equal_sections_are_read_once():
    first, second = configs.load(USUAL), configs.load(USUAL.replace("seed_everything: 3", "a: 4"))
    assert first["model"] is second["model"]
    assert (first["seed_everything"], second["a"]) == (3, 4)


def test_record_of_a_run_belongs_to_its_reader(tmp_path):
    """Changes of a record's config do not reach other runs."""
    (tmp_path / "metrics.csv").write_text("round,train/loss,time/round\n0,1,1\n")
    (tmp_path / "config.yaml").write_text(USUAL)
    read_run(tmp_path).config["model"]["init_args"]["lam"] = 5
    assert read_run(tmp_path).config["model"]["init_args"]["lam"] == 0.1
