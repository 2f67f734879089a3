"""Text that comes from data: no terminal obeys it, no spreadsheet computes it."""

import re
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pl_fed.text import csv_cell, escape_controls, find_code_line


@given(st.text())
def test_printable_text_has_no_control_characters(text):
    shown = escape_controls(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text
    shown.encode()


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "\u202egnp.exe", "\x9b31m", "\udc80"])
def test_what_a_terminal_would_obey_is_escaped(text):
    assert "\\" in escape_controls(text)


@given(st.text())
def test_printable_text_can_be_written_in_the_encoding_of_the_terminal(text):
    escape_controls(text, "ascii").encode("ascii")


@given(st.text(alphabet="=+-@\t\r'1a. " + string.digits))
def test_no_cell_is_a_formula_and_none_loses_its_text(text):
    cell = csv_cell(text)
    if cell[:1] in tuple("=+-@\t\r"):
        float(cell)
    assert cell.removeprefix("'") == text


@pytest.mark.parametrize("number", ["-2", "+1", "-2.5e-3", "12"])
def test_numbers_stay_numbers(number):
    assert csv_cell(number) == number


def test_the_line_of_a_users_code_in_an_error():
    try:
        torch.func.vmap(lambda x: x.item())(torch.zeros(2))  # a user's line
    except RuntimeError as error:
        line = find_code_line(error)
    assert re.fullmatch(r"test_text.py:\d+: .*x.item.*# a user's line", line)
    assert find_code_line(ValueError()) == ""
