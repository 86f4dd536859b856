"""The runtime container."""

import msgspec

from flyball_operator import names
from flyball_operator.children.manifest import Manifest
from flyball_operator.children.platform import Platform
from flyball_operator.children.probes import probes
from flyball_operator.children.serve_args import serve_args
from flyball_operator.children.volumes import volume_mounts
from flyball_operator.spec import LLMDeployment
from flyball_protocol import endpoints


def container(llm: LLMDeployment, platform: Platform, admin_token_secret: str) -> Manifest:
    """Return the container that runs ``flyball serve``."""
    runtime = llm.spec.runtime
    optional: Manifest = {
        "imagePullPolicy": runtime.image_pull_policy,
        "envFrom": msgspec.to_builtins(runtime.env_from),
        "lifecycle": _lifecycle(llm.spec.rollout.drain.pre_stop_seconds),
    }
    return {
        "name": names.RUNTIME_CONTAINER,
        "image": runtime.image or platform.runtime_image,
        "command": ["flyball"],
        "args": serve_args(llm),
        "env": _env(llm, admin_token_secret),
        "ports": [_port(names.API_PORT_NAME, endpoints.API_PORT), _port(names.ADMIN_PORT_NAME, endpoints.ADMIN_PORT)],
        "resources": _resources(llm),
        **probes(llm.spec.startup_timeout_seconds),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # A runtime that cannot start says why in its last lines; so the container's status says it too.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": volume_mounts(llm),
        **{key: value for key, value in optional.items() if value},
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _lifecycle(pre_stop_s: int) -> Manifest:
    return {"preStop": {"sleep": {"seconds": pre_stop_s}}} if pre_stop_s else {}


def _env(llm: LLMDeployment, admin_token_secret: str) -> list[Manifest]:
    """Return the variables, one per name: the spec's own replace ours."""
    given: list[Manifest] = [{"value": "", **msgspec.to_builtins(one)} for one in llm.spec.runtime.env]
    for variable in given:
        if "valueFrom" in variable:
            del variable["value"]
    ours = {variable["name"]: variable for variable in _own_env(llm, admin_token_secret)}
    return list((ours | {variable["name"]: variable for variable in given}).values())


def _own_env(llm: LLMDeployment, admin_token_secret: str) -> list[Manifest]:
    token = {"name": admin_token_secret, "key": names.ADMIN_TOKEN_KEY}
    hub_token = llm.spec.model.secret_ref
    return [
        {"name": endpoints.ADMIN_TOKEN_ENV, "valueFrom": {"secretKeyRef": token}},
        {"name": "HF_HOME", "value": f"{names.CACHE_MOUNT}/huggingface"},
        {"name": "XDG_CACHE_HOME", "value": names.CACHE_MOUNT},
        *(
            [{"name": names.HUB_TOKEN_ENV, "valueFrom": {"secretKeyRef": msgspec.to_builtins(hub_token)}}]
            if hub_token
            else []
        ),
    ]


def _resources(llm: LLMDeployment) -> Manifest:
    spec = llm.spec
    limits = dict(spec.resources.limits)
    if spec.accelerator.count:
        limits[spec.accelerator.resource_name] = spec.accelerator.count
    found = {"requests": dict(spec.resources.requests), "limits": limits}
    return {kind: amounts for kind, amounts in found.items() if amounts}
