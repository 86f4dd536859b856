"""The form of an output that calls tools: it must, or it may in the place of an answer that has a form too."""

import json
from typing import Any

from flyball_runtime.api.messages import NamedTool, Tool
from flyball_runtime.core.grammar import WHITESPACE, Grammar

Schema = dict[str, Any]

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

SPACE_IN_CALLS = " ?"
"""Between JSON's tokens: small models would print spaces without end."""

_DEFINED = "#/$defs/{}"


def forced_schema(tools: list[Tool], choice: NamedTool | None, *, one_call: bool) -> Schema:
    """Return the schema of the arguments of ``choice``, or without one that of a list of calls of any of ``tools``.

    A call in the list is ``{"name": ..., "parameters": ...}``, as vLLM has it.
    """
    if choice is not None:
        return next(_parameters(tool) for tool in tools if tool.function.name == choice.function.name)
    length = {"minItems": 1} | ({"maxItems": 1} if one_call else {})
    return {"type": "array", "items": {"anyOf": _calls(tools, "parameters")}, "$defs": _parameters_of(tools)} | length


def calls_or_answer(answer: Grammar, tools: list[Tool], opening: str, closing: str, *, one_call: bool) -> Grammar:
    """Return the grammar of an output that has either the form of ``answer``, a JSON schema, or calls tools.

    A call is ``{"name": ..., "arguments": ...}`` between two markers, terms of Lark's notation. Arguments have the schema of
    a tool that is strict, and are any object otherwise.
    """
    strict = [tool for tool in tools if tool.function.strict]
    others = [tool.function.name for tool in tools if not tool.function.strict]
    any_object = [_call({"enum": others}, "arguments", {"type": "object"})] if others else []
    call = {"anyOf": _calls(strict, "arguments") + any_object, "$defs": _parameters_of(strict)}
    lines = [
        "start: answer | call" + ("" if one_call else ' ("\\n"? call)*'),
        f"answer: %json {_spaced(json.loads(answer.text), WHITESPACE)}",
        f'call: {opening} "\\n"? body "\\n"? {closing}',
        f"body: %json {_spaced(call, SPACE_IN_CALLS)}",
    ]
    return Grammar("grammar", "\n".join(lines))


def _spaced(schema: Schema, space: str) -> str:
    """The schema as a text, with a default for the space between JSON's tokens."""
    options = schema.get("x-guidance", {})
    if isinstance(options, dict):  # else the compiler refuses it
        schema = schema | {"x-guidance": {"whitespace_pattern": space} | options}
    return json.dumps(schema)


def _parameters(tool: Tool) -> Schema:
    schema = tool.function.parameters
    return NO_ARGUMENTS if schema is None else {"type": "object"} | schema


def _parameters_of(tools: list[Tool]) -> Schema:
    return {f"tool_{at}": _moved(_parameters(tool), _DEFINED.format(f"tool_{at}")) for at, tool in enumerate(tools)}


def _calls(tools: list[Tool], key: str) -> list[Schema]:
    """Schemas of calls whose arguments are those of ``_parameters_of``, under this key."""
    references = ({"$ref": _DEFINED.format(f"tool_{at}")} for at in range(len(tools)))
    return [_call({"const": tool.function.name}, key, one) for tool, one in zip(tools, references, strict=True)]


def _call(name: Schema, key: str, arguments: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"name": name, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """The schema at another place: its references to its own root begin with ``root``."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference.removeprefix("#")
    return moved
