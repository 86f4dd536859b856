"""The runtime container."""

from collections.abc import Iterator

from flyball_operator import names
from flyball_operator.children.listener import listener_env
from flyball_operator.children.manifest import Manifest, plain
from flyball_operator.children.platform import Platform
from flyball_operator.children.probes import probes
from flyball_operator.children.program import program
from flyball_operator.children.serve_args import serve_args
from flyball_operator.children.volumes import volume_mounts
from flyball_operator.spec import EnvVar, LLMDeployment
from flyball_protocol import endpoints


def container(llm: LLMDeployment, platform: Platform, admin_token_secret: str) -> Manifest:
    """Return the container that runs ``flyball serve``."""
    runtime = llm.spec.runtime
    optional: Manifest = {
        "envFrom": plain(runtime.env_from),
        "lifecycle": _lifecycle(llm.spec.rollout.drain.pre_stop_seconds),
    }
    return {
        "name": names.RUNTIME_CONTAINER,
        **program(llm, platform),
        "args": serve_args(llm),
        "env": _env(llm, admin_token_secret),
        "ports": [_port(names.API_PORT_NAME, endpoints.API_PORT), _port(names.ADMIN_PORT_NAME, endpoints.ADMIN_PORT)],
        "resources": _resources(llm),
        **probes(llm.spec.startup_timeout_seconds),
        "volumeMounts": volume_mounts(llm),
        **{key: value for key, value in optional.items() if value},
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _lifecycle(pre_stop_s: int) -> Manifest:
    return {"preStop": {"sleep": {"seconds": pre_stop_s}}} if pre_stop_s else {}


def _env(llm: LLMDeployment, admin_token_secret: str) -> list[Manifest]:
    """Return the variables, one per name: the spec's own replace ours."""
    given = [_given_variable(variable) for variable in llm.spec.runtime.env]
    ours = [
        _from_secret(endpoints.ADMIN_TOKEN_ENV, admin_token_secret, names.ADMIN_TOKEN_KEY),
        listener_env(),
        *_cache_env(),
        *_hub_token(llm),
    ]
    return list({variable["name"]: variable for variable in (*ours, *given)}.values())


def _given_variable(variable: EnvVar) -> Manifest:
    made: Manifest = plain(variable)
    return made if "valueFrom" in made else {"value": "", **made}


def _cache_env() -> Iterator[Manifest]:
    """Yield what keeps libraries from writing to a home folder: there is none, and the root file system is read-only."""
    yield {"name": "HF_HOME", "value": f"{names.CACHE_MOUNT}/huggingface"}
    yield {"name": "XDG_CACHE_HOME", "value": names.CACHE_MOUNT}
    yield {"name": "TRITON_CACHE_DIR", "value": f"{names.CACHE_MOUNT}/triton"}


def _hub_token(llm: LLMDeployment) -> Iterator[Manifest]:
    if (secret := llm.spec.model.secret_ref) is not None:
        yield _from_secret(names.HUB_TOKEN_ENV, secret.name, secret.key)


def _from_secret(variable: str, secret: str, key: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _resources(llm: LLMDeployment) -> Manifest:
    spec = llm.spec
    limits = dict(spec.resources.limits)
    if spec.accelerator.count:
        limits[spec.accelerator.resource_name] = spec.accelerator.count
    found = {"requests": dict(spec.resources.requests), "limits": limits}
    return {kind: amounts for kind, amounts in found.items() if amounts}
