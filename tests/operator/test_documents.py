"""YAML: nothing that a text holds ends in anything but documents or a SpecError, and soon."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flyball_operator.errors import SpecError
from flyball_operator.spec.documents import MAX_DEPTH, MAX_NODES, read_documents


def aliases(num_levels: int, width: int, entry: str = "[{}]") -> str:
    """Lists of aliases of lists of aliases; with nine levels of nine, 387 million values in less than a kilobyte."""
    lines = [f"a0: &a0 {entry.format('x')}"]
    for i in range(1, num_levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines)


def merges(num_levels: int) -> str:
    lines = ["a0: &a0 {k: v}"]
    for i in range(1, num_levels):
        lines.append(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (aliases(9, 9), f"more than {MAX_NODES} values"),
        (aliases(3000, 1), f"more than {MAX_DEPTH} levels"),
        (merges(30), f"more than {MAX_NODES} values"),
        ("a: &a [*a]", "alias 'a' has no anchor"),
        ("a: *missing", "alias 'missing' has no anchor"),
        ("x: " + "[" * 100_000, f"more than {MAX_DEPTH} levels"),
        ("- " * 100_000, f"more than {MAX_DEPTH} levels"),
        ("[" + "1," * MAX_NODES + "]", f"more than {MAX_NODES} values"),
        ("---\n" * (MAX_NODES + 2), f"more than {MAX_NODES} values"),
        ("".join(f"%TAG !a{i}! x\n" for i in range(60_000)) + "---\n", "lines that begin with %"),
        ("made: " + "9" * 5000, "a number of 5000 characters"),
        ("made: " + "9" * 25, "does not fit into 64 bits"),
        ("made: .inf", "not a finite number"),
        ("made: 1.0e+999", "not a finite number"),
        ("made: 0x_", "'0x_' is no int"),
        ("made: !!int x", "'x' is no int"),
        ("made: !!bool x", "'x' is no bool"),
        ("made: !!float ''", "'' is no float"),
        ("made: !!map [a]", "expected a mapping"),
        ("made: !!set {a}", "constructor"),
        ("made: !!binary aGk=", "constructor"),
        ("made: !!timestamp 2024-01-01", "constructor"),
        ("made: \0", "control characters"),
        ('made: "a\\0b"', "NUL"),
        ('"a\\0b": made', "NUL"),
        ('made: "\\ud800"', "not valid YAML"),
        ("made: \ud800", "half a character"),
        ("1: made", "key 1 is not text"),
        ("yes: made", "key True is not text"),
        ("{[a]: made}", "not valid YAML"),
        ("'" + "k" * 1000 + "': 1\n'" + "k" * 1000 + "': 2", "is given in line 1 and again in line 2"),
        ("!" + "t" * 1000 + " {}", "not valid YAML"),
    ],
    ids=range(32),
)
def test_what_json_cannot_say_or_costs_too_much_is_one_short_line(text: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_documents(text, "chat.yaml")
    assert words in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024-13-45", "2024-13-45"),
        ("2024-01-02", "2024-01-02"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("=", "="),
        ("017", 15),
        ("18446744073709551615", 2**64 - 1),
        ("1.5", 1.5),
        ("~", None),
        ("off", False),
    ],
)
def test_scalars_mean_what_they_mean_to_kubectl(text: str, value: object) -> None:
    assert read_documents(f"made: {text}", "chat.yaml") == [{"made": value}]


def test_a_few_aliases_and_merges_are_welcome() -> None:
    text = "common: &common {a: 1, b: 2}\nfirst: {<<: *common, b: 3}\nboth: [*common, *common]"
    (document,) = read_documents(text, "chat.yaml")
    assert document["first"] == {"a": 1, "b": 3}
    assert document["both"] == [document["common"]] * 2


SCALARS = [
    "1",
    "0x_",
    "1:30",
    "2024-13-45",
    "!!int x",
    "!!map x",
    "*a",
    "&a b",
    "<<",
    "~",
    '"\\0"',
    "9" * 70,
    ".nan",
    "=",
    "- ",
    "? ",
    "|",
    "%T",
]
PIECES = st.one_of(
    st.sampled_from([*SCALARS, "{", "}", "[", "]", ": ", ", ", "\n", "\n  ", "a", "---\n", "...\n", "#"]),
    st.text(max_size=3),
)


@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_documents_that_json_can_say_or_a_spec_error(text: str) -> None:
    try:
        documents = read_documents(text, "chat.yaml")
    except SpecError as error:
        assert str(error).isprintable()
    else:
        json.dumps(documents, allow_nan=False)
        assert not list(_odd_keys(documents))


def _odd_keys(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _odd_keys(child)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_what_json_says_comes_back_as_it_was(value: object) -> None:
    text = yaml.safe_dump({"value": value}, allow_unicode=True)
    assert read_documents(text, "chat.yaml") == [{"value": value}]
