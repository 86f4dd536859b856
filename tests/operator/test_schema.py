"""The CRD itself: a structural schema that explains every field and whose defaults it would accept."""

from collections.abc import Iterator
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from flyball_operator import names
from flyball_operator.spec import schema


def nodes(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(f"{path}.{name}", child)
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(f"{path}[]", node[key])


def spec_and_status() -> list[tuple[str, dict[str, Any]]]:
    properties = schema.schema()["properties"]
    return [*nodes("spec", properties["spec"]), *nodes("status", properties["status"])]


def test_the_crd_defines_the_kind_that_the_operator_reads() -> None:
    crd = yaml.safe_load(schema.crd_text())
    assert crd["metadata"]["name"] == f"{crd['spec']['names']['plural']}.{crd['spec']['group']}"
    assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (names.GROUP, names.KIND)
    assert f"{names.GROUP}/{crd['spec']['versions'][0]['name']}" == names.API_VERSION


def test_every_node_has_a_type_and_every_field_a_description() -> None:
    for path, node in spec_and_status():
        assert node.get("type") or node.get("x-kubernetes-int-or-string"), path
        assert node.get("description") or path.endswith("[]"), path


def test_no_number_in_spec_is_a_float_and_no_list_or_string_is_unbounded() -> None:
    for path, node in spec_and_status():
        if not path.startswith("spec"):
            continue
        assert node.get("type") != "number", path
        assert node.get("type") != "array" or "maxItems" in node, path
        assert node.get("type") != "string" or "maxLength" in node or "enum" in node, path
        assert node.get("type") != "integer" or {"minimum", "maximum"} <= node.keys(), path


def test_every_default_satisfies_its_own_schema() -> None:
    defaults = [(path, node) for path, node in spec_and_status() if "default" in node]
    assert defaults
    for path, node in defaults:
        assert not list(Draft202012Validator(node).iter_errors(node["default"])), path


def test_list_map_keys_are_required_as_the_api_server_demands() -> None:
    for path, node in spec_and_status():
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path
