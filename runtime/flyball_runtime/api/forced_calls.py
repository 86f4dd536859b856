"""The JSON schema of an output that must call tools: the arguments of the one that is named, or a list of calls."""

from typing import Any

from flyball_runtime.api.messages import NamedTool, Tool

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_DEFINED = "#/$defs/{}"


def forced_schema(tools: list[Tool], choice: NamedTool | None, *, one_call: bool) -> dict[str, Any]:
    """Return the schema of the arguments of ``choice``, or without one that of a list of calls of any of ``tools``.

    A call in the list is ``{"name": ..., "parameters": ...}``, as vLLM has it.
    """
    if choice is not None:
        return next(_parameters(tool) for tool in tools if tool.function.name == choice.function.name)
    defined = {f"tool_{at}": _moved(_parameters(tool), _DEFINED.format(f"tool_{at}")) for at, tool in enumerate(tools)}
    calls = [_call(tool, _DEFINED.format(key)) for tool, key in zip(tools, defined, strict=True)]
    length = {"minItems": 1} | ({"maxItems": 1} if one_call else {})
    return {"type": "array", "items": {"anyOf": calls}, "$defs": defined} | length


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    return NO_ARGUMENTS if schema is None else {"type": "object"} | schema


def _call(tool: Tool, parameters: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
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
