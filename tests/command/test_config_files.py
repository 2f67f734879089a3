"""Config files: invalid texts are refused with a reason, and valid texts are loaded."""

import math

import pytest
import yaml
from tables import table_test

from pl_fed.command.config_files import (
    check_values,
    check_yaml,
    fill_empty_sections,
    find_config_fault,
    load,
    reason,
    replace_in_text,
)

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * [f'*{before}'])}]\n"
    for before, name in zip("abcdefgh", "bcdefghi")
)


@table_test(
    ("text", "words"),
    [
        ("a: " + 3000 * "[" + 3000 * "]", "nest"),
        ("a: " + 101 * "[" + 101 * "]", "it is nested more than 100 levels deep (line 1)"),
        ("a: " + 2000 * "{a: " + "1" + 2000 * "}", "it is nested more than 100 levels deep"),
        ("a: '" + 101 * "[" + 101 * "]" + "'", "it is nested more than 100 levels deep"),
        ("a: 1\nb: &a [*a]", "an anchor contains itself (line 2)"),
        (LAUGHS, "its anchors are repeated more than 10000 times (line 5)"),
        ("b:\n  c: 1\n  d: 2\n  c: 3", "`c` appears twice in one section (lines 2 and 4)"),
        ("trainer: {}\ntrainer: {}", "`trainer` appears twice in one section (lines 1 and 2)"),
        ("? \n: 2", "a key should be a name, but it has the empty key '' (line 1)"),
        ("yes: 2", "a key should be a name, but it has the truth value 'yes' (line 1)"),
        ("? [a]\n: 2", "a key should be a name, but it has a list or mapping (line 1)"),
        ("a: !!python/name:os.system", "tags are not allowed, but it has tag:yaml.org,2002:python"),
        ("a: " + 5000 * "9", "an integer has more digits than 64 bits can hold (line 1)"),
    ],
)
def test_invalid_text_is_refused_with_its_reason(text, words):
    with pytest.raises(yaml.YAMLError) as refused:
        load(text)
    assert words in reason(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}",
        "scheduling: {0: 2, 3: 4}",
        "a: [" + 20_000 * "1, " + "1]",
        "a: " + 99 * "[" + 99 * "]",
        "a: '{{x}}'",
    ],
)
def test_valid_text_loads_as_plain_yaml(text):
    check_yaml(text)
    assert load(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1: 2", "a section should have a name, but it has the number 1 (line 1)"),
        ("data:\n  1: 2", "an argument should have a name, but data has 1 (line 2)"),
        ("data: {data: {}}", "the section `data` contains itself (line 1)"),
    ],
)
def test_invalid_file_is_refused_with_its_reason(tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text)
    assert find_config_fault(tmp_path / "a.yaml") == words


@pytest.mark.parametrize("nothing", ["", " ", " null", " ~", "  # é", "\n  # lr: 1\n"])
def test_empty_sections_are_filled(nothing):
    text = f"# ü\ntrainer:{nothing}\nmodel: {{a: null}}\nfederation:{nothing}"
    filled = yaml.safe_load(fill_empty_sections(text))
    assert filled == {"trainer": {}, "model": {"a": None}, "federation": {}}


@table_test("value", [math.inf, -math.inf])
def test_infinity_is_refused_for_optimizers_only(value):
    check_values({"model": {"class_path": "pl_fed.clients.FedTilt", "init_args": {"tau": value}}})
    for path in ("torch.optim.SGD", "torch.optim.lr_scheduler.StepLR", "pl_fed.optimizers.Yogi"):
        optimizer = {"class_path": path, "init_args": {"betas": [0.9, value]}}
        with pytest.raises(ValueError, match=r"`a.init_args.betas\[1\]` to be a finite number"):
            check_values({"a": optimizer})


def test_integers_of_64_bits_are_accepted():
    check_values({"a": [2**63 - 1, -(2**63), True]})
    with pytest.raises(ValueError, match=r"`a\[0\]` to be an integer of at most 64 bits"):
        check_values({"a": [-(2**63) - 1]})


REPLACED = {
    "logger: true": "logger: null",
    "logger: # mine\n  - class_path: A\n  max_epochs: 1": "logger: null\n  max_epochs: 1",
    "logger:\n    class_path: A\n    init_args: {b: 1}\n\n  x: 1": "logger: null\n\n  x: 1",
    "callbacks: [&mine {class_path: A}]\n  logger: *mine": None,
    "logger: &mine {class_path: A}\n  callbacks: [*mine]": None,
    "logger:": None,
}


def test_value_is_replaced_where_it_is_written():
    for text, expected in REPLACED.items():
        replaced = replace_in_text(f"trainer:\n  {text}", "trainer", "logger", "null")
        trainer = yaml.safe_load(replaced)["trainer"]
        if expected is None:
            assert trainer == yaml.safe_load(f"trainer:\n  {text}")["trainer"]
        else:
            assert replaced == f"trainer:\n  {expected}"
            assert trainer["logger"] is None
    assert (
        replace_in_text("model: {logger: 1}", "trainer", "logger", "null") == "model: {logger: 1}"
    )
