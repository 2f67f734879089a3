"""Identity and differences of configs."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import CONFIG, with_changes

from pl_fed.reports import configs

MEDIAN = {"class_path": "pl_fed.aggregators.Median"}
LABELS = {"class_path": "pl_fed.attacks.RandomLabels", "init_args": {"redraw": True}}


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed_everything": st.integers(0, 9) | st.booleans() | st.none(),
            "data.seed": st.integers() | st.none(),
            "federation.seed": st.integers() | st.none(),
            "trainer.default_root_dir": st.text() | st.none(),
            "trainer.logger": st.just([{"class_path": "x.WandbLogger", "init_args": {"id": "a"}}]),
            "federation.storage.folder": st.text(),
            "ckpt_path": st.text(),
            "data.skew": st.none(),
        },
    )
)
def test_seeds_and_output_settings_keep_the_identity(changes):
    changed = with_changes(changes)
    assert configs.identity(changed) == configs.identity(CONFIG)
    assert configs.group_name(changed) == configs.group_name(CONFIG)


def test_other_settings_change_the_group():
    changes = {
        "model.init_args.lam": 0.2,
        "data.num_clients": 5,
        "federation.aggregator": MEDIAN,
        "federation.adversary.attack": LABELS,
        "federation.adversary.ids": [1],
        "trainer.max_epochs": 5,
        "model.init_args.seed": 1,
    }
    names = [configs.group_name(with_changes({key: value})) for key, value in changes.items()]
    assert len({configs.group_name(CONFIG), *names}) == 1 + len(changes)
    assert all(name.startswith("Ditto-") and len(name) == 14 for name in names)


def test_saved_config_keeps_its_identity():
    assert configs.identity(yaml.safe_load(yaml.safe_dump(CONFIG))) == configs.identity(CONFIG)


def test_flat_keys_equal_those_of_the_command_line():
    config = with_changes(
        {"trainer.callbacks": [{"class_path": "a.Timer"}], "model.init_args.seed": [1, 2]}
    )
    flat = configs.flatten(config)
    assert flat["model.net"] == "pl_fed.models.MLP"
    assert flat["model.lam"] == 0.1
    assert flat["data.partitioner.classes_per_client"] == 2
    assert flat["trainer.callbacks.0"] == "a.Timer"
    assert flat["model.seed"] == [1, 2]
    assert not [key for key in flat if "init_args" in key or "class_path" in key]


def test_differences_are_the_different_values():
    first = with_changes({"federation.adversary.attack": LABELS, "seed_everything": 3})
    differences = configs.find_differences([CONFIG, first])
    assert differences == {
        "seed_everything": [0, 3],
        "federation.adversary.attack": [None, "pl_fed.attacks.RandomLabels"],
        "federation.adversary.attack.redraw": [None, True],
    }
    assert configs.find_differences([CONFIG]) == configs.find_differences([CONFIG, CONFIG]) == {}


def test_seeds_are_described():
    assert configs.describe_seeds(CONFIG) == "0"
    assert configs.describe_seeds(with_changes({"data.seed": 7})) == "0, data 7"
    assert configs.describe_seeds({}) == ""


def test_byzantine_share_of_a_config():
    def share(**changes):
        return configs.byzantine_share(
            with_changes({f"federation.adversary.{k}": v for k, v in changes.items()})
        )

    assert share() == 0
    assert share(attack=LABELS, fraction=0.2) == 0.2
    assert share(attack=LABELS, ids=[0, 3]) == 0.5
    assert share(fraction=0.2) == 0, "without an attack there are no Byzantine clients"
    without_num_clients = {
        "federation.adversary.attack": LABELS,
        "federation.adversary.ids": [3],
        "data.num_clients": None,
    }
    assert configs.byzantine_share(with_changes(without_num_clients)) is None
    assert configs.byzantine_share({}) is None


def test_classes_are_described_with_their_arguments():
    assert configs.describe_at(CONFIG, "data", "partitioner") == "Shards(classes_per_client=2)"
    assert configs.describe_at(CONFIG, "federation", "adversary", "attack") == "–"
    assert configs.describe_at(CONFIG, "seed_everything", "nothing") == "–"
    assert configs.describe([MEDIAN, LABELS]) == "Median, RandomLabels(redraw=true)"
    nested = {"class_path": "a.Combined", "init_args": {"first": LABELS, "off": False, "n": 0.5}}
    assert configs.describe(nested) == "Combined(first=RandomLabels(redraw=true), n=0.5)"
    several = {"class_path": "a.Combined", "init_args": {"attacks": [LABELS, MEDIAN]}}
    assert configs.describe(several) == "Combined(attacks=[RandomLabels(redraw=true), Median])"
    plain = {"class_path": "a.CNN", "init_args": {"sizes": [[8, 16], [0.5]], "names": ["a"]}}
    assert configs.describe(plain) == "CNN(sizes=[[8, 16], [0.5]], names=[a])"
