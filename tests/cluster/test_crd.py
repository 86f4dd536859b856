"""The CRD on a real API server: what it lets through, what it refuses and how it says so, and what kubectl makes of it."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from cluster_kit import Cluster, CommandFailed
from cluster_kit.api import until
from flyball_operator import names, reference
from flyball_operator.spec import schema
from operator_kit.api_server import ApiServer, Verdict

Spec = dict[str, Any]


def llm(spec: Spec, name: str = "chat") -> dict[str, Any]:
    """An LLMDeployment in the namespace default; a spec without a model gets one."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"uri": "hf://org/name"}, **spec},
    }


class Rule(NamedTuple):
    """A CEL rule: the start of its message, and specs on both sides of it."""

    message: str
    takes: list[Spec]
    refuses: list[Spec]


def model(**fields: Any) -> Spec:
    return {"model": {"uri": "hf://org/name", **fields}}


def uri(text: str) -> Spec:
    return {"model": {"uri": text}}


def runtime(**fields: Any) -> Spec:
    return {"runtime": fields}


def env(**fields: Any) -> Spec:
    return runtime(env=[{"name": "A", **fields}])


def cache(**fields: Any) -> Spec:
    return model(cache=fields)


def autoscaling(**fields: Any) -> Spec:
    return {"autoscaling": fields}


def by_load(tuning: str = "Recommend", **fields: Any) -> Spec:
    return {**autoscaling(targetLoadPercent=80, maxReplicas=3, **fields), "tuning": {"mode": tuning, **OBJECTIVE}}


def bounds(**fields: Any) -> Spec:
    return {"tuning": {"bounds": fields}}


def limits(bounds: Spec | None = None, **fields: Any) -> Spec:
    return {"tuning": {"limits": fields} | ({"bounds": bounds} if bounds else {})}


def ingress(*peers: Spec, mode: str = "Managed") -> Spec:
    return {"networkPolicy": {"mode": mode, "ingressFrom": list(peers)}}


def labels(**fields: str) -> Spec:
    return {"podTemplate": {"metadata": {"labels": fields}}}


CPU = {"accelerator": {"count": 0}}
OBJECTIVE = {"objectives": {"ttftP95Milliseconds": 500}}
PROMETHEUS = {"trigger": "Prometheus", "prometheusAddress": "http://p:9090"}
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}
CONFIG_MAP = {"configMapKeyRef": {"name": "c", "key": "k"}}

RULES = [
    Rule(
        "runtime.gpuMemoryUtilizationPercent is a share of the accelerator's memory",
        [runtime(gpuMemoryUtilizationPercent=80), CPU | runtime(kvCacheMemory="1Gi")],
        [CPU | runtime(gpuMemoryUtilizationPercent=80)],
    ),
    Rule(
        "runtime.kvCacheMemory must be less than resources.limits.memory",
        [
            CPU | runtime(kvCacheMemory="1Gi") | {"resources": {"limits": {"memory": "1.1Gi"}}},
            CPU | runtime(kvCacheMemory=1000) | {"resources": {"limits": {"memory": "1001"}}},
            CPU | runtime(kvCacheMemory="1.5GiB") | {"resources": {"limits": {"memory": "1537Mi"}}},
            runtime(kvCacheMemory="4Gi") | {"resources": {"limits": {"memory": "1Gi"}}},
        ],
        [
            CPU | runtime(kvCacheMemory="1Gi") | {"resources": {"limits": {"memory": "1024Mi"}}},
            CPU | runtime(kvCacheMemory="2G") | {"resources": {"limits": {"memory": 1_999_999_999}}},
            CPU | runtime(kvCacheMemory="1.5GiB") | {"resources": {"limits": {"memory": "1536Mi"}}},
        ],
    ),
    Rule(
        "runtime.env has HF_TOKEN, which model.secretRef sets too",
        [model(secretRef={"name": "hub"}), runtime(env=[{"name": "HF_TOKEN", "value": "x"}])],
        [model(secretRef={"name": "hub"}) | runtime(env=[{"name": "HF_TOKEN", "value": "x"}])],
    ),
    Rule(
        "tuning.bounds.maxNumSeqs must stay inside the envelope",
        [bounds(maxNumSeqs={"min": 256, "max": 256}), bounds()],
        [bounds(maxNumSeqs={"max": 257}), bounds(maxNumSeqs={"min": 257})],
    ),
    Rule(
        "tuning.bounds.maxNumBatchedTokens must stay inside the envelope",
        [
            runtime(maxNumBatchedTokens=4096) | bounds(maxNumBatchedTokens={"max": 4096}),
            runtime(maxNumBatchedTokens=4096) | bounds(maxNumSeqs={"min": 2}),
            bounds(maxNumBatchedTokens={"max": 4096}),
        ],
        [
            runtime(maxNumBatchedTokens=4096) | bounds(maxNumBatchedTokens={"max": 4097}),
            runtime(maxNumBatchedTokens=4096) | bounds(maxNumBatchedTokens={"min": 8192}),
        ],
    ),
    Rule(
        "tuning.limits.maxNumSeqs must stay inside the envelope",
        [limits(maxNumSeqs=256), limits(maxNumSeqs=1, stepTimeTargetMilliseconds=25, kvCachePercent=50), limits()],
        [limits(maxNumSeqs=257)],
    ),
    Rule(
        "tuning.limits.maxNumBatchedTokens must stay inside the envelope",
        [limits(maxNumBatchedTokens=4096), runtime(maxNumBatchedTokens=4096) | limits(maxNumBatchedTokens=4096)],
        [runtime(maxNumBatchedTokens=2048) | limits(maxNumBatchedTokens=2049)],
    ),
    Rule(
        "limits.maxNumSeqs is outside bounds.maxNumSeqs",
        [limits({"maxNumSeqs": {"min": 4, "max": 8}}, maxNumSeqs=8), limits({"maxNumSeqs": {}}, maxNumSeqs=8)],
        [limits({"maxNumSeqs": {"min": 4}}, maxNumSeqs=3), limits({"maxNumSeqs": {"max": 8}}, maxNumSeqs=9)],
    ),
    Rule(
        "limits.maxNumBatchedTokens is outside bounds.maxNumBatchedTokens",
        [limits({"maxNumBatchedTokens": {"min": 64}}, maxNumBatchedTokens=64), limits({"maxNumSeqs": {"max": 8}})],
        [limits({"maxNumBatchedTokens": {"min": 64}}, maxNumBatchedTokens=63)],
    ),
    Rule(
        "limits.kvCachePercent is outside bounds.kvCachePercent",
        [limits({"kvCachePercent": {"min": 20, "max": 90}}, kvCachePercent=20)],
        [limits({"kvCachePercent": {"max": 90}}, kvCachePercent=91)],
    ),
    Rule(
        "min is more than max",
        [bounds(maxNumSeqs={"min": 4, "max": 4}, maxNumBatchedTokens={"min": 16}, kvCachePercent={"min": 1, "max": 2})],
        [
            bounds(maxNumSeqs={"min": 5, "max": 4}),
            bounds(maxNumBatchedTokens={"min": 65, "max": 64}),
            bounds(kvCachePercent={"min": 60, "max": 50}),
        ],
    ),
    Rule(
        "Recommend and Auto need at least one objective",
        [
            {"tuning": {"mode": "Disabled", "objectives": {}}},
            {"tuning": {"mode": "Auto", "objectives": {"ttftP95Milliseconds": 1}}},
            {"tuning": {"mode": "Recommend", "objectives": {"interTokenLatencyP95Milliseconds": 1}}},
        ],
        [{"tuning": {"mode": "Auto"}}, {"tuning": {"mode": "Recommend", "objectives": {}}}],
    ),
    Rule(
        "revision works with a model of the Hub only",
        [model(revision="v1.0"), {"model": {"uri": "org/name", "revision": "v1"}}],
        [{"model": {"uri": "oci://registry/model", "revision": "v1"}}],
    ),
    Rule(
        "secretRef is the Hub's token",
        [model(secretRef={"name": "hub", "key": "token"}), {"model": {"uri": "gpt2", "secretRef": {"name": "hub"}}}],
        [{"model": {"uri": "pvc://claim", "secretRef": {"name": "hub"}}}],
    ),
    Rule("file: models are for flyball local", [uri("oci://a:b")], [uri("file:/models"), uri("file:model")]),
    Rule(
        "expected ORG/NAME or hf://ORG/NAME",
        [uri("hf://gpt2"), uri("hf://Qwen/Qwen3-0.6B"), uri("gpt2"), uri("Qwen/Qwen3-0.6B")],
        [uri("hf://a/b/c"), uri("hf:///b"), uri("hf://.a/b"), uri("a/b/c"), uri("a//b"), uri("a/.b")],
    ),
    Rule(
        "expected pvc://CLAIM/FOLDER",
        [uri("pvc://claim"), uri("pvc://my.claim/"), uri("pvc://claim/a/b")],
        [uri("pvc://Claim/a"), uri("pvc:///a"), uri("pvc://-a/b"), uri("pvc://a_b")],
    ),
    Rule(
        "the folder may not contain '..'",
        [uri("pvc://claim/a..b"), uri("pvc://claim/...")],
        [uri("pvc://claim/../x"), uri("pvc://claim/a/..")],
    ),
    Rule(
        "mode Claim needs claimName",
        [cache(mode="Claim", claimName="mine"), cache(mode="Claim", size="10Gi"), cache(size="10Gi")],
        [cache(mode="Claim"), cache(mode="Claim", claimName="mine", size="10Gi")],
    ),
    Rule("claimName works with mode Claim only", [cache(mode="EmptyDir")], [cache(claimName="mine")]),
    Rule(
        "storageClassName and accessMode are for a claim to be created",
        [cache(mode="Claim", size=1000, storageClassName="fast", accessMode="ReadWriteOnce")],
        [
            cache(size="1Gi", storageClassName="fast"),
            cache(accessMode="ReadWriteOnce"),
            cache(mode="Claim", claimName="mine", accessMode="ReadWriteOnce"),
        ],
    ),
    Rule(
        "set kvCacheMemory or gpuMemoryUtilizationPercent, not both",
        [runtime(kvCacheMemory="1Gi")],
        [runtime(kvCacheMemory="1Gi", gpuMemoryUtilizationPercent=50)],
    ),
    Rule(
        "kvCacheMemoryPercent is now called gpuMemoryUtilizationPercent",
        [runtime(gpuMemoryUtilizationPercent=80)],
        [runtime(kvCacheMemoryPercent=80), CPU | runtime(kvCacheMemoryPercent=0)],
    ),
    Rule(
        "maxNumBatchedTokens must be at least maxNumSeqs",
        [runtime(maxNumSeqs=64, maxNumBatchedTokens=64), runtime(maxNumSeqs=4096)],
        [runtime(maxNumBatchedTokens=255), runtime(maxNumSeqs=65, maxNumBatchedTokens=64)],
    ),
    Rule(
        "each is one word, --flag or --flag=value",
        [runtime(extraArgs=["--seed=1", "--enable-prefix-caching", "--seed=-- a=b"])],
        [
            runtime(extraArgs=["seed"]),
            runtime(extraArgs=["--"]),
            runtime(extraArgs=["-h"]),
            runtime(extraArgs=["--=1"]),
        ],
    ),
    Rule(
        "this flag, or one that it abbreviates, is set from other fields",
        [runtime(extraArgs=["--max-num-queued-reqs=5", "--block-size=32"])],
        [
            runtime(extraArgs=["--port=1"]),
            runtime(extraArgs=["--seed=1", "--max-num-s=4"]),
            runtime(extraArgs=["--host"]),
        ],
    ),
    Rule("set value or valueFrom, not both", [env(value=""), env(valueFrom=SECRET)], [env(value="", valueFrom=SECRET)]),
    Rule(
        "the operator sets FLYBALL_ADMIN_TOKEN",
        [runtime(env=[{"name": "HF_ENDPOINT", "value": "http://hub"}])],
        [runtime(env=[{"name": "FLYBALL_ADMIN_TOKEN", "value": "x"}])],
    ),
    Rule(
        "set exactly one of secretKeyRef and configMapKeyRef",
        [env(valueFrom=CONFIG_MAP)],
        [env(valueFrom={}), env(valueFrom=SECRET | CONFIG_MAP)],
    ),
    Rule(
        "set exactly one of secretRef and configMapRef",
        [
            runtime(
                envFrom=[
                    {"secretRef": {"name": "s", "optional": True}},
                    {"prefix": "A_", "configMapRef": {"name": "c"}},
                ]
            )
        ],
        [
            runtime(envFrom=[{"prefix": "A_"}]),
            runtime(envFrom=[{"secretRef": {"name": "s"}, "configMapRef": {"name": "c"}}]),
        ],
    ),
    Rule(
        "names under kubernetes.io and requests. are Kubernetes' own",
        [{"accelerator": {"resourceName": "amd.com/gpu"}}],
        [{"accelerator": {"resourceName": "x.kubernetes.io/gpu"}}, {"accelerator": {"resourceName": "requests.x/gpu"}}],
    ),
    Rule(
        "a request may not be more than its limit",
        [{"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": 1, "memory": "1024Mi"}}}],
        [{"resources": {"requests": {"cpu": "1001m"}, "limits": {"cpu": 1}}}],
    ),
    Rule(
        "known are cpu, memory and ephemeral-storage",
        [{"resources": {"requests": {"ephemeral-storage": "1Gi"}}}],
        [
            {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            {"resources": {"requests": {"gpu": 1}}},
        ],
    ),
    Rule(
        "HPA and KEDA need maxReplicas",
        [autoscaling(mode="HPA", maxReplicas=3), autoscaling(mode="External"), autoscaling()],
        [autoscaling(mode="HPA"), autoscaling(mode="KEDA")],
    ),
    Rule(
        "maxReplicas must be at least minReplicas",
        [autoscaling(mode="KEDA", minReplicas=3, maxReplicas=3)],
        [autoscaling(mode="KEDA", minReplicas=4, maxReplicas=3), autoscaling(minReplicas=2, maxReplicas=1)],
    ),
    Rule(
        "autoscaling.targetLoadPercent is a share of what tuning finds that a replica can serve",
        [by_load(), by_load("Auto"), {"tuning": {"mode": "Disabled"}}],
        [by_load("Disabled"), autoscaling(targetLoadPercent=80)],
    ),
    Rule(
        "pods have no metric for targetLoadPercent, the operator has it; set hpa.metricType to External",
        [by_load(mode="HPA", hpa={"metricType": "External"}), by_load(mode="External")],
        [by_load(mode="HPA"), by_load(mode="HPA", hpa={"metricType": "Pods"})],
    ),
    Rule(
        "pods have no metric for targetLoadPercent, the operator has it; set keda.trigger to Prometheus",
        [by_load(mode="KEDA", keda=PROMETHEUS)],
        [by_load(mode="KEDA"), by_load(mode="KEDA", keda={"trigger": "MetricsAPI"})],
    ),
    Rule(
        "trigger Prometheus needs prometheusAddress",
        [autoscaling(keda=PROMETHEUS)],
        [autoscaling(keda={"trigger": "Prometheus"})],
    ),
    Rule(
        "maxSurge and maxUnavailable are both 0",
        [{"rollout": {"maxSurge": 0, "maxUnavailable": "10%"}}, {"rollout": {"maxSurge": "100%"}}],
        [{"rollout": {"maxSurge": 0}}, {"rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}}],
    ),
    Rule(
        "a key must be NAME or DOMAIN/NAME",
        [labels(**{"a": "", "example.com/team": "llm"}), {"service": {"annotations": {"a.b/C_d": "any text"}}}],
        [
            labels(**{"a b": "c"}),
            {"podTemplate": {"metadata": {"annotations": {"/a": "b"}}}},
            {"service": {"annotations": {"a/b/c": ""}}},
            {"monitoring": {"labels": {"a b": "c"}}},
            ingress({"podSelector": {"matchLabels": {"-": "x"}}}),
        ],
    ),
    Rule(
        "the operator finds its pods by",
        [labels(**{"app.kubernetes.io/part-of": "chat"})],
        [labels(**{f"app.kubernetes.io/{key}": "x"}) for key in ("name", "instance", "component", "managed-by")],
    ),
    Rule(
        "the operator sets app.kubernetes.io/name",
        [{"monitoring": {"labels": {"release": "prometheus", "app.kubernetes.io/part-of": "chat"}}}],
        [
            {"monitoring": {"labels": {f"app.kubernetes.io/{key}": "x"}}}
            for key in ("name", "instance", "component", "managed-by")
        ],
    ),
    Rule(
        "ingressFrom needs mode Managed",
        [ingress({"cidr": "10.0.0.0/8"}), {"networkPolicy": {"mode": "Managed"}}],
        [ingress({"cidr": "10.0.0.0/8"}, mode="Disabled")],
    ),
    Rule(
        "set cidr, or namespaceSelector and podSelector",
        [ingress({"podSelector": {"matchLabels": {}}, "namespaceSelector": {"matchLabels": {"a": "b"}}})],
        [ingress({}), ingress({"cidr": "10.0.0.0/8", "podSelector": {"matchLabels": {}}})],
    ),
    Rule(
        "expected ADDRESS/BITS",
        [ingress({"cidr": "10.0.0.0/8"}, {"cidr": "fd00::/8"})],
        [ingress({"cidr": "10.0.0/8"}), ingress({"cidr": "10.0.0.0/33"})],
    ),
]
"""Every CEL rule on spec that looks at one state; those that compare with the old state are tested below."""


def cases(side: str) -> list[Any]:
    return [pytest.param(rule.message, spec, id=rule.message[:40]) for rule in RULES for spec in getattr(rule, side)]


@pytest.mark.parametrize(("message", "spec"), cases("takes"))
def test_a_rule_lets_through_what_keeps_it(api_server: ApiServer, message: str, spec: Spec) -> None:
    assert api_server.create(llm(spec)).message == ""


@pytest.mark.parametrize(("message", "spec"), cases("refuses"))
def test_a_rule_refuses_what_breaks_it_and_says_why(api_server: ApiServer, message: str, spec: Spec) -> None:
    assert message in api_server.create(llm(spec)).message


def test_what_is_off_is_called_disabled_in_every_field() -> None:
    fields = dict(reference.fields(schema.schema()["properties"]["spec"]))
    choices = {path: field["enum"] for path, field in fields.items() if "enum" in field}
    assert not {path for path, words in choices.items() if {"Off", "None", "No", "False"} & {*words}}
    modes = {path for path in choices if path.endswith((".mode", ".podMonitor"))} - {"model.cache.mode"}
    assert modes and all("Disabled" in choices[path] for path in modes)


def test_every_rule_is_in_the_table() -> None:
    stated = [rule["message"] for _, rule in reference.validations(schema.schema()) if "oldSelf" not in rule["rule"]]
    untested = [
        message
        for message in stated
        if not any(message.startswith(rule.message) for rule in RULES) and not message.startswith("metadata.name")
    ]
    assert not untested
    assert all(any(message.startswith(rule.message) for message in stated) for rule in RULES)


@pytest.mark.parametrize("name", ["a", "a" * 50, "qwen3-0-6b"])
def test_names_that_children_can_have_are_taken(api_server: ApiServer, name: str) -> None:
    assert api_server.create(llm({}, name)).message == ""


@pytest.mark.parametrize("name", ["a" * 51, "3b", "qwen3-0.6b"])
def test_names_that_some_child_could_not_have_are_refused(api_server: ApiServer, name: str) -> None:
    assert "metadata.name must have 1 to 50 lower-case letters" in api_server.create(llm({}, name)).message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replica": 2}, 'unknown field "spec.replica"'),
        (runtime(maxnumseqs=3), 'unknown field "spec.runtime.maxnumseqs"'),
        ({"podTemplate": {"metdata": {}}}, 'unknown field "spec.podTemplate.metdata"'),
        ({"tuning": {"mode": False}}, 'spec.tuning.mode in body must be of type string: "boolean"'),
        ({"tuning": {"mode": "auto"}}, 'Unsupported value: "auto": supported values: "Disabled", "Recommend", "Auto"'),
        ({"tuning": {"mode": "Off"}}, 'supported values: "Disabled", "Recommend", "Auto"'),
        ({"networkPolicy": {"mode": "None"}}, 'supported values: "Disabled", "Managed"'),
        ({"disruption": {"mode": "None"}}, 'supported values: "Managed", "Disabled"'),
        ({"autoscaling": {"mode": "None"}}, 'supported values: "Disabled", "HPA", "KEDA", "External"'),
        ({"replicas": -1}, "spec.replicas in body should be greater than or equal to 0"),
        (runtime(maxNumSeqs=4097), "spec.runtime.maxNumSeqs in body should be less than or equal to 4096"),
        ({"accelerator": {"count": 2}}, "spec.accelerator.count in body should be less than or equal to 1"),
        (runtime(kvCacheMemory=0), "spec.runtime.kvCacheMemory"),
        (runtime(kvCacheMemory="2 GB"), "spec.runtime.kvCacheMemory"),
        (runtime(kvCacheMemory="2gib"), "spec.runtime.kvCacheMemory"),
        (runtime(dtype="BFloat16"), 'supported values: "auto", "bfloat16", "float16", "float32"'),
        (uri("./folder"), "spec.model.uri"),
        (runtime(env=[{"name": "A"}, {"name": "A", "value": "b"}]), 'Duplicate value: {"name":"A"}'),
        (runtime(imagePullSecrets=[{"name": "a"}, {"name": "a"}]), 'Duplicate value: {"name":"a"}'),
        ({"podTemplate": {"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}}, 'Duplicate value: {"name":"a"}'),
        ({"podTemplate": {"spec": {"volumes": [{}]}}}, "spec.podTemplate.spec.volumes[0].name: Required value"),
        (ingress(), "spec.networkPolicy.ingressFrom in body should have at least 1 items"),
        ({"model": {}}, "spec.model.uri: Required value"),
    ],
)
def test_the_schema_refuses_and_names_the_field(api_server: ApiServer, spec: Spec, message: str) -> None:
    assert message in api_server.create(llm({"model": {"uri": "hf://org/name"}} | spec)).message


def test_kubectl_refuses_an_unknown_field_by_itself(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match=r'unknown field "spec\.replica"'):
        cluster.kubectl("apply", "--dry-run=server", "-f", "-", input=json.dumps(llm({"replica": 2})))


def test_the_shortest_spec_is_completed(api_server: ApiServer) -> None:
    spec = api_server.create(llm({})).body["spec"]
    assert spec == schema.with_defaults({"model": {"uri": "hf://org/name"}})
    assert (spec["replicas"], spec["accelerator"]["count"], spec["model"]["cache"]) == (1, 1, {"mode": "EmptyDir"})


def test_a_default_of_an_object_says_nothing_else_than_the_defaults_of_its_fields() -> None:
    for path, field in reference.fields(schema.schema()["properties"]["spec"]):
        for name, value in field["default"].items() if field.get("type") == "object" and "default" in field else ():
            assert field["properties"][name]["default"] == value, f"{path}.{name}"


def test_what_podtemplate_holds_is_kept_nulls_too(api_server: ApiServer) -> None:
    spec = {
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "runtime", "lifecycle": {"preStop": None}}],
    }
    kept = api_server.create(llm({"podTemplate": {"spec": spec}})).body["spec"]["podTemplate"]
    assert kept["spec"] == spec


def test_the_crd_is_small() -> None:
    assert len(json.dumps(schema.crd())) < 256 * 1024


@pytest.fixture
def stored(cluster: Cluster, api_server: ApiServer, namespace: str) -> Iterator[Any]:
    """A function that stores an LLMDeployment, and one more time another state of it."""

    def store(spec: Spec) -> Verdict:
        manifest = llm(spec)
        manifest["metadata"]["namespace"] = namespace
        return api_server.store(manifest)

    yield store


def claim(size: str | int, **fields: str) -> Spec:
    return cache(mode="Claim", size=size, **fields)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (claim("10Gi"), claim("11Gi"), ""),
        (claim("10Gi"), claim("9Gi"), "a claim cannot shrink"),
        (claim(2**30), claim("1023Mi"), "a claim cannot shrink"),
        (claim("1GiB"), claim("1Gi"), ""),
        (claim("1GiB"), claim("1GB"), "a claim cannot shrink"),
        (claim("1Gi", storageClassName="a"), claim("1Gi", storageClassName="b"), "of a claim cannot change"),
        (claim("1Gi"), claim("1Gi", storageClassName="b"), "of a claim cannot change"),
        (claim("1Gi", accessMode="ReadWriteOnce"), claim("1Gi"), "of a claim cannot change"),
        (claim("1Gi", storageClassName="a"), cache(mode="Claim", claimName="mine"), ""),
        (claim("1Gi", storageClassName="a"), cache(), ""),
        (cache(size="2Gi"), cache(size="1Gi"), ""),
    ],
)
def test_a_claim_changes_only_as_kubernetes_lets_it(stored: Any, old: Spec, new: Spec, message: str) -> None:
    assert stored(old).message == ""
    assert message in (answer := stored(new).message) and bool(answer) == bool(message)


def test_a_valid_object_stays_updatable_by_every_field(stored: Any) -> None:
    assert stored({"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}).message == ""
    for rule in RULES:
        for spec in rule.takes:
            assert stored(spec).message == "", rule.message


OLD_GROUP = "ratcheting.flyball.dev"


def crd_of_another_group(**of_uri: Any) -> dict[str, Any]:
    """The CRD under a group of its own; ``of_uri`` replaces parts of the schema of spec.model.uri."""
    crd = copy.deepcopy(schema.crd())
    crd["metadata"] = {"name": f"llmdeployments.{OLD_GROUP}"}
    crd["spec"]["group"] = OLD_GROUP
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    properties["spec"]["properties"]["model"]["properties"]["uri"] |= of_uri
    return crd


@pytest.mark.slow
def test_an_object_older_than_a_rule_can_be_changed_elsewhere(
    cluster: Cluster, api_server: ApiServer, namespace: str
) -> None:
    def old(uri: str, replicas: int = 1, name: str = "chat") -> dict[str, Any]:
        manifest = llm({"model": {"uri": uri}, "replicas": replicas}, name) | {"apiVersion": f"{OLD_GROUP}/v1alpha1"}
        return manifest | {"metadata": {"name": name, "namespace": namespace}}

    lax, strict = crd_of_another_group(**{"x-kubernetes-validations": []}), crd_of_another_group()
    cluster.apply(lax)
    try:
        cluster.wait_established(f"crd/{lax['metadata']['name']}")
        assert api_server.store(old("file:/a")).message == ""
        cluster.apply(strict)
        until(lambda: not api_server.create(old("file:/a", name="new")).accepted, "the rule in force")
        assert api_server.store(old("file:/a", replicas=2)).message == ""
        assert "file: models are for" in api_server.store(old("file:/b", replicas=2)).message
    finally:
        cluster.kubectl("delete", "crd", lax["metadata"]["name"])


def test_kubectl_scale_and_the_columns_of_kubectl_get(cluster: Cluster, stored: Any, namespace: str) -> None:
    stored({"autoscaling": {"mode": "External"}})
    status = {
        "readyReplicas": 2,
        "ready": "2/3",
        "replicas": 3,
        "selector": "app.kubernetes.io/instance=chat",
        "url": "http://chat:8000",
        "tuning": {"state": "Converged", "effective": {"maxNumSeqs": 96, "kvCachePercent": 80}},
        "conditions": [
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": "-",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind, value, reason in (("Ready", "False", "Updating"), ("SLOMet", "True", "Met"))
        ],
    }
    cluster.kubectl(
        *("-n", namespace, "patch", "llmdep", "chat", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": status})),
    )
    cluster.kubectl("-n", namespace, "scale", "llmdep/chat", "--replicas=3")
    head, row = cluster.kubectl("-n", namespace, "get", "llmdep", "chat").splitlines()
    assert head.split() == ["NAME", "MODEL", "READY", "SEQS", "KV%", "SLO", "STATUS", "AGE"]
    assert row.split()[:-1] == ["chat", "hf://org/name", "2/3", "96", "80", "True", "Updating"]
    wide = cluster.kubectl("-n", namespace, "get", "llmdep", "chat", "-o", "wide").splitlines()[1].split()
    assert wide[-4:] == ["Converged", "External", "http://chat:8000", "-"]


def test_the_scale_subresource_is_what_an_autoscaler_needs(cluster: Cluster, stored: Any, namespace: str) -> None:
    stored({"replicas": 2})
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/llmdeployments/chat"
    patch = {"status": {"replicas": 1, "selector": "a=b"}}
    cluster.kubectl(
        "-n", namespace, "patch", "llmdep", "chat", "--subresource=status", "--type=merge", "-p", json.dumps(patch)
    )
    scale = json.loads(cluster.kubectl("get", "--raw", f"{path}/scale"))
    assert (scale["spec"]["replicas"], scale["status"]) == (2, {"replicas": 1, "selector": "a=b"})


def test_kubectl_get_all_shows_it(cluster: Cluster, stored: Any, namespace: str) -> None:
    stored({})
    assert "llmdeployment.flyball.dev/chat" in cluster.kubectl("-n", namespace, "get", "all", "-o", "name")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", ["GROUP:", "flyball.dev", "served by one or more replicas"]),
        (".spec", ["model", "-required-", "autoscaling", "podTemplate", "What should run."]),
        (".spec.autoscaling.mode", ["ENUM:", "KEDA", "External", "ScaledObject"]),
        (".spec.model.cache.size", ["most that a pod may store"]),
        (".status.tuning.state", ["AtLimit", "add replicas"]),
    ],
)
def test_kubectl_explains_the_fields(cluster: Cluster, path: str, words: list[str]) -> None:
    text = " ".join(cluster.kubectl("explain", f"llmdeployment{path}").split())
    assert [word for word in words if word not in text] == []
    assert "<no description>" not in text


def test_every_field_is_explained(cluster: Cluster) -> None:
    shown = set(re.findall(r"(\w+)\t<", cluster.kubectl("explain", "llmdeployment.spec", "--recursive")))
    known = {path.rpartition(".")[2] for path, _ in reference.fields(schema.schema()["properties"]["spec"])}
    assert shown == known
