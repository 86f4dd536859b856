"""Grammars and schemas that nothing finite fits are told from those that something does."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball_runtime.grammar.endings import lark_ends, schema_ends

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
A_NODE = {"$ref": "#/$defs/node"}


def tree(child: object, **others: object) -> dict[str, object]:
    """A schema of objects that require a child of this schema."""
    node = {"type": "object", "properties": {"child": child}, "required": ["child"], **others}
    return {"$defs": {"node": node}, **A_NODE}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        NODE | {"required": ["next"]},
        NODE | {"required": ["other"], "additionalProperties": A_NODE, "$defs": {"node": A_NODE}},
        tree(A_NODE),
        tree({"type": "array", "items": A_NODE, "minItems": 1}),
        tree({"type": "array", "prefixItems": [True, A_NODE], "minItems": 2}),
        tree({"anyOf": [A_NODE, {"type": "object", "properties": {"a": A_NODE}, "required": ["a"]}]}),
        tree({"allOf": [{"type": "object"}, A_NODE]}),
        {"type": "array", "minItems": 3, "items": {"oneOf": [{"$ref": "#"}]}},
        {"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b/allOf/0"}]}}, "$ref": "#/$defs/a~1b"},
        False,
    ],
    ids=json.dumps,
)
def test_a_schema_without_a_finite_instance(schema: object) -> None:
    assert not schema_ends(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        NODE,
        NODE | {"required": ["other"]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # a number fits it too
        tree({"anyOf": [A_NODE, {"type": "null"}]}),
        tree({"type": "array", "items": A_NODE}),
        tree({"type": "array", "prefixItems": [True, A_NODE], "minItems": 1}),
        tree(A_NODE, type=["object", "null"]),
        tree({"enum": [1]}),
        tree(A_NODE, const={"child": 1}),
        tree(A_NODE, patternProperties={"child": True}),
        {"$ref": "https://example.com/x.json"},
        {"$ref": "#/nowhere"},
        {"type": "object", "required": 3, "properties": []},
    ],
    ids=json.dumps,
)
def test_a_schema_with_one_or_that_is_not_understood(schema: object) -> None:
    assert schema_ends(json.dumps(schema))


KEYWORDS = (
    *("$ref", "type", "required", "properties", "additionalProperties", "patternProperties", "items", "minItems"),
    *("prefixItems", "anyOf", "allOf", "$defs", "enum"),
)
VALUES = st.recursive(
    st.sampled_from(
        ["#", "#/items", "#/$defs/items", "object", "array", "items", 0, 1, -1.5, 1e999, None, True, False]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
)


@given(VALUES)
def test_any_json_at_any_place_is_taken(value: object) -> None:
    assert schema_ends(json.dumps(value)) in (True, False)
    assert schema_ends(json.dumps({"anyOf": [value, {"type": "string"}]}))


@pytest.mark.parametrize("text", ["[1", "", "[" * 100_000])
def test_what_is_no_json_is_left_to_the_compiler(text: str) -> None:
    assert schema_ends(text)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start',
        'start: ("a" | "b") start',
        'start: "a" start | "b" start',
        "start: (other | /x/ start)+\nother: start{1,2}",
        "start: a\na: b~2\nb: c\nc: [a] a",
        'start: "a" (("b" | "c")* start)+ // | "end"\n     | other "end"\n?other.2: other TERM\nTERM: "x" | "y"',
        '%llguidance {"no_forcing": true}\n%import common.INT\nstart: INT start',
        'start: %json {"$ref": "#"}',
        "start: <|tool|> start -> again\n",
    ],
)
def test_a_grammar_whose_every_sentence_is_endless(grammar: str) -> None:
    assert not lark_ends(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "a" start*',
        'start: "a" [start]',
        'start: "a" (start | "b")',
        'start: "a" start{0,3}',
        'start: "a" start{,3}',
        'start: "a" start~0..3',
        'start: "a" start |',
        "start: a\na: start | b\nb: /x#|\\/\\// // | b",
        'start: %json {"type": "object"} start | %regex {"substring_words": "a b"}',
        'start: part\npart[max_tokens=3]: "a" part',
        "start: TERM\nTERM: /a/ & ~/b/",
        "start: @other",
        'start: "a" start ¿',
        "start: (",
        "start: )",
        'a: "a" a',
        "",
    ],
)
def test_a_grammar_with_a_sentence_that_ends_or_that_is_not_understood(grammar: str) -> None:
    assert lark_ends(grammar)


@pytest.mark.parametrize("seed", range(30))
def test_random_rules_end_where_trying_their_depths_says_so(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{index}" for index in range(12)]
    rules = {
        name: [rng.choices([*names, *['"a"'] * 8], k=rng.randint(1, 3)) for _ in range(rng.randint(1, 2))]
        for name in names
    }
    ended: set[str] = set()
    for _ in names:  # whatever ends does so within as many levels as there are rules
        ended |= {
            name
            for name, alternatives in rules.items()
            if any(all(one == '"a"' or one in ended for one in alternative) for alternative in alternatives)
        }
    text = "\n".join(f"{name}: " + " | ".join(map(" ".join, alternatives)) for name, alternatives in rules.items())
    for name in names:
        assert lark_ends(f"start: {name}\n{text}") == (name in ended)
