"""Manifests: what is accepted, what is filled in, and what each kind of mistake is answered with."""

from pathlib import Path

import pytest

from flyball_operator.errors import SpecError
from flyball_operator.spec import ClaimModel, FolderModel, HubModel, ImageModel, LLMDeployment, manifest

HEAD = "apiVersion: flyball.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: chat}\n"
MODEL = "model: {uri: hf://org/name}"
AUTO = "tuning: {mode: Auto, objectives: {ttftP95Milliseconds: 9}}"


def parse(text: str, base: Path = Path("/srv/manifests")) -> list[LLMDeployment]:
    return manifest.parse(text, source="chat.yaml", base=base)


def parse_spec(*fields: str) -> LLMDeployment:
    body = "".join(
        f"  {field}\n" for field in (fields if any(f.startswith("model") for f in fields) else (MODEL, *fields))
    )
    return parse(f"{HEAD}spec:\n{body}")[0]


def test_the_shortest_manifest_is_completed_with_the_schemas_defaults() -> None:
    deployment = parse_spec()
    spec = deployment.spec
    assert (deployment.name, deployment.namespace, deployment.served_name) == ("chat", "default", "chat")
    assert (spec.replicas, spec.accelerator.count, spec.runtime.max_num_seqs) == (1, 1, 256)
    assert (spec.tuning.mode, spec.tuning.interval_seconds) == ("Disabled", 15)
    assert (spec.rollout.drain.pre_stop_seconds, spec.rollout.drain.timeout_seconds) == (10, 120)


def test_a_partly_given_object_keeps_the_other_defaults() -> None:
    assert parse_spec("runtime: {maxNumSeqs: 8}").spec.runtime.dtype == "auto"


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("hf://org/name", HubModel("org/name", None)),
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B", None)),
        ("gpt2", HubModel("gpt2", None)),
        ("pvc://claim/models/llama", ClaimModel("claim", "models/llama")),
        ("pvc://claim", ClaimModel("claim", "")),
        ("oci://registry.example/llama:8b", ImageModel("registry.example/llama:8b")),
        ("file:/models/llama", FolderModel(Path("/models/llama"))),
        ("file:///models/llama", FolderModel(Path("/models/llama"))),
        ("file:./demo/checkpoint", FolderModel(Path("/srv/manifests/demo/checkpoint"))),
        ("file:../checkpoint", FolderModel(Path("/srv/checkpoint"))),
    ],
)
def test_model_uris_are_taken_apart(uri: str, source: object) -> None:
    assert parse_spec(f"model: {{uri: '{uri}'}}").model_source == source


def test_several_documents_make_several_deployments_and_empty_ones_none() -> None:
    document = f"{HEAD}spec: {{{MODEL}}}\n"
    text = f"---\n{document}---\n---\n{document.replace('chat', 'code')}"
    assert [deployment.name for deployment in parse(text)] == ["chat", "code"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no document", "LLMDeployment"]),
        ("a: [1", ["not valid YAML", "line"]),
        ("- a\n", ["expected a mapping"]),
        ("spec: 1\nspec: 2\n", ["'spec'", "line 1", "line 2"]),
        ("!!python/object:os.system {}\n", ["not valid YAML"]),
        ("x" * 1_000_001, ["more than 1000000 characters"]),
        (HEAD, ["spec is missing"]),
        (HEAD.replace("LLMDeployment", "Deployment") + "spec: {}\n", ["kind", "'Deployment'", "LLMDeployment"]),
        (HEAD.replace("v1alpha1", "v1") + "spec: {}\n", ["apiVersion", "flyball.dev/v1", "v1alpha1"]),
        (HEAD + "specs: {}\nspec: {}\n", ["specs is not a field"]),
        (HEAD.replace("{name: chat}", "{}") + "spec: {}\n", ["metadata.name is missing"]),
        (HEAD.replace("chat", "Chat_1") + "spec: {}\n", ["metadata.name", "'Chat_1'", "lower-case"]),
        (HEAD.replace("chat", "c" * 51) + "spec: {}\n", ["1 to 50"]),
        (HEAD + "spec: {}\n", ["spec.model is missing"]),
        (HEAD + "spec: 3\n", ["spec is 3", "a mapping is expected"]),
        (HEAD + '"\\e[31mred\\nforged": 1\n', [r"['\x1b[31mred\nforged'] is not a field"]),
        (HEAD + f"spec: {{{'x' * 1000}: 1}}\n", ["x'... (936 more characters)] is not a field"]),
        (
            HEAD + f"spec: {{{MODEL}, {', '.join(f'f{i}: 1' for i in range(50))}}}\n",
            ["spec has more that are not fields: 'f8'"],
        ),
        (HEAD + "".join(f"f{i}: 1\n" for i in range(50)), ["31 more problems"]),
        (2 * (HEAD + "spec: {model: {uri: hf://a/b}}\n---\n"), ["'chat'", "two documents"]),
    ],
)
def test_a_malformed_document_is_refused_with_a_reason(text: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        parse(text)
    for word in ["chat.yaml", *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("replicas: -1", ["spec.replicas is -1", "0"]),
        ("replicas: 2.5", ["spec.replicas is 2.5", "an integer"]),
        ("replicas: 2.0", ["spec.replicas is 2.0", "without a point: 2"]),
        ("replicas:", ["spec.replicas is empty", "an integer"]),
        ("replica: 2", ["spec.replica is not a field", "did you mean 'replicas'?"]),
        ("flavour: 2", ["spec.flavour is not a field", "known are", "tuning"]),
        ("runtime: {maxNumSeqs: 5000}", ["spec.runtime.maxNumSeqs is 5000", "4096"]),
        ("runtime: {maxnumseqs: 5}", ["did you mean 'maxNumSeqs'?"]),
        ("runtime: {dtype: fp16}", ["'fp16'", "auto, bfloat16, float16, float32"]),
        ("runtime: {dtype: BFloat16}", ["'BFloat16'", "bfloat16"]),
        ("runtime: {kvCacheMemory: 2 GB}", ["spec.runtime.kvCacheMemory", "'2 GB'", "2Gi"]),
        ("runtime: {kvCacheMemory: 2gib}", ["spec.runtime.kvCacheMemory", "'2gib'", "2GiB"]),
        ("runtime: {kvCacheMemory: 0.0GiB}", ["spec.runtime.kvCacheMemory is '0.0GiB'"]),
        ("runtime: {kvCacheMemory: 0}", ["spec.runtime.kvCacheMemory is 0"]),
        ("runtime: {kvCacheMemory: 1Gi, gpuMemoryUtilizationPercent: 50}", ["both set"]),
        ("runtime: {kvCacheMemoryPercent: 50}", ["kvCacheMemoryPercent is now called gpuMemoryUtilizationPercent"]),
        ("runtime: {maxNumBatchedTokens: 64}", ["64", "256", "raise it or lower"]),
        ("runtime: {extraArgs: ['--max-num-seqs=4']}", ["extraArgs[0]", "--max-num-seqs"]),
        ("runtime: {extraArgs: ['--max-num-s=4']}", ["extraArgs[0]", "--max-num-seqs"]),
        ("runtime: {extraArgs: ['--api-key=secret']}", ["extraArgs[0] is '--api-key';", "from other fields"]),
        ("runtime: {extraArgs: [seed]}", ["'seed'", "--flag=value"]),
        ("runtime: {env: [{name: A}, {name: A}]}", ["'A'", "twice"]),
        ("runtime: {env: [{name: FLYBALL_ADMIN_TOKEN}]}", ["FLYBALL_ADMIN_TOKEN", "Secret"]),
        ("runtime: {env: [{name: 1A}]}", ["spec.runtime.env[0].name"]),
        ("accelerator: {count: 2}", ["spec.accelerator.count is 2", "1"]),
        ("resources: {limits: {nvidia.com/gpu: 1}}", ["nvidia.com/gpu", "spec.accelerator.count"]),
        ("resources: {limits: {memory: lots}}", ["spec.resources.limits.memory", "'lots'"]),
        ("tuning: {mode: Off}", ["one of Disabled, Recommend, Auto is expected", "a bare off or no as false"]),
        ("tuning: {mode: 'Off'}", ["'Off'", "one of Disabled, Recommend, Auto is expected"]),
        ("networkPolicy: {mode: None}", ["'None'", "one of Disabled, Managed is expected"]),
        ("disruption: {mode: None}", ["'None'", "one of Managed, Disabled is expected"]),
        ("tuning: {mode: Auto}", ["Auto", "objectives"]),
        ("tuning: {bounds: {maxNumSeqs: {min: 9, max: 4}}}", ["9", "4", "swap"]),
        ("tuning: {bounds: {maxNumSeqs: {max: 300}}}", ["300", "256", "envelope"]),
        ("tuning: {limits: {maxNumSeqs: 300}}", ["spec.tuning.limits.maxNumSeqs is 300", "256", "envelope"]),
        (
            "runtime: {maxNumBatchedTokens: 2048}\n  tuning: {limits: {maxNumBatchedTokens: 4096}}",
            ["limits.maxNumBatchedTokens is 4096", "2048"],
        ),
        (
            "tuning: {limits: {maxNumBatchedTokens: 63}, bounds: {maxNumBatchedTokens: {min: 64}}}",
            ["limits.maxNumBatchedTokens is 63", "64 or more"],
        ),
        ("tuning: {limits: {kvCachePercent: 0}}", ["spec.tuning.limits.kvCachePercent is 0", "1"]),
        ("tuning: {limits: {stepTimeTargetMilliseconds: -1}}", ["limits.stepTimeTargetMilliseconds is -1", "0"]),
        ("tuning: {limits: {maxSeqs: 4}}", ["spec.tuning.limits.maxSeqs is not a field", "maxNumSeqs"]),
        (
            "tuning: {limits: {maxNumSeqs: 3}, bounds: {maxNumSeqs: {min: 4}}}",
            ["limits.maxNumSeqs is 3", "4 to 256", "widen"],
        ),
        (
            "tuning: {limits: {kvCachePercent: 90}, bounds: {kvCachePercent: {max: 80}}}",
            ["limits.kvCachePercent is 90", "1 to 80"],
        ),
        ("rollout: {drain: {timeoutSeconds: 0}}", ["spec.rollout.drain.timeoutSeconds is 0"]),
        ("startupTimeoutSeconds: 10", ["spec.startupTimeoutSeconds is 10", "60"]),
        ("model: {uri: /models/llama}", ["spec.model.uri", "'/models/llama'", "hf"]),
        ("model: {uri: 'hf://a/b/c'}", ["expected ORG/NAME or hf://ORG/NAME", "file:FOLDER"]),
        ("model: {uri: models/llama/8b}", ["expected ORG/NAME or hf://ORG/NAME", "file:FOLDER"]),
        ("model: {uri: ./llama}", ["spec.model.uri is './llama'"]),
        ("model: {uri: 's3://bucket'}", ["spec.model.uri is 's3://bucket'"]),
        ("model: {uri: 'pvc://claim/../x'}", ["'..'"]),
        ("model: {uri: 'file://'}", ["file:FOLDER"]),
        ('model: {uri: "file:a\\n"}', ["spec.model.uri"]),
        ("model: {uri: 'pvc://claim/x', revision: main}", ["revision", "a model of the Hub only"]),
        ("model: {}", ["spec.model.uri is missing"]),
        ("model: {uri: 'pvc://Claim/x'}", ["pvc://CLAIM/FOLDER"]),
        ("model: {uri: 'oci://a:b', secretRef: {name: s}}", ["spec.model.secretRef", "oci://a:b", "imagePullSecrets"]),
        ("model: {uri: 'hf://a/b', cache: {mode: Claim}}", ["spec.model.cache", "claimName", "size", "not both"]),
        ("model: {uri: 'hf://a/b', cache: {claimName: mine}}", ["'mine'", "EmptyDir", "set mode Claim or remove it"]),
        ("model: {uri: 'hf://a/b', cache: {accessMode: ReadWriteOnce}}", ["accessMode", "need mode Claim and size"]),
        ("model: {uri: 'hf://a/b', cache: {size: 1 Gi}}", ["spec.model.cache.size", "'1 Gi'"]),
        (
            "runtime: {env: [{name: A, value: b, valueFrom: {}}]}",
            ["env[0] has both value and valueFrom", "valueFrom needs"],
        ),
        ("runtime: {envFrom: [{prefix: A_}]}", ["spec.runtime.envFrom[0]", "exactly one"]),
        ("runtime: {imagePullSecrets: [{name: a}, {name: a}]}", ["imagePullSecrets[1].name 'a'", "twice"]),
        (
            "accelerator: {resourceName: x.kubernetes.io/gpu}",
            ["x.kubernetes.io/gpu", "Kubernetes' own", "nvidia.com/gpu"],
        ),
        ("resources: {requests: {cpu: 2}, limits: {cpu: 1500m}}", ["requests.cpu is 2", "1500m", "lower the request"]),
        ("autoscaling: {mode: KEDA}", ["mode is KEDA", "maxReplicas; set it"]),
        ("autoscaling: {minReplicas: 3, maxReplicas: 2}", ["maxReplicas is 2", "minReplicas 3", "swap"]),
        ("autoscaling: {keda: {trigger: Prometheus}}", ["prometheusAddress", "choose MetricsAPI"]),
        ("autoscaling: {targetLoadPercent: 80}", ["spec.tuning.mode is Disabled", "Recommend or Auto"]),
        (
            f"{AUTO}\n  autoscaling: {{mode: HPA, maxReplicas: 2, targetLoadPercent: 80}}",
            ["pods have no flyball_tuner_load_replicas", "set hpa.metricType to External"],
        ),
        (
            f"{AUTO}\n  autoscaling: {{mode: KEDA, maxReplicas: 2, targetLoadPercent: 80}}",
            ["pods have no flyball_tuner_load_replicas", "set keda.trigger to Prometheus"],
        ),
        ("rollout: {maxSurge: 0%}", ["maxSurge and maxUnavailable are both 0", "raise one"]),
        ("rollout: {maxSurge: 101%}", ["spec.rollout.maxSurge is '101%'"]),
        ("podTemplate: {metadata: {labels: {app.kubernetes.io/name: x}}}", ["app.kubernetes.io/name", "remove it"]),
        ("podTemplate: {metadata: {labels: {app.kubernetes.io/managed-by: x}}}", ["managed-by", "remove it"]),
        (
            "monitoring: {labels: {app.kubernetes.io/instance: x}}",
            ["monitoring.labels.app.kubernetes.io/instance", "remove"],
        ),
        ("monitoring: {labels: {a b: x}}", ["spec.monitoring.labels['a b']", "DOMAIN/NAME"]),
        ("podTemplate: {metadata: {annotations: {a b: x}}}", ["annotations['a b']", "DOMAIN/NAME"]),
        ("podTemplate: {spec: {containers: [{image: x}]}}", ["spec.podTemplate.spec.containers[0].name is missing"]),
        ("podTemplate: {metadata: {name: x}}", ["spec.podTemplate.metadata.name is not a field"]),
        ("networkPolicy: {ingressFrom: [{cidr: 10.0.0.0/8}]}", ["ingressFrom", "mode Managed"]),
        ("networkPolicy: {mode: Managed, ingressFrom: []}", ["ingressFrom", "0 entries", "1"]),
        ("networkPolicy: {mode: Managed, ingressFrom: [{}]}", ["ingressFrom[0] needs cidr"]),
        ("networkPolicy: {mode: Managed, ingressFrom: [{cidr: 10.0.0.0/40}]}", ["'10.0.0.0/40'", "like 10.0.0.0/8"]),
        ("suspend: yes please", ["spec.suspend", "true or false"]),
    ],
)
def test_a_bad_field_is_refused_with_its_path_and_a_way_out(field: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(field)
    for word in words:
        assert word in str(refused.value)


def test_without_an_accelerator_the_kv_cache_is_sized_in_bytes_and_below_the_memory_limit() -> None:
    with pytest.raises(SpecError, match="set kvCacheMemory instead"):
        parse_spec("accelerator: {count: 0}", "runtime: {gpuMemoryUtilizationPercent: 50}")
    with pytest.raises(SpecError, match=r"is 2GiB, and .* only 2048Mi"):
        parse_spec("accelerator: {count: 0}", "runtime: {kvCacheMemory: 2GiB}", "resources: {limits: {memory: 2048Mi}}")


def test_what_belongs_to_a_model_of_the_hub_goes_with_a_bare_id_too() -> None:
    model = parse_spec("model: {uri: org/name, revision: v2, secretRef: {name: hub}}")
    assert model.model_source == HubModel("org/name", "v2")


def test_every_problem_of_a_manifest_is_named_at_once() -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec("replicas: -1", "startupTimeoutSeconds: 1", "runtime: {maxNumSeqs: 0}")
    assert len(refused.value.problems) == 3


def test_an_unreadable_file_is_a_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing\.yaml: cannot be read"):
        manifest.read_file(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(SpecError, match=r"latin\.yaml: cannot be read"):
        manifest.read_file(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_the_examples_are_valid(example: Path) -> None:
    assert manifest.read_file(example)


def api_object(**spec: object) -> dict[str, object]:
    """An object as the API server hands it out."""
    metadata = {"name": "chat", "namespace": "team", "uid": "1", "resourceVersion": "7", "managedFields": []}
    head = {"apiVersion": "flyball.dev/v1alpha1", "kind": "LLMDeployment", "metadata": metadata}
    return {**head, "spec": {"model": {"uri": "hf://org/name"}, **spec}, "status": {"replicas": 1}}


def test_an_object_of_the_api_is_read_like_a_manifest() -> None:
    deployment = manifest.from_object(api_object(replicas=3))
    assert (deployment.namespace, deployment.name, deployment.spec.replicas) == ("team", "chat", 3)


def test_an_object_of_the_api_that_is_not_valid_is_named_in_the_error() -> None:
    with pytest.raises(SpecError, match=r"LLMDeployment team/chat: spec\.replicas is -1"):
        manifest.from_object(api_object(replicas=-1))
    with pytest.raises(SpecError, match=r"team/chat: spec\.model\.uri is 'file:/models'; .* on a cluster use hf://"):
        manifest.from_object(api_object(model={"uri": "file:/models"}))
