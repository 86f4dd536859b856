"""/docs: the OpenAPI document as one page of plain HTML, which loads nothing from elsewhere."""

import html
from typing import Any

Schema = dict[str, Any]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Flyball API</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }} td, th {{ border: 1px solid #ccc; padding: .2rem .5rem; text-align: left }}
code {{ background: #f3f3f3 }}
</style>
<h1>Flyball {version}</h1>
<p>What this server answers. The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{paths}
<h2>Schemas</h2>
{schemas}
</html>
"""


def page(document: Schema) -> str:
    """Return the page of an OpenAPI document that has no references but to its own schemas."""
    paths = [
        _operation(path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    schemas = [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return _PAGE.format(version=_text(document["info"]["version"]), paths="\n".join(paths), schemas="\n".join(schemas))


def _operation(path: str, method: str, operation: Schema) -> str:
    lines = [f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(operation['summary'])}"]
    if "security" in operation:
        lines.append("Needs an API key: <code>Authorization: Bearer KEY</code> or <code>X-Api-Key: KEY</code>.")
    if "requestBody" in operation:
        lines.append(f"Body: {_content(operation['requestBody']['content'])}.")
    headers = [f"<code>{_text(one['name'])}</code>" for one in operation["parameters"] if one["in"] == "header"]
    lines.append(f"Headers: {', '.join(headers)}.</p>")
    answers = [
        f"<tr><td>{status}<td>{_text(answer['description'])}<td>{_content(answer['content'])}"
        for status, answer in operation["responses"].items()
    ]
    return "\n".join([*lines, "<table><tr><th>Status<th>Meaning<th>Answer", *answers, "</table>"])


def _content(content: Schema) -> str:
    return " or ".join(
        _type(one["schema"]) if media == "application/json" else f"<code>{_text(media)}</code>"
        for media, one in content.items()
    )


def _schema(title: str, schema: Schema) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{_text(name)}</code>{'*' * (name in required)}<td>{_type(field)}<td>{_description(field)}"
        for name, field in schema.get("properties", {}).items()
    ]
    head = f'<h3 id="{_text(title)}">{_text(title)}</h3><p>{_description(schema)} * is required.</p>'
    return "\n".join([head, "<table><tr><th>Field<th>Type<th>Meaning", *rows, "</table>"])


def _type(schema: Schema) -> str:
    """Return a schema in a few words of HTML; bounds as they are."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = " or ".join(_type(one) for one in schema["anyOf"])
    elif "enum" in schema:
        kinds = " or ".join(f"<code>{_text(one)}</code>" for one in schema["enum"])
    elif "items" in schema:
        kinds = f"list of ({_type(schema['items'])})"
    else:
        kinds = _text(schema.get("type", "anything"))
    bounds = [f"{key} {value}" for key, value in schema.items() if key.lower().startswith(("min", "max", "exclusive"))]
    return kinds + (f" ({_text(', '.join(bounds))})" if bounds else "")


def _description(schema: Schema) -> str:
    return _text(schema.get("description", ""))


def _text(value: object) -> str:
    return html.escape("null" if value is None else str(value))
