"""Text of users and data is escaped for terminals and spreadsheets."""

import re
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pl_fed.text import csv_cell, escape_controls, find_code_line


@given(st.text())
def test_escaped_text_is_printable(text):
    escaped = escape_controls(text)
    assert escaped.isprintable()
    if text.isprintable():
        assert escaped == text
    escaped.encode()


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "\u202egnp.exe", "\x9b31m", "\udc80"])
def test_control_characters_are_escaped(text):
    assert "\\" in escape_controls(text)


@given(st.text())
def test_escaped_text_is_encodable_for_the_terminal(text):
    escape_controls(text, "ascii").encode("ascii")


@given(st.text(alphabet="=+-@\t\r'1a. " + string.digits))
@pytest.mark.slow
def test_cell_is_no_formula_and_keeps_its_text(text):
    cell = csv_cell(text)
    if cell[:1] in tuple("=+-@\t\r"):
        float(cell)
    assert cell.removeprefix("'") == text


@pytest.mark.parametrize("number", ["-2", "+1", "-2.5e-3", "12"])
def test_cells_of_numbers_are_unchanged(number):
    assert csv_cell(number) == number


def test_error_is_located_in_the_users_code():
    try:
        torch.func.vmap(lambda x: x.item())(torch.zeros(2))  # a user's line
    except RuntimeError as error:
        line = find_code_line(error)
    assert re.fullmatch(r"test_text.py:\d+: .*x.item.*# a user's line", line)
    assert find_code_line(ValueError()) == ""
