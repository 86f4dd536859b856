"""Specs that mostly fit the schema, with odd values in odd places: each is taken, or refused in words."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flyball_operator import children
from flyball_operator.errors import OperatorError
from flyball_operator.local.changes import describe_changes
from flyball_operator.local.template import local_deployment, process_template
from flyball_operator.spec import manifest
from flyball_operator.spec.schema import schema

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, -0.0, 1e300),
    *("", "a", "\n", "\x1b[31m", "9" * 5000, "x" * 70_000, "2024-13-45", "100%", "\u2028", "..", "=", "<<", "~", "%"),
    *("hf://a/b", "file:x", "file:" + "x" * 5000, "file:" + "y" * 300, "1Gi", "9" * 500 + "Gi", "a" * 300 + "/b"),
    *([], {}, [None], [[]], {"a": None}, {"": ""}, {"a": {"b": []}}, [{}], [1] * 50, {"name": "runtime"}),
]
TEXTS = [
    *("hf://a/b", "a", "1Gi", "50%", "10.0.0.0/8", "http://x", "file:/tmp", "main"),
    *("pvc://a/b", "oci://a:b", "--seed=1", "1", "nvidia.com/gpu"),
]
POD_KEYS = [
    *(
        "spec",
        "containers",
        "initContainers",
        "volumes",
        "name",
        "runtime",
        "listener",
        "metadata",
        "labels",
        "annotations",
    ),
    *(
        "livenessProbe",
        "startupProbe",
        "httpGet",
        "path",
        "periodSeconds",
        "failureThreshold",
        "timeoutSeconds",
        "ports",
    ),
    *(
        "env",
        "value",
        "valueFrom",
        "envFrom",
        "args",
        "command",
        "lifecycle",
        "preStop",
        "sleep",
        "seconds",
        "resources",
    ),
    *("limits", "nvidia.com/gpu", "hostPath", "volumeMounts", "mountPath", "terminationGracePeriodSeconds", "$patch"),
    *("topologySpreadConstraints", "securityContext"),
]


class Maker:
    """Makes specs from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def spec(self) -> Any:
        spec = self._value(schema()["properties"]["spec"])
        if isinstance(spec, dict):
            if self._random.random() < 0.9:
                spec["model"] = {"uri": self._random.choice(["hf://a/b", "file:/tmp"])}
            if self._random.random() < 0.5:
                spec["podTemplate"] = {"spec": self._pod()}
        return spec

    def _value(self, node: dict[str, Any]) -> Any:
        if self._random.random() < 0.02:
            return self._random.choice(ODD)
        if "enum" in node:
            return self._random.choice(node["enum"])
        if "properties" in node or isinstance(node.get("additionalProperties"), dict):
            return dict(self._entries(node))
        if node.get("x-kubernetes-preserve-unknown-fields"):
            return self._anything(3)
        match node.get("type"):
            case "array":
                return [self._value(node["items"]) for _ in range(self._random.randint(0, 2))]
            case "integer":
                return self._random.choice([node.get("minimum", 1), node.get("maximum", 5), 0, 1, 2])
            case "boolean":
                return self._random.random() < 0.5
        return self._random.choice([node.get("default", "a"), *TEXTS])

    def _entries(self, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, child in node.get("properties", {}).items():
            if key in node.get("required", ()) or self._random.random() < 0.35:
                yield key, self._value(child)
        if isinstance(node.get("additionalProperties"), dict):
            for key in self._random.sample(["a", "cpu", "memory", "b/c", "kubernetes.io/x", "\n"], 1):
                yield key, self._value(node["additionalProperties"])

    def _pod(self) -> dict[str, Any]:
        container = {"name": "runtime", **self._mapping(2)}
        containers = {"containers": [container]} if self._random.random() < 0.7 else {}
        return {**self._mapping(2), **containers}

    def _mapping(self, depth: int) -> dict[str, Any]:
        keys = self._random.sample(POD_KEYS, self._random.randint(0, 3))
        return {key: self._anything(depth) for key in keys}

    def _anything(self, depth: int) -> Any:
        kind = self._random.random()
        if depth == 0 or kind < 0.25:
            return self._random.choice([*ODD, "runtime", "listener", "model"])
        if kind < 0.75:
            return self._mapping(depth - 1)
        return [self._anything(depth - 1) for _ in range(self._random.randint(0, 3))]


def take(spec: Any) -> None:
    """Do all that a manifest is put to: parse, render, run here."""
    document = {
        "apiVersion": "flyball.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": spec,
    }
    text = yaml.dump(document, Dumper=yaml.CSafeDumper, allow_unicode=True)
    (llm,) = manifest.parse(text, source="chat.yaml", base=Path("/tmp"))
    yaml.safe_dump_all(children.build(llm, children.Platform(), admin_token_secret="x"))
    template = process_template(local_deployment(llm), ("flyball",))
    template.argv_for(1, 2)
    describe_changes(llm, llm, template, template)


def check(seeds: range) -> int:
    """Return how many specs were taken whole."""
    num_taken = 0
    for seed in seeds:
        try:
            take(Maker(seed).spec())
            num_taken += 1
        except OperatorError as error:
            lines = str(error).split("\n")
            assert all(line.isprintable() and len(line) < 1500 for line in lines), f"seed {seed}"
            assert len(lines) <= 21
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return num_taken


def test_odd_specs_are_taken_or_refused_in_words() -> None:
    assert check(range(200)) > 5


@pytest.mark.slow
def test_many_odd_specs_are_taken_or_refused_in_words() -> None:
    assert check(range(1000, 6000)) > 200
