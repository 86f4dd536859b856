"""The Kubernetes objects that an LLMDeployment stands for. Pure: the cluster applies them, local mode runs them."""

from typing import Any

from flyball_operator import names, quantity
from flyball_operator.model_source import ClaimModel, FolderModel, HubModel, ImageModel, ModelSource
from flyball_operator.spec import LLMDeployment
from flyball_protocol import endpoints

Manifest = dict[str, Any]

LIVENESS_PERIOD_S = 10
READINESS_PERIOD_S = 2
STARTUP_PERIOD_S = 1
GRACE_MARGIN_S = 10
"""Between the runtime's drain deadline and SIGKILL, so that the runtime itself ends what is left and says so."""

_DTYPES = {"Auto": "auto", "BFloat16": "bfloat16", "Float16": "float16", "Float32": "float32"}
_NON_ROOT_ID = 65532


def deployment(deployment: LLMDeployment) -> Manifest:
    """Return the apps/v1 Deployment that runs the replicas."""
    spec = deployment.spec
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": deployment.name,
            "namespace": deployment.namespace,
            "labels": names.labels(deployment.name),
        },
        "spec": {
            "replicas": spec.replicas,
            "selector": {"matchLabels": names.selector_labels(deployment.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            # A replica that loads for the whole of its allowance is slow, not stuck.
            "progressDeadlineSeconds": spec.startup_timeout_seconds + 60,
            "template": {"metadata": {"labels": names.labels(deployment.name)}, "spec": _pod(deployment)},
        },
    }


def serve_args(deployment: LLMDeployment) -> list[str]:
    """Return the arguments of ``flyball``: serve, the model, and one ``--flag=value`` word per setting."""
    spec, runtime = deployment.spec, deployment.spec.runtime
    optional = {
        "--revision": _revision(deployment.model_source),
        "--max-model-len": runtime.max_model_len,
        "--gpu-memory-utilization": None if (p := runtime.kv_cache_memory_percent) is None else f"{p / 100:.2f}",
        "--kv-cache-memory-bytes": None if (m := runtime.kv_cache_memory) is None else quantity.to_bytes(m),
    }
    flags = {
        "--host": "0.0.0.0",
        "--port": endpoints.API_PORT,
        "--admin-host": "0.0.0.0",
        "--admin-port": endpoints.ADMIN_PORT,
        "--served-model-name": deployment.served_name,
        "--device": "cuda" if spec.accelerator.count else "cpu",
        "--dtype": _DTYPES[runtime.dtype],
        "--max-num-seqs": runtime.max_num_seqs,
        "--max-num-batched-tokens": runtime.max_num_batched_tokens,
        "--drain-timeout": spec.rollout.drain.timeout_seconds,
        **{flag: value for flag, value in optional.items() if value is not None},
    }
    words = [f"{flag}={value}" for flag, value in flags.items()]
    return ["serve", model_argument(deployment.model_source), *words, *runtime.extra_args]


def model_argument(source: ModelSource) -> str:
    """Return what ``flyball serve`` is told to load, as seen from inside the pod."""
    match source:
        case HubModel(repo=repo):
            return repo
        case ClaimModel(folder=folder):
            return f"{names.MODEL_MOUNT}/{folder}".rstrip("/")
        case ImageModel():
            return names.MODEL_MOUNT
        case FolderModel(path=path):
            return str(path)


def _revision(source: ModelSource) -> str | None:
    return source.revision if isinstance(source, HubModel) else None


def _pod(deployment: LLMDeployment) -> Manifest:
    drain = deployment.spec.rollout.drain
    return {
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
        "containers": [_container(deployment)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "cache", "emptyDir": {}},
            *_model_volumes(deployment.model_source),
        ],
    }


def _container(deployment: LLMDeployment) -> Manifest:
    spec = deployment.spec
    container: Manifest = {
        "name": names.RUNTIME_CONTAINER,
        "image": spec.runtime.image or names.runtime_image(),
        "command": ["flyball"],
        "args": serve_args(deployment),
        "env": _env(deployment),
        "ports": [
            {"name": names.API_PORT_NAME, "containerPort": endpoints.API_PORT},
            {"name": names.ADMIN_PORT_NAME, "containerPort": endpoints.ADMIN_PORT},
        ],
        "resources": _resources(deployment),
        **_probes(spec.startup_timeout_seconds),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": names.CACHE_MOUNT},
            *_model_mounts(deployment.model_source),
        ],
    }
    if spec.rollout.drain.pre_stop_seconds:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": spec.rollout.drain.pre_stop_seconds}}}
    return container


def _env(deployment: LLMDeployment) -> list[Manifest]:
    token = {"name": names.admin_token_secret(deployment.name), "key": names.ADMIN_TOKEN_KEY}
    return [
        {"name": endpoints.ADMIN_TOKEN_ENV, "valueFrom": {"secretKeyRef": token}},
        {"name": "HF_HOME", "value": f"{names.CACHE_MOUNT}/huggingface"},
        {"name": "XDG_CACHE_HOME", "value": names.CACHE_MOUNT},
        *({"name": variable.name, "value": variable.value} for variable in deployment.spec.runtime.env),
    ]


def _resources(deployment: LLMDeployment) -> Manifest:
    spec = deployment.spec
    limits = dict(spec.resources.limits)
    if spec.accelerator.count:
        limits[spec.accelerator.resource_name] = spec.accelerator.count
    found = {"requests": dict(spec.resources.requests), "limits": limits}
    return {kind: amounts for kind, amounts in found.items() if amounts}


def _probes(startup_timeout_s: int) -> Manifest:
    # What fails these two is stuck and has nothing to drain, so it is not given the pod's whole grace period.
    stuck = {"terminationGracePeriodSeconds": GRACE_MARGIN_S}
    return {
        "startupProbe": _probe(endpoints.READYZ_PATH, STARTUP_PERIOD_S, startup_timeout_s // STARTUP_PERIOD_S) | stuck,
        "readinessProbe": _probe(endpoints.READYZ_PATH, READINESS_PERIOD_S, 2),
        "livenessProbe": _probe(endpoints.LIVEZ_PATH, LIVENESS_PERIOD_S, 3) | stuck,
    }


def _probe(path: str, period_s: int, failure_threshold: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": names.API_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }


def _model_volumes(source: ModelSource) -> list[Manifest]:
    match source:
        case HubModel():
            return []
        case ClaimModel(claim=claim):
            return [{"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
        case ImageModel(reference=reference):
            return [{"name": "model", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}]
        case FolderModel(path=path):
            return [{"name": "model", "hostPath": {"path": str(path), "type": "Directory"}}]


def _model_mounts(source: ModelSource) -> list[Manifest]:
    if isinstance(source, HubModel):
        return []
    # A folder is mounted under its own path, so the same argument is right in a pod and on this machine.
    path = str(source.path) if isinstance(source, FolderModel) else names.MODEL_MOUNT
    return [{"name": "model", "mountPath": path, "readOnly": True}]
