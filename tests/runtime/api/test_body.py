"""The structure of a body is bounded before it is decoded."""

import json

import pytest

from flyball_runtime.api import server
from flyball_runtime.api.server import MAX_DEPTH, MAX_STRUCTURE, parse_object
from flyball_runtime.core.errors import RequestError

MANY = MAX_STRUCTURE + 1


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt":[%b]}' % (b'"",' * MANY),
        b'{"prompt":[%b]}' % (b"[]," * MANY),
        b'{"prompt":[%b]}' % (b"{}," * MANY),
        b"{%b}" % b",".join(b'"%d":1' % number for number in range(MANY)),
        b'"' * 2 * MANY,
        b"[]" * MANY,
    ],
    ids=["texts", "lists", "objects", "fields", "quotes", "brackets"],
)
def test_too_much_structure_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(server.msgspec.json, "decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match=f"more than {MAX_STRUCTURE} texts"):
        parse_object(text)


@pytest.mark.parametrize("nested", ["[" * 1000 + "]" * 1000, '{"a":' * 1000 + "1" + "}" * 1000, "[" * 1000])
def test_deep_nesting_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch, nested: str) -> None:
    monkeypatch.setattr(server.msgspec.json, "decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match=f"over {MAX_DEPTH}"):
        parse_object(b'{"chat_template_kwargs": {"x": %b}}' % nested.encode())


def test_what_stands_in_a_text_is_not_structure() -> None:
    value = {"prompt": '[{"\\' * MANY, "quotes": '"' * 3 * MANY, "flat": [[] for _ in range(1000)]}
    assert parse_object(json.dumps(value).encode()) == value
    numbers = {"prompt": list(range(4 * MANY))}
    assert parse_object(json.dumps(numbers).encode()) == numbers


def test_nesting_up_to_the_bound_is_fine() -> None:
    inner: object = 1
    for _ in range(MAX_DEPTH - 1):
        inner = [inner]
    assert parse_object(json.dumps({"x": inner}).encode())["x"] == inner


@pytest.mark.parametrize(
    "text", [b'{"a": "' + b"\\" * MANY, b'\\"' * 1_000_000, b'{"a": "x', b'{"a": "\\u12', b'"', b"\\", b'{"a": tru}']
)
def test_malformed_bodies_are_told_as_such(text: bytes) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        parse_object(text)
