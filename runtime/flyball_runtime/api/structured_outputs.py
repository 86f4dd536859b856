"""The fields that ask for a form of the output: ``response_format`` (OpenAI) and ``structured_outputs`` (vLLM)."""

import json
from typing import Any, Literal

import msgspec
from msgspec import Struct

from flyball_protocol.quoting import quoted_list
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.grammar import ANY_OBJECT, Grammar

KINDS = ("json", "regex", "choice", "grammar", "json_object")


class JsonSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``strict`` changes nothing: outputs always conform."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the first five, and options of a JSON schema.

    Attributes:
        json: a schema, as an object or as a text.
        regex: what the whole output matches, in the syntax of Rust's regex crate.
        choice: what the output is one of.
        grammar: Lark's notation, or GBNF.
        disable_any_whitespace: none between JSON's tokens.
        whitespace_pattern: a regular expression for it.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: Literal[False] | None = None
    structural_tag: None = None


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """Return what the two fields ask for. Raises InvalidRequest for none or several things, and for empty ones."""
    formatted = None if response_format is None else _of_format(response_format)
    if formatted is not None and structured is not None:
        raise InvalidRequest(
            "response_format and structured_outputs both ask for a form of the output. Leave one of them out.",
            param="structured_outputs",
        )
    return formatted if structured is None else _of_structured(structured)


def _of_format(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise InvalidRequest(
            "response_format is of type json_schema, but has no json_schema.schema. Send the schema, or ask for json_object.",
            param="response_format.json_schema.schema",
        )
    return _of_schema(wanted.json_schema.schema, None)


def _of_structured(wanted: StructuredOutputs) -> Grammar:
    asked = [kind for kind in KINDS if getattr(wanted, kind) not in (None, False)]
    if len(asked) != 1:
        named = f"has {quoted_list(asked)}" if asked else "asks for nothing"
        raise InvalidRequest(
            f"structured_outputs {named}; it needs one of {', '.join(KINDS)}.", param="structured_outputs"
        )
    (kind,) = asked
    space = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.json_object:
        return Grammar("json", ANY_OBJECT.text, space)
    if kind == "json":
        schema = wanted.json
        return _of_schema(_parsed(schema) if isinstance(schema, str) else schema, space)
    if space is not None:
        raise InvalidRequest(
            f"disable_any_whitespace and whitespace_pattern are for JSON, not for {kind}. Leave them out.",
            param="structured_outputs",
        )
    return _of_text(kind, getattr(wanted, kind))


def _of_schema(schema: object, space: str | None) -> Grammar:
    return Grammar("json", msgspec.json.encode(schema).decode(), space)


def _of_text(kind: Any, value: str | list[str]) -> Grammar:
    if not value or not all(value):
        what = "an empty choice" if value else "empty"
        raise InvalidRequest(
            f"structured_outputs.{kind} {'has' if value else 'is'} {what}; it needs some text.",
            param=f"structured_outputs.{kind}",
        )
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _parsed(text: str) -> object:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_outputs.json is not JSON ({error}). Send the schema as an object.",
            param="structured_outputs.json",
        ) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"structured_outputs.json is a JSON {type(schema).__name__}; a schema is an object.",
            param="structured_outputs.json",
        )
    return schema
