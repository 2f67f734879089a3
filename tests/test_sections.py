"""The sections of a federation: invalid arguments are refused, and sections are frozen."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from tables import table_test

from pl_fed import Adversary, EngineOptions, Federation, Smoothing, StorageOptions
from pl_fed.attacks import ALittleIsEnough, Combined, RandomLabels, SignFlipping

LABELS, SEARCH = RandomLabels(), ALittleIsEnough("search")
SECTIONS = {
    "adversary": Adversary(LABELS, fraction=0.2),
    "engine": EngineOptions("stacked", chunk_size=3),
    "storage": StorageOptions(memory=0.25),
    "smoothing": Smoothing(num_models=10),
}
MISTAKES = [
    (Adversary, {"attack": "RandomLabels"}, "attack` to be an object of a subclass of Attack but"),
    (Adversary, {"corruption": 0.2}, "corruption` to be an object of a subclass of Attack but got"),
    (Adversary, {"fraction": -0.1}, "fraction` to be a number in [0, 1] but got -0.1: set, for"),
    (Adversary, {"fraction": 1.5}, "fraction` to be a number in [0, 1] but got 1.5: set, for"),
    (Adversary, {"fraction": float("nan")}, "fraction` to be a number in [0, 1] but got nan"),
    (Adversary, {"fraction": True}, "fraction` to be a number in [0, 1] but got True: to select"),
    (Adversary, {"fraction": [1]}, "to select clients by id, set `federation.adversary.ids`."),
    (Adversary, {"fraction": "0.2"}, "fraction` to be a number in [0, 1] but got '0.2'"),
    (Adversary, {"ids": [0.5]}, "ids` to be a list of client ids but got [0.5]: give integers"),
    (Adversary, {"ids": [True]}, "ids` to be a list of client ids but got [True]: give integers"),
    (Adversary, {"ids": "02"}, "ids` to be a list of client ids but got '02': give integers, for"),
    (Adversary, {"ids": 0.2}, "ids` to be a list of client ids but got 0.2: give integers, for"),
    (Adversary, {"ids": [2, 1, 2]}, "ids` to be different client ids but got [2] more than once"),
    (Adversary, {"fraction": 0.2, "ids": [1]}, "ids` to be given but got 0.2 and [1]: set the"),
    (Adversary, {"ids": [1], "redraw": True}, "got `federation.adversary.ids` = [1]: set a frac"),
    (Adversary, {"fraction": 0.5}, "attack` to be given with `federation.adversary.fraction` = 0"),
    (Adversary, {"ids": [4]}, "attack` to be given with `federation.adversary.ids` = [4] but got"),
    (Adversary, {"start_round": -1}, "start_round` to be at least 0 but got -1."),
    (Adversary, {"stop_round": 0}, "greater than `federation.adversary.start_round` = 0 but got 0"),
    (Adversary, {"start_round": 5, "stop_round": 5}, "= 5 but got 5: set, for example, 15, or"),
    (Adversary, {"stop_round": 2.5}, "stop_round` to be an integer but got 2.5."),
    (Adversary, {"expected": -1}, "expected` to be at least 0 but got -1."),
    (Adversary, {"expected": 1.5}, "expected` to be an integer but got 1.5."),
    (Adversary, {"knowledge": "some"}, "knowledge` to be 'all' or 'own' but got 'some'."),
    (Adversary, {"attack": SEARCH, "knowledge": "own"}, 'knowledge` to be "all" for ALittleIsEn'),
    (
        Adversary,
        {"attack": Combined([SignFlipping("search")]), "knowledge": "own"},
        'knowledge` to be "all" for Combined, because it tries',
    ),
    (Adversary, {"corruption": SignFlipping()}, "corruption` to change data only but got SignFl"),
    (Adversary, {"corruption": Combined([LABELS, SignFlipping()])}, "only but got Combined, which"),
    (EngineOptions, {"name": "fast"}, "name` to be 'auto', 'fastest', 'one_by_one', "),
    (EngineOptions, {"name": None}, "or 'stacked_compiled' but got None."),
    (EngineOptions, {"chunk_size": 0}, "chunk_size` to be at least 1 but got 0."),
    (EngineOptions, {"chunk_size": 2.5}, "chunk_size` to be an integer but got 2.5."),
    (EngineOptions, {"compile_mode": "quick"}, "compile_mode` to be a mode of torch.compile but"),
    (Smoothing, {"std": -1.0}, "std` to be at least 0, and finite, but got -1.0"),
    (Smoothing, {"num_models": 0}, "num_models` to be at least 1 but got 0."),
    (Smoothing, {"num_models": 1.5}, "num_models` to be an integer but got 1.5."),
    (StorageOptions, {"folder": 7}, "folder` to be a folder but got 7."),
    (StorageOptions, {"folder": __file__}, "folder` to be a folder that can be written but got"),
    (StorageOptions, {"memory": 1.5}, "memory` to be a share in (0, 1] or a number of bytes (int)"),
    (StorageOptions, {"memory": "8GB"}, "bytes (int) but got '8GB': set a number, for example"),
]
PATHS = {
    Adversary: "federation.adversary",
    EngineOptions: "federation.engine",
    StorageOptions: "federation.storage",
    Smoothing: "federation.smoothing",
}


@table_test(("kind", "arguments", "words"), MISTAKES)
def test_invalid_argument_is_refused_with_its_config_path(kind, arguments, words):
    with pytest.raises((TypeError, ValueError)) as refused:
        kind(**arguments)
    text = str(refused.value)
    assert words in text
    assert text.startswith("Expected ")
    assert f"`{PATHS[kind]}." in text
    assert "\n" not in text


@pytest.mark.parametrize("name", SECTIONS)
def test_sections_are_frozen(name):
    section = SECTIONS[name]
    for entry in fields(section):
        with pytest.raises(FrozenInstanceError):
            setattr(section, entry.name, None)


def test_federation_passes_its_sections_on_unchanged():
    federation = Federation(**SECTIONS)
    for name, section in SECTIONS.items():
        assert getattr(federation, name) is section
    assert federation.byzantine_clients.adversary is federation.adversary
    assert federation.engine_choice.options is federation.engine


def test_federation_describes_sections_without_class_paths():
    described = Federation(**SECTIONS, seed=0).constructor_arguments
    assert described["engine"] == {
        "name": "stacked",
        "chunk_size": 3,
        "compile_mode": None,
        "keep_optimizer_state": False,
    }
    assert described["storage"] == {"folder": None, "memory": 0.25}
    adversary = described["adversary"]
    assert adversary.pop("attack")["class_path"] == "pl_fed.attacks.RandomLabels"
    assert adversary == {
        "fraction": 0.2,
        "ids": None,
        "redraw": False,
        "start_round": 0,
        "stop_round": None,
        "knowledge": "all",
        "expected": None,
        "corruption": None,
    }


@pytest.mark.parametrize("kind", [tuple, set, np.array, torch.tensor])
def test_ids_are_accepted_in_any_collection(kind):
    assert Adversary(LABELS, ids=kind([1, 2])).ids == [1, 2]


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 0.5, 1.0, np.float64(0.3)])
def test_fraction_from_0_to_1_is_accepted(fraction):
    assert Adversary(LABELS, fraction=fraction).fraction == fraction
