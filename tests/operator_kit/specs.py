"""Random specs, made by walking the CRD's schema: valid ones, and such as have one thing or two wrong."""

import random
import re
from collections.abc import Callable
from typing import Any

from flyball_operator import names
from flyball_operator.errors import SpecError
from flyball_operator.spec import manifest, schema

Schema = dict[str, Any]
Document = dict[str, Any]

TEXTS = (
    *(
        "hf://org/name",
        "hf://gpt2",
        "Qwen/Qwen3-0.6B",
        "gpt2",
        "pvc://claim/a/b",
        "pvc://claim",
        "oci://registry:5000/a/b:tag",
        "oci://a@sha256:0f",
    ),
    *(
        "a",
        "chat",
        "x-1",
        "a.b",
        "my.secret",
        "HF_TOKEN",
        "token",
        "tls.crt",
        "A",
        "HF_ENDPOINT",
        "PREFIX_",
        "v1.0",
        "main",
    ),
    *(
        "1Gi",
        "512Mi",
        "64Mi",
        "2GiB",
        "1.5GB",
        "0.5GiB",
        "4096B",
        "10G",
        "2",
        "1.5",
        "500m",
        "0",
        "25%",
        "0%",
        "100%",
        "10.0.0.0/8",
        "fd00::/64",
        "10.1.2.3/32",
    ),
    *("--seed=1", "--no-enable-prefix-caching", "--block-size=32", "nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe"),
    *("http://prometheus.monitoring.svc:9090", "https://p/a?b=c", "flyball:1", "registry:5000/a/b@sha256:0f", ""),
)
BAD_TEXTS = (
    *(
        "file:/models",
        "hf://a/b/c",
        "a/b/c",
        "./a",
        "a//b",
        "pvc://claim/../x",
        "pvc://A",
        "s3://bucket",
        " ",
        "a b",
        "Ä",
        "a\n",
        "1Gi\n",
        "-",
        "-a",
        "a-",
    ),
    *(
        "2 GB",
        "2gib",
        "2KB",
        "0.0GiB",
        "2GiBB",
        "1e3",
        "+5",
        "-1",
        "101%",
        "5 %",
        "10.0.0.0",
        "10.0.0.0/33",
        "010.0.0.0/8",
        "::ffff:10.0.0.0/104",
        "--port=1",
    ),
    *(
        "--max-num-s=4",
        "--",
        "seed",
        "FLYBALL_ADMIN_TOKEN",
        "1A",
        "kubernetes.io/gpu",
        "requests.a/b",
        "gpu",
        "a" * 254,
        "off",
    ),
)
KEYS = ("cpu", "memory", "ephemeral-storage", "a", "example.com/team", "kubernetes.io/metadata.name", "gateway")
BAD_KEYS = ("nvidia.com/gpu", "a b", "", "/a", "a/b/c", "app.kubernetes.io/name", "A.b/c", "a" * 64)
CACHES: tuple[Document, ...] = (
    {},
    {"size": "10Gi"},
    {"mode": "Claim", "claimName": "mine"},
    {"mode": "Claim", "size": "10Gi"},
    {"mode": "Claim", "size": 2**30, "storageClassName": "fast", "accessMode": "ReadWriteOnce"},
)
POD_SPECS: tuple[Document, ...] = (
    {},
    {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    {"containers": [{"name": "runtime", "securityContext": {"runAsUser": 1000}, "env": [{"name": "A", "value": "b"}]}]},
    {"containers": [{"name": "proxy", "image": "proxy:1", "resources": {"limits": {"memory": "64Mi"}}}]},
    {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "extra", "configMap": {"name": "c"}}]},
    {"containers": [{"name": "runtime", "lifecycle": {"preStop": None}, "readinessProbe": {"periodSeconds": 5}}]},
    {"topologySpreadConstraints": [{"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}]},
    {"runtimeClassName": "nvidia", "priorityClassName": "high", "serviceAccountName": "runtime", "hostNetwork": False},
    {"initContainers": [{"name": "warm", "image": "a:1", "restartPolicy": "Always"}], "schedulerName": "other"},
)


class SpecMaker:
    """Makes specs from a seed.

    Args:
        bad: chance that any one value is not what its schema asks for.
    """

    def __init__(self, seed: int, bad: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._bad = bad

    def document(self) -> Document:
        """Return an LLMDeployment, perhaps with a bad spec; its model is often a plain one."""
        spec = self._object(schema.schema()["properties"]["spec"])
        if self._chance(0.5):
            spec["model"] = {"uri": "hf://org/name", "cache": self._pick(CACHES)}
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": "chat", "namespace": "default"},
            "spec": spec,
        }

    def valid(self) -> Document:
        """Return the next document that the operator takes."""
        while True:
            document = self.document()
            try:
                manifest.from_object(document)
            except SpecError:
                continue
            return document

    def _value(self, node: Schema, name: str) -> Any:
        if self._chance(self._bad):
            return self._bad_value(node)
        if node.get("x-kubernetes-preserve-unknown-fields") and name == "spec":
            return self._pick(POD_SPECS)
        make: dict[str, Callable[[], Any]] = {
            "object": lambda: self._object(node),
            "array": lambda: [
                self._value(node["items"], "") for _ in range(self._random.randint(node.get("minItems", 0), 2))
            ],
            "integer": lambda: self._integer(node),
            "boolean": lambda: self._chance(0.5),
            "string": lambda: self._text(node),
        }
        if "type" not in node:  # an integer or a string
            return self._integer(node) if self._chance(0.4) else self._text(node)
        return make[node["type"]]()

    def _object(self, node: Schema) -> Document:
        if "additionalProperties" in node:
            keys = self._random.sample(KEYS, self._random.randint(0, 2))
            if self._chance(self._bad):
                keys.append(self._pick(BAD_KEYS))
            return {key: self._value(node["additionalProperties"], "") for key in keys}
        properties, required = node["properties"], node.get("required", [])
        chosen = [name for name in properties if name in required or self._chance(0.3)]
        made = {name: self._value(properties[name], name) for name in chosen}
        if self._chance(self._bad):
            made["unknown"] = 1
        if made and self._chance(self._bad):
            del made[self._pick(list(made))]
        return made

    def _integer(self, node: Schema) -> int:
        least, most = node.get("minimum", 0), node.get("maximum", 10**9)
        near = [
            value for value in (least, node.get("default"), most, least + 1, 2, 8, 64, 300) if isinstance(value, int)
        ]
        return int(self._pick([value for value in near if least <= value <= most]))

    def _text(self, node: Schema) -> Any:
        if "enum" in node:
            return self._pick(node["enum"])
        return self._pick([text for text in TEXTS if _fits(node, text)])

    def _bad_value(self, node: Schema) -> Any:
        if node.get("type") == "integer":
            return self._pick([node["minimum"] - 1, node["maximum"] + 1, "5", 2.0, 2.5, True, [], {}])
        return self._pick([*BAD_TEXTS, *TEXTS, 1, -1, 2.0, 10**10, True, [], {}, [1], {"a": 1}])

    def _pick(self, choices: Any) -> Any:
        return self._random.choice(choices)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability


def _fits(node: Schema, text: str) -> bool:
    return bool(re.search(node.get("pattern", ""), text)) and len(text) >= node.get("minLength", 0)
