"""The CRD's schema: the one description of the API, used to check and complete manifests without a cluster."""

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any, cast

import yaml
from jsonschema import Draft202012Validator, ValidationError

from flyball_protocol.quoting import one_line, quoted, quoted_list

CRD_FILE = Path(__file__).with_name("llmdeployments.yaml")

Schema = dict[str, Any]

MAX_UNKNOWN_FIELDS = 8
"""Unknown fields of one mapping that get a line each."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,252}", re.ASCII)
_TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "integer": "an integer",
    "string": "a string",
    "boolean": "true or false",
}


def crd_text() -> str:
    """Return the CustomResourceDefinition as YAML."""
    return CRD_FILE.read_text(encoding="utf-8")


@cache
def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition as a manifest."""
    found: dict[str, Any] = yaml.safe_load(crd_text())
    return found


def _version() -> Schema:
    found: Schema = crd()["spec"]["versions"][0]
    return found


def schema() -> Schema:
    """Return the OpenAPI v3 schema of an LLMDeployment."""
    found: Schema = _version()["schema"]["openAPIV3Schema"]
    return found


def printer_columns() -> list[dict[str, Any]]:
    """Return the columns of ``kubectl get``."""
    found: list[dict[str, Any]] = _version()["additionalPrinterColumns"]
    return found


def problems(spec: Any) -> list[str]:
    """Return one line for each place where ``spec`` (the value under the key spec) breaks the schema."""
    errors = list(_validator().iter_errors(spec))
    if not errors:
        return [*_repeated_keys(_spec_schema(), spec, "spec"), *_unscalable(spec)]
    mistyped = {tuple(error.absolute_path) for error in errors if error.validator == "type"}
    telling = [error for error in errors if error.validator == "type" or tuple(error.absolute_path) not in mistyped]
    return [line for error in telling for line in _explain(error)]


def _unscalable(spec: Schema) -> Iterator[str]:
    """2.0 is an integer to the schema; the scale subresource, which reads this field, takes none with a point."""
    if isinstance(replicas := spec.get("replicas"), float):
        yield f"spec.replicas is {replicas!r}; write it without a point: {replicas:.0f}"


def with_defaults(spec: object) -> Any:
    """Return a copy of a valid ``spec`` with the schema's defaults filled in, as the Kubernetes API server would."""
    return _fill(_spec_schema(), spec)


def _spec_schema() -> Schema:
    found: Schema = schema()["properties"]["spec"]
    return found


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(_strict(_spec_schema()))


def _strict(node: Schema) -> Schema:
    """Translate a structural schema to JSON Schema: unknown fields are errors, int-or-string is spelled out."""
    strict = {key: value for key, value in node.items() if not key.startswith("x-kubernetes-")}
    if node.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string"]
    if "pattern" in node:  # Python's $ would let a trailing newline through
        strict["pattern"] = node["pattern"].removesuffix("$") + r"\Z"
    if "properties" in node:
        strict["properties"] = {name: _strict(child) for name, child in node["properties"].items()}
        strict["additionalProperties"] = bool(node.get("x-kubernetes-preserve-unknown-fields"))
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            strict[key] = _strict(node[key])
    return strict


def _repeated_keys(node: Schema, value: Any, path: str) -> Iterator[str]:
    """Yield a line for each entry of a valid ``value`` whose list-map keys an earlier entry of its list has too."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _repeated_keys(node.get("properties", {}).get(name, {}), child, f"{path}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _repeated_keys(node.get("items", {}), item, f"{path}[{i}]")
        yield from _repeated_entries(node.get("x-kubernetes-list-map-keys", []), value, path)


def _repeated_entries(keys: list[str], entries: list[Any], path: str) -> Iterator[str]:
    for key in keys:
        seen = set()
        for i, entry in enumerate(entries):
            if entry[key] in seen:
                yield f"{path}[{i}].{key} {quoted(entry[key])} is given twice; keep one of them"
            seen.add(entry[key])


def _fill(node: Schema, value: Any) -> Any:
    if isinstance(value, list):
        return [_fill(node.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return int(value) if isinstance(value, float) and node else value  # 2.0 is an integer to JSON Schema
    properties: Schema = node.get("properties", {})
    others: Schema = node.get("additionalProperties", {})
    defaults = {name: child["default"] for name, child in properties.items() if "default" in child}
    return {name: _fill(properties.get(name, others), child) for name, child in {**defaults, **value}.items()}


def _explain(error: ValidationError) -> Iterator[str]:
    path, field = _path(error), _field(error)
    value: Any = error.instance
    if error.validator == "additionalProperties":
        yield from _unknown_fields(path, value, list(field["properties"]))
    elif error.validator == "required":
        for name in [name for name in field["required"] if name not in value]:
            yield f"{path}.{name} is missing. {field['properties'][name].get('description', '')}".rstrip()
    else:
        yield f"{path} is {_shown(value)}; {_limit(error)}"


def _unknown_fields(path: str, value: Iterable[str], known: list[str]) -> Iterator[str]:
    unknown = [name for name in value if name not in known]
    for name in unknown[:MAX_UNKNOWN_FIELDS]:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}."
        yield f"{path_of_entry(path, name)} is not a field; {hint}"
    if others := unknown[MAX_UNKNOWN_FIELDS:]:
        yield f"{path} has more that are not fields: {quoted_list(others)}"


def _limit(error: ValidationError) -> str:
    limit: Any = error.validator_value
    value: Any = error.instance
    about = str(_field(error).get("description", "")).removesuffix(".")
    match error.validator:
        case "minimum":
            text = f"the least is {limit}"
        case "maximum":
            text = f"the most is {limit}"
        case "enum":
            text = f"one of {', '.join(map(str, limit))} is expected"
        case "pattern":
            text = f"it must match {str(limit).removesuffix(chr(92) + 'Z')}$"
        case "minLength" | "maxLength":
            text = f"it has {len(value)} characters, the limit is {limit}"
        case "maxItems" | "minItems" | "maxProperties":
            text = f"it has {len(value)} entries, the limit is {limit}"
        case "type":
            text = _expected_type(error)
        case _:
            text = one_line(error.message)
    return f"{text}. {about}." if about else f"{text}."


def _expected_type(error: ValidationError) -> str:
    if isinstance(error.instance, bool) and "enum" in _field(error):
        words = ("on", "yes") if error.instance else ("off", "no")
        read = f"YAML reads a bare {' or '.join(words)} as {str(error.instance).lower()}"
        return f"one of {', '.join(_field(error)['enum'])} is expected ({read})"
    types: Any = error.validator_value
    names: list[str] = types if isinstance(types, list) else [types]
    return f"{' or '.join(_TYPE_NAMES[name] for name in names)} is expected"


def _field(error: ValidationError) -> Schema:
    """Return the schema node that was broken; ours are never the boolean schemas that JSON Schema also allows."""
    return cast(Schema, error.schema)


def _path(error: ValidationError) -> str:
    return reduce(path_of_entry, error.absolute_path, "spec")


def _shown(value: object) -> str:
    return "empty" if value is None else quoted(value)


def path_of_entry(path: str, key: str | int) -> str:
    r"""Return the path of an entry of ``path``: ``spec.replicas``, ``spec.env[2]``, ``spec['a key\n']`` (cut when long)."""
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{quoted(key)}]"
