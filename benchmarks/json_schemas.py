"""Fifty JSON schemas in the manner of JSONSchemaBench: function calls, settings, records, nested and recursive data.

Each comes in five sizes. Its outputs are finite and short enough for a small model, which fills them with whatever it likes.
"""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
TEXT = {"type": "string", "maxLength": 12}
DATE = {"type": "string", "format": "date"}
ID = {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}


def _object(properties: dict[str, Schema], optional: int = 0) -> Schema:
    """All properties are required but the last ``optional``."""
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names[: len(names) - optional],
        "additionalProperties": False,
    }


def _several(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def call(size: int) -> Schema:
    """A function to call, and its arguments by name."""
    tools = [
        _object({"name": {"const": f"tool_{one}"}, "arguments": _object({"q": TEXT, f"n{one}": _integer(one)})})
        for one in range(size)
    ]
    return {"anyOf": tools}


def _integer(size: int) -> Schema:
    return {"type": "integer", "minimum": -size, "maximum": 100 * size + 7}


def settings(size: int) -> Schema:
    kinds: list[Schema] = [{"type": "boolean"}, _integer(size), TEXT, {"enum": ["low", "high", None]}]
    return _object({f"option_{one}": kinds[one % len(kinds)] for one in range(3 * size)}, optional=size)


def record(size: int) -> Schema:
    return _object({"id": ID, "created": DATE, "owner": TEXT, "tags": _several(TEXT, size), "score": _integer(size)}, 2)


def nested(size: int) -> Schema:
    schema: Schema = _object({"value": _integer(size)})
    for depth in range(size):
        schema = _object({f"level_{depth}": schema, "note": TEXT}, optional=1)
    return schema


def table(size: int) -> Schema:
    return _several(_object({f"c{one}": _integer(one + 1) for one in range(size)}), 3, 1)


def choices(size: int) -> Schema:
    return _object({"label": {"enum": [f"label {one}" for one in range(20 * size)]}, "sure": {"type": "boolean"}})


def tree(size: int) -> Schema:
    """Recursive, to a bounded depth: each level refers to the next."""
    node: dict[str, Schema] = {
        f"n{level}": _object({"name": TEXT, "children": _several({"$ref": f"#/$defs/n{level + 1}"}, 2)})
        for level in range(size)
    }
    return {"$defs": node | {f"n{size}": {"type": "null"}}, "$ref": "#/$defs/n0"}


def patterns(size: int) -> Schema:
    forms = ["^[0-9]{3}-[0-9]{4}$", "^#[0-9a-f]{6}$", "^(GET|PUT|POST) /[a-z]{1,8}$", "^v[0-9]+\\.[0-9]{1,2}$"]
    return _object(
        {f"p{one}": {"type": "string", "pattern": forms[one % 4], "maxLength": 20} for one in range(2 * size)}
    )


def unions(size: int) -> Schema:
    kinds: list[Schema] = [TEXT, _integer(9), {"type": "null"}, _several(_integer(3), 2), _object({"x": DATE})]
    return _object({f"u{one}": {"anyOf": kinds[: 2 + one % 4]} for one in range(size)})


def geometry(size: int) -> Schema:
    point = {
        "type": "array",
        "prefixItems": [_integer(90), _integer(180)],
        "minItems": 2,
        "maxItems": 2,
        "items": False,
    }
    return _object({"type": {"const": "LineString"}, "coordinates": _several(point, size + 1, 2)})


FAMILIES: tuple[Callable[[int], Schema], ...] = (
    *(call, settings, record, nested, table),
    *(choices, tree, patterns, unions, geometry),
)


def schemas() -> dict[str, Schema]:
    """Return the fifty by name."""
    return {f"{family.__name__} {size}": family(size) for family in FAMILIES for size in range(1, 6)}
