"""Foreign text is shown on one line, without control characters, and short."""

import datetime
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball_protocol.quoting import MAX_LINE_CHARS, lines, one_line, quoted, quoted_list

LONGEST = 10 * 64 + 64
"""An escaped character has at most ten."""


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("name", "'name'"),
        ("a'b", '"a\'b"'),
        ("a\nb\x1b[31m\u202e\ud800", r"'a\nb\x1b[31m\u202e\ud800'"),
        ("x" * 100, f"'{'x' * 64}'... (36 more characters)"),
        (b"GET \r\n" + b"x" * 100, rf"b'GET \r\n{'x' * 58}'... (42 more characters)"),
        (7, "7"),
        (-1e-39, "-1e-39"),
        (None, "None"),
        (datetime.date(2024, 1, 13), "datetime.date(2024, 1, 13)"),
        (Colour.RED, "<Colour.RED: 'red'>"),
        (["x" * 100, [["deep"]]], f"['{'x' * 64}'... (36 more characters), [...]]"),
        ({"a\n": {"b": 1}}, r"{'a\n': {...}}"),
    ],
)
def test_values_are_quoted_escaped_and_cut(value: object, text: str) -> None:
    assert quoted(value) == text


def test_a_number_is_quoted_by_its_digits_or_its_size() -> None:
    assert quoted(-(2**64)) == "-18446744073709551616"
    assert quoted(10**5000) == "an integer of 16610 bits", "Python refuses to write more than 4300 digits"


@given(st.recursive(st.text() | st.binary() | st.integers(), st.lists))
def test_a_quoted_value_is_one_short_printable_line(value: object) -> None:
    text = quoted(value)
    assert text.isprintable() and len(text) < 8 * LONGEST


def test_a_value_that_is_as_long_as_a_body_costs_no_more_than_its_beginning() -> None:
    for value in ("\U0010ffff" * 4_000_000, ["x" * 1000] * 1_000_000, {str(n): "\n" * 999 for n in range(1000)}):
        assert len(quoted(value)) < 8 * LONGEST


def test_a_list_shows_its_first_values_and_how_many_more_there_are() -> None:
    assert quoted_list(["one", "t\nwo"]) == r"'one', 't\nwo'"
    assert quoted_list({str(n): n for n in range(100)}, most=2) == "'0', '1' and 98 more"


def test_a_librarys_message_stays_on_one_line() -> None:
    assert one_line("Object contains unknown field `a\nb\x1b`") == r"Object contains unknown field `a\nb\x1b`"
    assert one_line("x" * (MAX_LINE_CHARS + 5)) == "x" * MAX_LINE_CHARS + "... (5 more characters)"


@given(st.text())
def test_one_line_leaves_printable_text_as_it_is(text: str) -> None:
    assert one_line(text).isprintable()
    assert not text.isprintable() or one_line(text) == text


def test_a_message_of_several_lines_keeps_them_and_nothing_else_that_a_terminal_obeys() -> None:
    assert lines("a\n\x1b[31mb\r\x07\n") == "a\n\\x1b[31mb\\r\\x07\n"
    assert len(lines("x" * 5000 + "\n" + "y" * 5000)) < 4100
