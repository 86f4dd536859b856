"""JSON schemas whose outputs are short, and their outputs."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.text('abcdefgh_ "\\é', min_size=1, max_size=6)

_numbers = st.tuples(st.integers(-1000, 1000), st.integers(0, 500)).map(
    lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
)
_texts = st.tuples(st.integers(0, 3), st.integers(0, 6)).map(
    lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
)
_values = st.none() | st.booleans() | st.integers(-99, 99) | NAMES
_leaves = (
    _numbers
    | _texts
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"}])
    | st.sampled_from([{"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}])
    | _values.map(lambda value: {"const": value})
    | st.lists(_values, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values})
)


def _arrays(items: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return st.tuples(items, lengths).map(
        lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1][0], "maxItems": sum(pair[1])}
    )


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    _leaves,
    lambda inner: (
        _arrays(inner) | _objects(inner) | st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    ),
    max_leaves=6,
)
