"""The children built from an LLMDeployment, field by field. tests/cluster/test_children.py has an API server check them all."""

import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from flyball_operator import children, names
from flyball_operator.errors import SpecError
from flyball_operator.spec import LLMDeployment, manifest, size_in_bytes
from flyball_protocol import endpoints

TEXT = """
apiVersion: flyball.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat, namespace: team}
spec:
  model: {uri: "URI"}
"""


PLATFORM = children.Platform(operator_namespace="ops")


def llm(uri: str = "hf://org/name", **spec: Any) -> LLMDeployment:
    (document,) = manifest.read_documents(TEXT.replace("URI", uri), "chat.yaml")
    document["spec"] |= spec
    return manifest.parse_document(document, source="chat.yaml", base=Path("/srv"))


def build(uri: str = "hf://org/name", **spec: Any) -> dict[str, Any]:
    return children.deployment(llm(uri, **spec), PLATFORM, admin_token_secret="chat-admin-token")


def child(kind: str, platform: children.Platform = PLATFORM, **spec: Any) -> dict[str, Any] | None:
    """The child of a kind, if it is built."""
    built = children.build(llm(**spec), platform, admin_token_secret="secret")
    return next((one for one in built if one["kind"] == kind), None)


def spec_of(kind: str, **spec: Any) -> Any:
    found = child(kind, **spec)
    assert found is not None
    return found["spec"]


def pod(**spec: Any) -> Any:
    return build(**spec)["spec"]["template"]["spec"]


def by(key: str, entries: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {entry[key]: entry for entry in entries}


def container(built: dict[str, Any]) -> dict[str, Any]:
    (found,) = built["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_selector_matches_the_pods_and_replicas_are_the_specs() -> None:
    built = build(replicas=3)
    assert built["metadata"]["namespace"] == "team"
    assert built["spec"]["replicas"] == 3
    assert built["spec"]["selector"]["matchLabels"].items() <= built["spec"]["template"]["metadata"]["labels"].items()


def test_settings_become_arguments_one_word_each() -> None:
    runtime = {
        "dtype": "bfloat16",
        "maxModelLen": 512,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 64,
        "gpuMemoryUtilizationPercent": 85,
    }
    args = container(
        build(runtime={**runtime, "extraArgs": ["--seed=1"]}, model={"uri": "hf://org/name", "revision": "v2"})
    )["args"]
    assert args[:2] == ["serve", "org/name"]
    assert args[-1] == "--seed=1"
    expected = (
        "--revision=v2 --dtype=bfloat16 --max-model-len=512 --max-num-seqs=8 --max-num-batched-tokens=64 --device=cuda"
    )
    assert {*expected.split(), "--gpu-memory-utilization=0.85", "--served-model-name=chat"} <= set(args)


def test_settings_left_out_are_left_to_the_runtime() -> None:
    flags = {argument.partition("=")[0] for argument in container(build())["args"]}
    assert not flags & {"--revision", "--max-model-len", "--gpu-memory-utilization", "--kv-cache-memory-bytes"}
    assert "--max-num-batched-tokens" not in flags


def test_without_accelerators_nothing_is_asked_of_the_node_but_the_given_resources() -> None:
    found = container(
        build(accelerator={"count": 0}, runtime={"kvCacheMemory": "1Gi"}, resources={"limits": {"memory": "4Gi"}})
    )
    assert found["resources"] == {"limits": {"memory": "4Gi"}}
    assert {"--device=cpu", f"--kv-cache-memory-bytes={2**30}"} <= set(found["args"])


def test_an_accelerator_is_a_limit_of_the_container() -> None:
    assert container(build())["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_the_admin_token_comes_from_a_secret_and_never_from_arguments() -> None:
    found = container(build())
    reference = {"name": "chat-admin-token", "key": "token"}
    assert {"name": endpoints.ADMIN_TOKEN_ENV, "valueFrom": {"secretKeyRef": reference}} in found["env"]
    label = {"apiVersion": "v1", "fieldPath": "metadata.labels['pod-template-hash']"}
    assert {"name": endpoints.TEMPLATE_ENV, "valueFrom": {"fieldRef": label}} in found["env"]
    assert not any("token" in argument for argument in found["args"] if "batched" not in argument)


def test_the_runtime_takes_its_port_from_a_container_that_starts_before_it_and_ends_after_it() -> None:
    found = pod(service={"port": 8080}, runtime={"image": "mine:1", "imagePullPolicy": "Always"})
    (listener,) = found["initContainers"]
    assert (listener["name"], listener["restartPolicy"]) == ("listener", "Always")
    assert (listener["image"], listener["imagePullPolicy"]) == ("mine:1", "Always")
    assert {f"--port={endpoints.API_PORT}", "--service=chat:8080"} <= set(listener["args"])
    (mount,) = listener["volumeMounts"]
    runtime = container(build())
    path = next(one["value"] for one in runtime["env"] if one["name"] == endpoints.LISTENER_ENV)
    assert f"--socket={path}" in listener["args"] and Path(path).is_relative_to(mount["mountPath"])
    assert mount in runtime["volumeMounts"]
    assert listener["securityContext"] == runtime["securityContext"]


def test_a_pod_template_reaches_the_listener_by_its_name() -> None:
    more = {"name": "listener", "resources": {"limits": {"cpu": "1"}}}
    other = {"name": "other", "image": "other:1"}
    listener, added = pod(podTemplate={"spec": {"initContainers": [more, other]}})["initContainers"]
    assert listener["resources"]["limits"] == {"cpu": "1", "memory": "192Mi"} and listener["command"] == ["flyball"]
    assert added == other


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"])
def test_caches_are_where_the_container_may_write(variable: str) -> None:
    found = container(build())
    folder = next(one["value"] for one in found["env"] if one["name"] == variable)
    mounts = [one["mountPath"] for one in found["volumeMounts"] if not one.get("readOnly")]
    assert any(Path(folder).is_relative_to(mount) for mount in mounts), folder


def test_the_pod_outlives_pre_stop_and_drain() -> None:
    built = build(rollout={"drain": {"preStopSeconds": 5, "timeoutSeconds": 30}})
    assert built["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 45
    assert container(built)["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert {"--drain-timeout=30", "--drain-quiet=5"} <= set(container(built)["args"])
    assert "lifecycle" not in container(build(rollout={"drain": {"preStopSeconds": 0}}))


def test_a_slow_start_is_allowed_for_as_long_as_the_spec_says() -> None:
    built = build(startupTimeoutSeconds=600)
    probe = container(built)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600
    assert built["spec"]["progressDeadlineSeconds"] > 600


def test_the_pod_runs_without_privileges_on_a_read_only_root() -> None:
    pod, found = build()["spec"]["template"]["spec"], container(build())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert found["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["name"] for mount in found["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("uri", "volume", "mount", "argument"),
    [
        (
            "pvc://claim/llama",
            {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}},
            "/mnt/model",
            "/mnt/model/llama",
        ),
        (
            "oci://r/llama:8b",
            {"image": {"reference": "r/llama:8b", "pullPolicy": "IfNotPresent"}},
            "/mnt/model",
            "/mnt/model",
        ),
        ("file:llama", {"hostPath": {"path": "/srv/llama", "type": "Directory"}}, "/srv/llama", "/srv/llama"),
    ],
)
def test_models_on_volumes_are_mounted_read_only(uri: str, volume: dict[str, Any], mount: str, argument: str) -> None:
    built = build(uri)
    assert {"name": "model", **volume} in built["spec"]["template"]["spec"]["volumes"]
    assert {"name": "model", "mountPath": mount, "readOnly": True} in container(built)["volumeMounts"]
    assert container(built)["args"][1] == argument


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2Gi", 2**31),
        ("500m", 1),
        ("1.5k", 1500),
        ("7", 7),
        (7, 7),
        ("0.5Ki", 512),
        ("1T", 10**12),
        ("2GiB", 2**31),
        ("1.5kB", 1500),
        ("7B", 7),
    ],
)
def test_quantities_of_memory(text: str | int, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["2 GiB", "2gib", "", "Gi", "B", "two"])
def test_what_is_no_quantity_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        size_in_bytes(text)


# --- every child


def test_every_child_carries_the_labels_and_lives_beside_its_deployment() -> None:
    built = children.build(
        llm(
            replicas=2,
            autoscaling={"mode": "KEDA", "maxReplicas": 3},
            networkPolicy={"mode": "Managed"},
            model={"uri": "hf://a/b", "cache": {"mode": "Claim", "size": "1Gi"}},
        ),
        PLATFORM,
        admin_token_secret="secret",
        boot_prior={"revision": 1},
    )
    assert {one["kind"]: one["metadata"]["name"] for one in built} == {
        **dict.fromkeys(
            ("Deployment", "Service", "ScaledObject", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"), "chat"
        ),
        "PersistentVolumeClaim": "chat-cache",
        "ConfigMap": "chat-boot-prior",
    }
    assert all(one["metadata"]["labels"] == names.labels("chat") for one in built)
    assert {one["metadata"]["namespace"] for one in built} == {"team"}


def test_the_shortest_spec_has_a_deployment_a_service_and_a_pod_monitor() -> None:
    built = children.build(llm(), PLATFORM, admin_token_secret="secret")
    assert [one["kind"] for one in built] == ["Deployment", "Service", "PodMonitor"]


def test_a_token_of_another_uid_or_key_is_in_another_secret() -> None:
    made = {names.admin_token_secret("chat", uid, key) for uid in ("u1", "u2") for key in ("k1", "k2")}
    assert len(made) == 4 and all(name.startswith("chat-admin-") for name in made)
    assert len(names.admin_token_secret("a" * 50, "u", "k")) <= 253


# --- the pod template


def test_a_users_pod_template_is_merged_by_names() -> None:
    given = {
        "nodeSelector": {"pool": "gpu"},
        "securityContext": {"runAsUser": 1000},
        "containers": [
            {"name": "proxy", "image": "proxy:1", "env": [{"name": "A", "value": "b"}]},
            {
                "name": "runtime",
                "env": [{"name": "HF_HOME", "value": "/data"}, {"name": "EXTRA", "value": "1"}],
                "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                "readinessProbe": {"periodSeconds": 7},
                "resources": {"limits": {"rdma/hca": 1}},
            },
        ],
        "volumes": [{"name": "extra", "emptyDir": {}}],
    }
    merged = pod(podTemplate={"metadata": {"annotations": {"a": "b"}, "labels": {"team": "x"}}, "spec": given})
    assert merged["nodeSelector"] == {"pool": "gpu"}
    assert merged["securityContext"]["runAsUser"] == 1000 and merged["securityContext"]["runAsNonRoot"] is True
    runtime, proxy = merged["containers"]
    assert proxy == given["containers"][0]
    env = by("name", runtime["env"])
    assert (env["HF_HOME"]["value"], env["EXTRA"]["value"]) == ("/data", "1")
    assert env[endpoints.ADMIN_TOKEN_ENV]["valueFrom"]
    assert {"/tmp", "/dev/shm", "/extra"} <= by("mountPath", runtime["volumeMounts"]).keys()
    assert runtime["readinessProbe"] == pod()["containers"][0]["readinessProbe"] | {"periodSeconds": 7}
    assert runtime["resources"]["limits"] == {"nvidia.com/gpu": 1, "rdma/hca": 1}
    assert [volume["name"] for volume in merged["volumes"]] == [
        *(volume["name"] for volume in pod()["volumes"]),
        "extra",
    ]
    metadata = build(podTemplate={"metadata": {"labels": {"team": "x"}}})["spec"]["template"]["metadata"]
    assert metadata["labels"] == names.labels("chat") | {"team": "x"}


def test_lists_without_names_are_replaced_and_a_volume_has_one_source() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "mine"}}
    spec = {
        "containers": [{"name": "runtime", "args": ["serve", "x"]}],
        "volumes": [{"name": "cache", **claim}],
        "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}],
    }
    merged = pod(podTemplate={"spec": spec})
    assert merged["containers"][0]["args"] == ["serve", "x"]
    assert by("name", merged["volumes"])["cache"] == {"name": "cache", **claim}
    assert [one["topologyKey"] for one in merged["topologySpreadConstraints"]] == ["kubernetes.io/hostname", "zone"]


def test_a_null_removes_what_we_set() -> None:
    runtime = {
        "name": "runtime",
        "lifecycle": {"preStop": {"sleep": None, "exec": {"command": ["true"]}}},
        "resources": None,
    }
    merged = pod(podTemplate={"spec": {"containers": [runtime], "topologySpreadConstraints": None}})
    assert merged["containers"][0]["lifecycle"] == {"preStop": {"exec": {"command": ["true"]}}}
    assert "resources" not in merged["containers"][0] and "topologySpreadConstraints" not in merged


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"securityContext": 3}, ["spec.podTemplate.spec.securityContext", "is 3", "a mapping"]),
        ({"topologySpreadConstraints": "x"}, ["topologySpreadConstraints", "a list"]),
        ({"topologySpreadConstraints": [{"maxSkew": 1}]}, ["topologySpreadConstraints[0]", "topologyKey"]),
        ({"containers": [{"name": "runtime", "env": [3]}]}, ["containers[runtime].env[0]", "name"]),
        ({"containers": [{"name": "runtime", "ports": {}}]}, ["containers[runtime].ports", "a list"]),
    ],
)
def test_a_pod_template_that_cannot_be_merged_is_refused_by_its_path(spec: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        build(podTemplate={"spec": spec})
    assert [word for word in words if word not in str(refused.value)] == []


def test_variables_of_the_spec_replace_ours_and_never_come_twice() -> None:
    source = {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}
    env = [{"name": "HF_HOME", "value": "/data"}, {"name": "B", "valueFrom": source}, {"name": "C"}]
    found = container(build(runtime={"env": env, "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}}]}))
    assert len(by("name", found["env"])) == len(found["env"])
    assert by("name", found["env"])["HF_HOME"] == {"name": "HF_HOME", "value": "/data"}
    assert by("name", found["env"])["B"] == {"name": "B", "valueFrom": source}
    assert by("name", found["env"])["C"] == {"name": "C", "value": ""}
    assert found["envFrom"] == [{"prefix": "P_", "configMapRef": {"name": "c"}}]


def test_api_keys_are_a_file_of_the_secret_that_the_spec_names() -> None:
    built = build(runtime={"apiKeysSecretRef": {"name": "clients"}})
    volume = by("name", built["spec"]["template"]["spec"]["volumes"])["api-keys"]
    assert volume["secret"] == {"secretName": "clients", "items": [{"key": "keys", "path": "keys"}]}
    mount = by("name", container(built)["volumeMounts"])["api-keys"]
    assert mount["readOnly"] and "subPath" not in mount, "a subPath is not updated when the Secret changes"
    assert f"--api-key-file={mount['mountPath']}/keys" in container(built)["args"]
    assert "api-key" not in json.dumps(build()), "without the field, every request is served"


def test_the_hubs_token_comes_from_the_secret_that_the_spec_names() -> None:
    found = container(build(model={"uri": "hf://a/b", "secretRef": {"name": "hub"}}))
    reference = {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}
    assert by("name", found["env"])["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": reference}


def test_image_settings_are_the_specs() -> None:
    runtime = {"image": "r/x:1", "imagePullPolicy": "Never", "imagePullSecrets": [{"name": "p"}]}
    found = pod(runtime=runtime)
    assert (found["containers"][0]["image"], found["containers"][0]["imagePullPolicy"]) == ("r/x:1", "Never")
    assert found["imagePullSecrets"] == [{"name": "p"}]
    assert "imagePullPolicy" not in pod()["containers"][0]
    assert pod()["containers"][0]["image"] == PLATFORM.runtime_image


def test_replicas_spread_over_nodes_softly_and_old_templates_do_not_count() -> None:
    (spread,) = pod()["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["matchLabelKeys"] == ["pod-template-hash"]
    assert spread["labelSelector"]["matchLabels"].items() <= names.labels("chat").items()


def test_the_rollout_is_the_specs_and_its_deadline_outlasts_a_slow_start() -> None:
    built = build(rollout={"maxSurge": "25%", "maxUnavailable": 1}, startupTimeoutSeconds=600)["spec"]
    assert built["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 1}
    assert built["progressDeadlineSeconds"] == 660
    assert build(rollout={"progressDeadlineSeconds": 90})["spec"]["progressDeadlineSeconds"] == 90


# --- what new pods start from


def test_a_new_boot_prior_changes_the_config_map_and_no_pod() -> None:
    old, new = (
        by("kind", children.build(llm(), PLATFORM, admin_token_secret="s", boot_prior={"revision": n})) for n in (1, 2)
    )
    assert old["Deployment"] == new["Deployment"]
    assert json.loads(new["ConfigMap"]["data"]["limits.json"]) == {"revision": 2}
    assert child("ConfigMap") is None


def test_pods_look_for_the_boot_prior_where_it_is_mounted_and_start_without_one() -> None:
    found = pod()
    volume = by("name", found["volumes"])["boot-prior"]
    mount = by("name", found["containers"][0]["volumeMounts"])["boot-prior"]
    assert volume["configMap"] == {"name": "chat-boot-prior", "optional": True}
    assert f"--boot-prior={mount['mountPath']}/limits.json" in found["containers"][0]["args"]


# --- cache


@pytest.mark.parametrize(
    ("cache", "volume", "claim"),
    [
        ({}, {"emptyDir": {}}, None),
        ({"size": "5GiB"}, {"emptyDir": {"sizeLimit": "5Gi"}}, None),
        ({"mode": "Claim", "claimName": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}, None),
        (
            {"mode": "Claim", "size": "5GiB", "storageClassName": "fast"},
            {"persistentVolumeClaim": {"claimName": "chat-cache"}},
            {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "5Gi"}},
                "storageClassName": "fast",
            },
        ),
    ],
)
def test_the_cache_is_where_the_spec_says(cache: Any, volume: Any, claim: Any) -> None:
    model = {"uri": "hf://a/b", "cache": cache}
    assert by("name", pod(model=model)["volumes"])["cache"] == {"name": "cache", **volume}
    made = child("PersistentVolumeClaim", model=model)
    assert (made and made["spec"]) == claim


# --- service, disruption


def test_the_service_has_the_api_port_only() -> None:
    built = child("Service", service={"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}})
    assert built is not None and built["metadata"]["annotations"] == {"a": "b"}
    (port,) = built["spec"]["ports"]
    assert (built["spec"]["type"], port["port"], port["targetPort"]) == ("LoadBalancer", 80, names.API_PORT_NAME)
    assert built["spec"]["selector"].items() <= names.labels("chat").items()


@pytest.mark.parametrize(
    ("spec", "is_built"),
    [({"replicas": 1}, False), ({"replicas": 2}, True), ({"replicas": 2, "disruption": {"mode": "Disabled"}}, False)],
)
def test_a_disruption_budget_is_there_from_two_replicas_on(spec: Any, is_built: bool) -> None:
    assert (child("PodDisruptionBudget", **spec) is not None) == is_built


def test_a_disruption_budget_cannot_hold_up_a_drain_for_ever() -> None:
    built = spec_of("PodDisruptionBudget", replicas=3)
    assert built["maxUnavailable"] == 1 and "minAvailable" not in built
    assert built["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


# --- autoscaling

TARGET = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "chat"}


@pytest.mark.parametrize("mode", ["Disabled", "External"])
def test_nobody_scales_unless_asked(mode: str) -> None:
    assert child("HorizontalPodAutoscaler", autoscaling={"mode": mode}) is None
    assert child("ScaledObject", autoscaling={"mode": mode}) is None


def test_an_hpa_takes_the_larger_of_queue_and_running_ratio_per_pod() -> None:
    built = spec_of("HorizontalPodAutoscaler", autoscaling={"mode": "HPA", "minReplicas": 2, "maxReplicas": 5})
    assert (built["scaleTargetRef"], built["minReplicas"], built["maxReplicas"]) == (TARGET, 2, 5)
    assert [(one["pods"]["metric"]["name"], one["pods"]["target"]) for one in built["metrics"]] == [
        (endpoints.REQUESTS_WAITING, {"type": "AverageValue", "averageValue": "4"}),
        (endpoints.REQUESTS_RUNNING_RATIO, {"type": "AverageValue", "averageValue": "800m"}),
    ]


def test_an_hpa_on_external_metrics_names_the_series_of_this_deployment_alone() -> None:
    autoscaling = {"mode": "HPA", "maxReplicas": 5, "hpa": {"metricType": "External"}, "targetRunningPercent": 100}
    waiting, running = (
        one["external"] for one in spec_of("HorizontalPodAutoscaler", autoscaling=autoscaling)["metrics"]
    )
    labels = {"namespace": "team", "app_kubernetes_io_instance": "chat"}
    assert waiting["metric"] == {"name": endpoints.REQUESTS_WAITING, "selector": {"matchLabels": labels}}
    assert running["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_keda_sums_over_the_pods_at_their_own_port() -> None:
    autoscaling = {"mode": "KEDA", "minReplicas": 2, "maxReplicas": 5, "targetQueueDepth": 7}
    built = spec_of("ScaledObject", autoscaling=autoscaling, service={"port": 80})
    assert (built["scaleTargetRef"], built["minReplicaCount"], built["maxReplicaCount"]) == (TARGET, 2, 5)
    waiting, running = (trigger["metadata"] for trigger in built["triggers"])
    assert {trigger["metricType"] for trigger in built["triggers"]} == {"AverageValue"}
    url = "http://chat.team.svc:8000/metrics"  # KEDA looks the Service's endpoints up, whose port is the pods'
    assert (waiting["url"], waiting["valueLocation"], waiting["targetValue"]) == (url, endpoints.REQUESTS_WAITING, "7")
    assert (running["valueLocation"], running["targetValue"]) == (endpoints.REQUESTS_RUNNING_RATIO, "0.8")
    assert (waiting["aggregateFromKubeServiceEndpoints"], waiting["aggregationType"]) == ("true", "sum")
    assert all(isinstance(value, str) for value in {**waiting, **running}.values()), "KEDA takes strings only"


def test_keda_asks_prometheus_for_this_deployment_alone_and_nothing_is_not_zero() -> None:
    keda = {"trigger": "Prometheus", "prometheusAddress": "http://p:9090", "pollingSeconds": 5}
    built = spec_of("ScaledObject", autoscaling={"mode": "KEDA", "maxReplicas": 5, "keda": keda})
    asked = built["triggers"][0]["metadata"]
    assert built["pollingInterval"] == 5
    assert asked["query"] == 'sum(flyball_requests_waiting{namespace="team",app_kubernetes_io_instance="chat"})'
    assert (asked["serverAddress"], asked["threshold"], asked["ignoreNullValues"]) == ("http://p:9090", "4", "false")


TUNED = {"mode": "Recommend", "objectives": {"ttftP95Milliseconds": 500}}
BY_LOAD = {"maxReplicas": 5, "targetLoadPercent": 85}


def test_keda_asks_the_operators_series_for_the_load_where_the_spec_has_a_target() -> None:
    keda = {"trigger": "Prometheus", "prometheusAddress": "http://p:9090"}
    built = spec_of("ScaledObject", tuning=TUNED, autoscaling={**BY_LOAD, "mode": "KEDA", "keda": keda})
    load = built["triggers"][2]
    assert (load["name"], load["metricType"], load["metadata"]["threshold"]) == (
        "tuner-load-replicas",
        "AverageValue",
        "0.85",
    )
    assert load["metadata"]["query"] == 'sum(flyball_tuner_load_replicas{namespace="team",llmdeployment="chat"})'


def test_an_hpa_asks_the_operators_series_for_the_load_where_the_spec_has_a_target() -> None:
    autoscaling = {**BY_LOAD, "mode": "HPA", "hpa": {"metricType": "External"}}
    load = spec_of("HorizontalPodAutoscaler", tuning=TUNED, autoscaling=autoscaling)["metrics"][2]["external"]
    labels = {"namespace": "team", "llmdeployment": "chat"}
    assert load["metric"] == {"name": "flyball_tuner_load_replicas", "selector": {"matchLabels": labels}}
    assert load["target"] == {"type": "AverageValue", "averageValue": "850m"}


def test_a_direction_of_behavior_that_is_given_replaces_ours_whole() -> None:
    down = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Percent", "value": 50, "periodSeconds": 15}]}
    autoscaling = {"mode": "HPA", "maxReplicas": 5, "behavior": {"scaleDown": down}}
    behavior = spec_of("HorizontalPodAutoscaler", autoscaling=autoscaling)["behavior"]
    assert behavior["scaleDown"] == down
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 30


def test_what_the_cluster_has_no_kind_for_is_not_built_but_told() -> None:
    bare = children.Platform(keda=False, pod_monitor=False)
    spec = {"autoscaling": {"mode": "KEDA", "maxReplicas": 2}, "monitoring": {"podMonitor": "Enabled"}}
    assert child("ScaledObject", bare, **spec) is None and child("PodMonitor", bare, **spec) is None
    keda, pod_monitor = children.missing_kinds(llm(**spec), bare)
    assert "install KEDA" in keda and "Prometheus operator" in pod_monitor
    assert list(children.missing_kinds(llm(), bare)) == [], "Auto is content without"
    assert list(children.missing_kinds(llm(**spec), PLATFORM)) == []


# --- monitoring


def test_a_pod_monitor_scrapes_the_api_port_and_labels_series_with_the_deployment() -> None:
    built = spec_of("PodMonitor", monitoring={"intervalSeconds": 7})
    (endpoint,) = built["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == (
        names.API_PORT_NAME,
        endpoints.METRICS_PATH,
        "7s",
    )
    assert built["podTargetLabels"] == [names.INSTANCE_LABEL]
    assert child("PodMonitor", monitoring={"podMonitor": "Disabled"}) is None


def test_a_pod_monitor_has_the_labels_by_which_a_prometheus_selects_it() -> None:
    built = child("PodMonitor", monitoring={"labels": {"release": "prometheus"}})
    assert built is not None and built["metadata"]["labels"] == {**names.labels("chat"), "release": "prometheus"}


# --- network policy


class Source(NamedTuple):
    """Where a connection comes from: a pod of a namespace, or an address outside."""

    namespace: str = ""
    labels: Mapping[str, str] = MappingProxyType({})
    address: str = "192.0.2.1"


def allowed(policy: Any, source: Source, port: int) -> bool:
    """Whether an ingress policy lets a connection through, by the rules of networking.k8s.io/v1."""
    return any(
        any(one["port"] == port for one in rule["ports"])
        and ("from" not in rule or any(matches(peer, source) for peer in rule["from"]))
        for rule in policy["ingress"]
    )


def matches(peer: Any, source: Source) -> bool:
    if "ipBlock" in peer:
        return ipaddress.ip_address(source.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    namespace = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "team"}})
    pods = peer.get("podSelector", {"matchLabels": {}})
    has = {"kubernetes.io/metadata.name": source.namespace}
    return namespace["matchLabels"].items() <= has.items() and pods["matchLabels"].items() <= source.labels.items()


OPERATOR = Source("ops", dict(names.OPERATOR_LABELS))
STRANGER = Source("elsewhere", {"app": "curl"})
NEIGHBOUR = Source("team", {"app": "web"})


def test_without_a_policy_nothing_is_closed() -> None:
    assert child("NetworkPolicy") is None


def test_the_admin_port_is_the_operators_alone() -> None:
    policy = spec_of("NetworkPolicy", networkPolicy={"mode": "Managed"})
    assert policy["podSelector"]["matchLabels"] == names.selector_labels("chat") and policy["policyTypes"] == [
        "Ingress"
    ]
    impostor = Source("elsewhere", dict(names.OPERATOR_LABELS))
    assert allowed(policy, OPERATOR, endpoints.ADMIN_PORT)
    for source in (STRANGER, NEIGHBOUR, impostor, Source("ops", {"app": "x"}), Source("team", names.labels("chat"))):
        assert not allowed(policy, source, endpoints.ADMIN_PORT), source
        assert allowed(policy, source, endpoints.API_PORT), "the API is open unless the spec says for whom"
    assert not allowed(policy, OPERATOR, 22)


@pytest.mark.parametrize(
    ("peer", "lets_in", "keeps_out"),
    [
        ({"podSelector": {"matchLabels": {"app": "web"}}}, NEIGHBOUR, Source("elsewhere", {"app": "web"})),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}, STRANGER, NEIGHBOUR),
        ({"cidr": "10.0.0.0/8"}, Source(address="10.1.1.1"), Source(address="11.1.1.1")),
    ],
)
def test_the_api_port_is_for_those_whom_the_spec_names(peer: Any, lets_in: Source, keeps_out: Source) -> None:
    policy = spec_of("NetworkPolicy", networkPolicy={"mode": "Managed", "ingressFrom": [peer]})
    assert allowed(policy, lets_in, endpoints.API_PORT) and not allowed(policy, keeps_out, endpoints.API_PORT)
    replica = Source("team", names.labels("chat"))
    assert allowed(policy, replica, endpoints.API_PORT), "replicas relay for one that is being restarted"
    assert not allowed(policy, lets_in, endpoints.ADMIN_PORT)
