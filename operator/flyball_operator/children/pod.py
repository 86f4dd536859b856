"""What runs in the pods: the pod template, with ``spec.podTemplate`` merged over what the spec's fields make."""

from collections.abc import Iterator, Mapping
from typing import Any

from flyball_operator import names
from flyball_operator.errors import SpecError
from flyball_operator.observed import Object
from flyball_operator.spec import (
    ClaimModel,
    EnvVar,
    FolderModel,
    HubModel,
    ImageModel,
    LLMDeployment,
    ModelSource,
    plain,
    size_as_quantity,
    size_in_bytes,
)
from flyball_operator.spec.schema import path_of_entry
from flyball_protocol import endpoints
from flyball_protocol.quoting import one_line, quoted

GRACE_MARGIN_S = 10
"""Seconds between the runtime's drain deadline and SIGKILL: time for the runtime to end and log the remaining requests."""

_NON_ROOT_ID = 65532

STARTUP_PERIOD_S = 1
READINESS_PERIOD_S = 2
LIVENESS_PERIOD_S = 10
STUCK_GRACE_S = 10
"""A runtime that fails start-up or liveness is stuck and cannot drain, so it does not get the pod's whole grace period."""

_LISTENER_SOCKET = f"{names.RUN_MOUNT}/listener.sock"
"""Unix socket at which the runtime gets the API port from the listener."""

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a PodTemplateSpec that are merged by a key of their entries (Kubernetes' patchMergeKey); others are replaced."""

_REPLACED_ENTRIES = frozenset({"volumes"})
"""Lists whose entries replace those of the same name as a whole (retainKeys): two sources of a volume cannot be merged."""


def pod_template(llm: LLMDeployment, default_image: str, admin_token_secret: str) -> Object:
    """Return the PodTemplateSpec. ``default_image`` is used if the spec has no image.

    Raises:
        SpecError: ``spec.podTemplate`` cannot be merged.
    """
    metadata = {
        "labels": names.labels(llm.name),
        "annotations": {"kubectl.kubernetes.io/default-container": names.RUNTIME_CONTAINER},  # of `kubectl logs`
    }
    ours = {"metadata": metadata, "spec": _pod(llm, default_image, admin_token_secret)}
    return _merge(ours, llm.spec.pod_template, "spec.podTemplate")


def _pod(llm: LLMDeployment, default_image: str, admin_token_secret: str) -> Object:
    drain = llm.spec.rollout.drain
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": drain.pre_stop_seconds + drain.timeout_seconds + GRACE_MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NON_ROOT_ID,
            "runAsGroup": _NON_ROOT_ID,
            "fsGroup": _NON_ROOT_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [_spread_over_nodes(llm)],
        "initContainers": [_listener(llm, default_image)],
        "containers": [_container(llm, default_image, admin_token_secret)],
        "volumes": _volumes(llm),
    }
    if llm.spec.runtime.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in llm.spec.runtime.image_pull_secrets]
    return pod


def _spread_over_nodes(llm: LLMDeployment) -> Object:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector_labels(llm.name)},
        "matchLabelKeys": ["pod-template-hash"],  # the pods of an old template do not count: they leave
    }


def _container(llm: LLMDeployment, default_image: str, admin_token_secret: str) -> Object:
    """Return the container that runs ``flyball serve``."""
    runtime = llm.spec.runtime
    optional: Object = {
        "envFrom": plain(runtime.env_from),
        "lifecycle": _lifecycle(llm.spec.rollout.drain.pre_stop_seconds),
    }
    return {
        "name": names.RUNTIME_CONTAINER,
        **_program(llm, default_image),
        "args": _serve_args(llm),
        "env": _env(llm, admin_token_secret),
        "ports": [_port(names.API_PORT_NAME, endpoints.API_PORT), _port(names.ADMIN_PORT_NAME, endpoints.ADMIN_PORT)],
        "resources": _resources(llm),
        **_probes(llm.spec.startup_timeout_seconds),
        "volumeMounts": _volume_mounts(llm),
        **{key: value for key, value in optional.items() if value},
    }


def _port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _lifecycle(pre_stop_s: int) -> Object:
    return {"preStop": {"sleep": {"seconds": pre_stop_s}}} if pre_stop_s else {}


_TEMPLATE_HASH = {"apiVersion": "v1", "fieldPath": "metadata.labels['pod-template-hash']"}
"""The label that a Deployment gives its pods, so that evidence of two templates is told apart without changing either."""


def _env(llm: LLMDeployment, admin_token_secret: str) -> list[Object]:
    """Return the variables, one per name. Those of the spec replace Flyball's."""
    given = [_given_variable(variable) for variable in llm.spec.runtime.env]
    ours = [
        _from_secret(endpoints.ADMIN_TOKEN_ENV, admin_token_secret, names.ADMIN_TOKEN_KEY),
        {"name": endpoints.LISTENER_ENV, "value": _LISTENER_SOCKET},
        {"name": endpoints.TEMPLATE_ENV, "valueFrom": {"fieldRef": _TEMPLATE_HASH}},
        *_cache_env(),
        *_hub_token(llm),
    ]
    return list({variable["name"]: variable for variable in (*ours, *given)}.values())


def _given_variable(variable: EnvVar) -> Object:
    made: Object = plain(variable)
    return made if "valueFrom" in made else {"value": "", **made}


def _cache_env() -> Iterator[Object]:
    """Yield variables that keep libraries from writing to a home folder; the root file system is read-only."""
    yield {"name": "HF_HOME", "value": f"{names.CACHE_MOUNT}/huggingface"}
    yield {"name": "XDG_CACHE_HOME", "value": names.CACHE_MOUNT}
    yield {"name": "TRITON_CACHE_DIR", "value": f"{names.CACHE_MOUNT}/triton"}


def _hub_token(llm: LLMDeployment) -> Iterator[Object]:
    if (secret := llm.spec.model.secret_ref) is not None:
        yield _from_secret(names.HUB_TOKEN_ENV, secret.name, secret.key)


def _from_secret(variable: str, secret: str, key: str) -> Object:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _resources(llm: LLMDeployment) -> Object:
    spec = llm.spec
    limits = dict(spec.resources.limits)
    if spec.accelerator.count:
        limits[spec.accelerator.resource_name] = spec.accelerator.count
    found = {"requests": dict(spec.resources.requests), "limits": limits}
    return {kind: amounts for kind, amounts in found.items() if amounts}


def _program(llm: LLMDeployment, default_image: str) -> Object:
    """Return the container's fields for its image, command and security context."""
    runtime = llm.spec.runtime
    pull_policy = {"imagePullPolicy": runtime.image_pull_policy} if runtime.image_pull_policy else {}
    return {
        "image": runtime.image or default_image,
        **pull_policy,
        "command": ["flyball"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # If the runtime cannot start, its last log lines give the reason. This copies them into the container's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _serve_args(llm: LLMDeployment) -> list[str]:
    """Return the arguments of ``flyball``: serve, the model, and one ``--flag=value`` word per setting."""
    spec, runtime = llm.spec, llm.spec.runtime
    has_keys = runtime.api_keys_secret_ref is not None
    optional = {
        "--api-key-file": f"{names.API_KEYS_MOUNT}/{names.API_KEYS_FILE}" if has_keys else None,
        "--revision": llm.model_source.revision if isinstance(llm.model_source, HubModel) else None,
        "--max-model-len": runtime.max_model_len,
        "--max-num-batched-tokens": runtime.max_num_batched_tokens,
        "--gpu-memory-utilization": None if (p := runtime.gpu_memory_utilization_percent) is None else f"{p / 100:.2f}",
        "--kv-cache-memory-bytes": None if (m := runtime.kv_cache_memory) is None else size_in_bytes(m),
    }
    flags = {
        "--host": "0.0.0.0",
        "--port": endpoints.API_PORT,
        "--admin-host": "0.0.0.0",
        "--admin-port": endpoints.ADMIN_PORT,
        "--served-model-name": llm.served_name,
        "--device": "cuda" if spec.accelerator.count else "cpu",
        "--dtype": runtime.dtype,
        "--max-num-seqs": runtime.max_num_seqs,
        "--boot-prior": f"{names.BOOT_PRIOR_MOUNT}/{names.BOOT_PRIOR_FILE}",
        "--drain-timeout": spec.rollout.drain.timeout_seconds,
        "--drain-quiet": spec.rollout.drain.pre_stop_seconds,  # a kube-proxy that is behind goes on sending requests
        **{flag: value for flag, value in optional.items() if value is not None},
    }
    words = [f"{flag}={value}" for flag, value in flags.items()]
    return ["serve", _model_argument(llm.model_source), *words, *runtime.extra_args]


def _model_argument(source: ModelSource) -> str:
    """Return the argument MODEL of ``flyball serve``, as a path or id that is valid inside the pod."""
    match source:
        case HubModel(repo=repo):
            return repo
        case ClaimModel(folder=folder):
            return f"{names.MODEL_MOUNT}/{folder}".rstrip("/")
        case ImageModel():
            return names.MODEL_MOUNT
        case FolderModel(path=path):
            return str(path)


def _probes(startup_timeout_s: int) -> Object:
    """Return the three probes by their names in a container."""
    stuck = {"terminationGracePeriodSeconds": STUCK_GRACE_S}
    return {
        "startupProbe": _probe(endpoints.READYZ_PATH, STARTUP_PERIOD_S, startup_timeout_s // STARTUP_PERIOD_S) | stuck,
        "readinessProbe": _probe(endpoints.READYZ_PATH, READINESS_PERIOD_S, 2),
        "livenessProbe": _probe(endpoints.LIVEZ_PATH, LIVENESS_PERIOD_S, 3) | stuck,
    }


def _probe(path: str, period_s: int, failure_threshold: int) -> Object:
    return {
        "httpGet": {"path": path, "port": names.API_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }


def _listener(llm: LLMDeployment, default_image: str) -> Object:
    """Return the container that runs ``flyball listener``: it starts before the runtime's and ends after it."""
    return {
        "name": names.LISTENER_CONTAINER,
        **_program(llm, default_image),
        "restartPolicy": "Always",
        "args": [
            "listener",
            "--host=0.0.0.0",
            f"--port={endpoints.API_PORT}",
            f"--socket={_LISTENER_SOCKET}",
            f"--service={llm.name}:{llm.spec.service.port}",
        ],
        # Most of the memory is for the requests that are held while no replica takes them.
        "resources": {"requests": {"cpu": "10m", "memory": "48Mi"}, "limits": {"memory": "192Mi"}},
        "volumeMounts": [{"name": "run", "mountPath": names.RUN_MOUNT}],
    }


def _volumes(llm: LLMDeployment) -> list[Object]:
    """Return the volumes of the pod."""
    boot_prior = {"name": names.boot_prior_map(llm.name), "optional": True}
    return [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "run", "emptyDir": {"medium": "Memory"}},
        {"name": "cache", **_cache(llm)},
        {"name": "boot-prior", "configMap": boot_prior},
        *_api_keys(llm),
        *_model(llm.model_source),
    ]


def _api_keys(llm: LLMDeployment) -> Iterator[Object]:
    """Yield the volume with the API keys. It is mounted whole, because a subPath is not updated when the Secret changes."""
    if (secret := llm.spec.runtime.api_keys_secret_ref) is not None:
        items = [{"key": secret.key, "path": names.API_KEYS_FILE}]
        yield {"name": names.API_KEYS_VOLUME, "secret": {"secretName": secret.name, "items": items}}


def _volume_mounts(llm: LLMDeployment) -> list[Object]:
    """Return the mounts of the runtime container; there is one for each volume."""
    return [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "run", "mountPath": names.RUN_MOUNT},
        {"name": "cache", "mountPath": names.CACHE_MOUNT},
        {"name": "boot-prior", "mountPath": names.BOOT_PRIOR_MOUNT, "readOnly": True},
        *({"name": one["name"], "mountPath": names.API_KEYS_MOUNT, "readOnly": True} for one in _api_keys(llm)),
        *_model_mount(llm.model_source),
    ]


def _cache(llm: LLMDeployment) -> Object:
    cache = llm.spec.model.cache
    if cache.mode == "Claim":
        return {"persistentVolumeClaim": {"claimName": cache.claim_name or names.cache_claim(llm.name)}}
    return {"emptyDir": {} if cache.size is None else {"sizeLimit": size_as_quantity(cache.size)}}


def _model(source: ModelSource) -> Iterator[Object]:
    match source:
        case HubModel():
            return
        case ClaimModel(claim=claim):
            volume: Object = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        case ImageModel(reference=reference):
            volume = {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        case FolderModel(path=path):
            volume = {"hostPath": {"path": str(path), "type": "Directory"}}
    yield {"name": "model", **volume}


def _model_mount(source: ModelSource) -> Iterator[Object]:
    if not isinstance(source, HubModel):
        # A folder is mounted under its own path, so the same argument is right in a pod and on this machine.
        path = str(source.path) if isinstance(source, FolderModel) else names.MODEL_MOUNT
        yield {"name": "model", "mountPath": path, "readOnly": True}


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Object:
    """Return ``ours`` with ``theirs`` merged over it, as ``kubectl patch --type strategic`` does; a null removes the field.

    Raises:
        SpecError: a mapping or a list stands against something else; ``path`` begins the message.
    """
    merged = {key: value for key, value in ours.items() if theirs.get(key, value) is not None}
    for key, value in theirs.items():
        if value is not None:
            merged[key] = _merge_value(ours.get(key), value, key, path_of_entry(path, key))
    return merged


def _merge_value(ours: Any, theirs: Any, key: str, path: str) -> Any:
    if isinstance(ours, dict):
        return _merge(ours, _expect(theirs, dict, "a mapping", path), path)
    if key in _MERGE_KEYS and isinstance(ours, list):
        return _merge_list(ours, _expect(theirs, list, "a list", path), key, path)
    return _merge({}, theirs, path) if isinstance(theirs, dict) else theirs


def _merge_list(ours: list[Any], theirs: list[Any], field: str, path: str) -> list[Any]:
    """Return the merged list: entries that both have keep their place, and further ones follow."""
    key = _MERGE_KEYS[field]
    merged = {entry[key]: entry for entry in ours}
    for i, entry in enumerate(theirs):
        name = _merge_key(entry, key, f"{path}[{i}]")
        base = {} if field in _REPLACED_ENTRIES else merged.get(name, {})
        merged[name] = _merge(base, entry, f"{path}[{one_line(str(name))}]")
    return list(merged.values())


def _merge_key(entry: Any, key: str, path: str) -> str | int:
    name = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(name, str | int):
        raise SpecError(path, [f"is {quoted(entry)}; expected a mapping with {key}, by which it is merged"])
    return name


def _expect(value: Any, kind: type, expected: str, path: str) -> Any:
    if not isinstance(value, kind):
        raise SpecError(path, [f"is {quoted(value)}; expected {expected}, as in a Pod"])
    return value
