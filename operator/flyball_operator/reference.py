"""docs/reference/llmdeployment.md, made from the CRD: every field with its type, default, limits and rules."""

from collections.abc import Iterator

from flyball_operator import names
from flyball_operator.spec import schema
from flyball_operator.spec.schema import Schema

_HEAD = f"""\
# LLMDeployment

{names.API_VERSION}. This page is made from `crds/llmdeployments.yaml` by `flyball crd --reference`; do not edit it.
`kubectl explain llmdeployment.spec` says the same on a cluster.

{{description}}
"""

_RULES = """\
## Rules

The API server refuses what breaks one of these. `flyball local` and `render` refuse it too, but they take `file:`
models, and they know no older state to compare with.
"""


def markdown() -> str:
    """Return the page."""
    root = schema.schema()
    spec, status = (root["properties"][name] for name in ("spec", "status"))
    parts = [
        _HEAD.format(description=root["description"]),
        "## spec\n",
        _table(spec),
        _RULES,
        _rules(root),
        "## status\n",
        _table(status),
        "## kubectl get\n\nColumns of `kubectl get llmdep`; those marked with `-o wide` need it.\n",
        _columns(),
    ]
    return "\n".join(parts)


def fields(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every field below ``node`` with its path; a field of a list's entries is ``name[].field``."""
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, child
        yield from fields(child, here)
        if "properties" in child.get("items", {}):
            yield from fields(child["items"], f"{here}[]")


def _table(node: Schema) -> str:
    required = {*_required(node)}
    rows = [
        f"| `{path}` | {_type(field)} | {'required' if path in required else _default(field)} | {_meaning(field)} |"
        for path, field in fields(node)
    ]
    return "\n".join(["| Field | Type | Default | Meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _required(node: Schema, path: str = "") -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        if name in node.get("required", []):
            yield f"{path}{name}"
        yield from _required(child, f"{path}{name}.")
        yield from _required(child.get("items", {}), f"{path}{name}[].")


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    return str(field["type"])


def _default(field: Schema) -> str:
    return f"`{field['default']}`" if "default" in field and field.get("type") != "object" else ""


def _meaning(field: Schema) -> str:
    description = " ".join(field.get("description", "").split()).replace("|", "\\|")
    return " ".join(part for part in (description, _limits(field)) if part)


def _limits(field: Schema) -> str:
    if "enum" in field:
        return f"One of {', '.join(f'`{value}`' for value in field['enum'])}."
    if field.get("type") == "integer" and "maximum" in field:
        return f"{field['minimum']} to {field['maximum']}."
    if field.get("type") == "array" and "maxItems" in field:
        return f"At most {field['maxItems']}."
    return ""


def _rules(root: Schema) -> str:
    lines = [f"- `{path}`: {rule['message']}." for path, rule in validations(root)]
    return "\n".join([*lines, ""])


def validations(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every CEL rule at and below ``node`` with the path it is about."""
    for rule in node.get("x-kubernetes-validations", []):
        yield path or "metadata.name", rule
    for name, child in node.get("properties", {}).items():
        yield from validations(child, f"{path}.{name}" if path else name)
    for key, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(node.get(key), dict):
            yield from validations(node[key], path + suffix)


def _columns() -> str:
    rows = [
        f"| {column['name']} | `{column['jsonPath']}` | {'`-o wide`' if column.get('priority') else ''} |"
        for column in schema.printer_columns()
    ]
    return "\n".join(["| Column | From | |", "| --- | --- | --- |", *rows, ""])
