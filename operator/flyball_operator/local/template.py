"""The Deployment's pod template as this machine understands it."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from flyball_operator import children, names
from flyball_operator.errors import LocalError
from flyball_operator.local.process import Probe
from flyball_operator.observed import Object
from flyball_operator.spec import LLMDeployment
from flyball_protocol.endpoints import ADMIN_TOKEN_ENV, API_KEY_ENV, TEMPLATE_ENV
from flyball_protocol.quoting import one_line, quoted

KUBERNETES_GRACE_S = 30.0
"""What Kubernetes takes when a pod names no grace period."""

MAX_SECONDS = 1e9

Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Period = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]

LOOPBACK = "127.0.0.1"
ADDRESS_FLAGS = frozenset({"--host", "--port", "--admin-host", "--admin-port"})
"""Flags whose values local mode replaces. Without them, all replicas would listen on the same ports."""

RESOURCE_NAME = "nvidia.com/gpu"
"""The one kind of accelerator that local mode hands out."""


class _Part(Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of what local mode reads of a pod. ``spec.podTemplate`` can put anything anywhere, so types are checked here."""


class HttpGet(_Part, frozen=True, kw_only=True):
    path: Annotated[str, Meta(pattern=r"^/[!-~]*\Z")]


class PodProbe(_Part, frozen=True, kw_only=True):
    period_seconds: Period
    timeout_seconds: Period
    failure_threshold: Annotated[int, Meta(ge=1)]
    http_get: HttpGet | None = None
    termination_grace_period_seconds: Seconds | None = None


class Sleep(_Part, frozen=True, kw_only=True):
    seconds: Seconds = 0.0


class PreStop(_Part, frozen=True, kw_only=True):
    sleep: Sleep = Sleep()


class Lifecycle(_Part, frozen=True, kw_only=True):
    pre_stop: PreStop = PreStop()


class Variable(_Part, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[^=]+\Z")]
    value: str = ""
    value_from: Any = None


class Mount(_Part, frozen=True, kw_only=True):
    name: str
    mount_path: str


class HostPath(_Part, frozen=True, kw_only=True):
    path: str


class Volume(_Part, frozen=True, kw_only=True):
    name: str
    host_path: HostPath | None = None
    persistent_volume_claim: Any = None


class ContainerResources(_Part, frozen=True, kw_only=True):
    limits: dict[str, Annotated[int, Meta(ge=0)] | str] = {}


class ContainerSpec(_Part, frozen=True, kw_only=True):
    name: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Variable, ...] = ()
    env_from: tuple[Any, ...] = ()
    volume_mounts: tuple[Mount, ...] = ()
    lifecycle: Lifecycle = Lifecycle()
    resources: ContainerResources = ContainerResources()
    startup_probe: PodProbe | None = None
    readiness_probe: PodProbe | None = None
    liveness_probe: PodProbe | None = None


class PodSpec(_Part, frozen=True, kw_only=True):
    containers: Annotated[tuple[ContainerSpec, ...], Meta(min_length=1)]
    init_containers: tuple[ContainerSpec, ...] = ()
    volumes: tuple[Volume, ...] = ()
    termination_grace_period_seconds: Seconds = KUBERNETES_GRACE_S


@dataclass(frozen=True)
class ProcessTemplate:
    """How to run one replica.

    Attributes:
        argv: the command, with the pod's addresses still in it.
        env: variables to add to this machine's own.
        num_accelerators: accelerators that a replica has for itself.
        grace_s: from SIGTERM to SIGKILL.
        digest: of the pod template; replicas with another digest are out of date.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    num_accelerators: int
    startup: Probe
    readiness: Probe
    liveness: Probe
    grace_s: float
    digest: str

    def argv_for(self, port: int, admin_port: int) -> list[str]:
        """Return the command for a replica that listens on these loopback ports."""
        here = {
            "--host": LOOPBACK,
            "--port": port,
            "--admin-host": LOOPBACK,
            "--admin-port": admin_port,
            "--drain-quiet": 0,
        }
        return [f"{flag}={here[flag]}" if (flag := word.partition("=")[0]) in here else word for word in self.argv]


def local_deployment(llm: LLMDeployment) -> Object:
    """Return the Deployment that a cluster would run."""
    secret = names.rendered_admin_token_secret(llm.name)
    return children.deployment(llm, children.Platform(), admin_token_secret=secret)


def process_template(deployment: Object, executable: tuple[str, ...]) -> ProcessTemplate:
    """Read the Deployment's pod template; ``executable`` replaces the image's ``flyball``.

    Security context, CPU and memory amounts have no effect here: the kubelet applies them. The preStop sleep and --drain-quiet,
    which give load balancers time to notice a drain, have no effect either: the balancer knows of a drain before the process.

    Raises:
        LocalError: the pod needs something that only a cluster has.
    """
    pod = _read_pod(deployment["spec"]["template"]["spec"])
    container = _runtime_container(pod)
    _check_keys(pod.volumes)
    _check_folders(pod.volumes)
    return ProcessTemplate(
        argv=(*executable, *container.command[1:], *container.args),
        env=dict(_env(pod, container)),
        num_accelerators=_accelerators(container),
        startup=_probe(container.startup_probe, "startupProbe"),
        readiness=_probe(container.readiness_probe, "readinessProbe"),
        liveness=_probe(container.liveness_probe, "livenessProbe"),
        grace_s=max(0.0, pod.termination_grace_period_seconds - container.lifecycle.pre_stop.sleep.seconds),
        digest=hashlib.sha256(json.dumps(deployment["spec"]["template"], sort_keys=True).encode()).hexdigest()[:12],
    )


def _read_pod(spec: Object) -> PodSpec:
    try:
        return msgspec.convert(spec, PodSpec)
    except msgspec.ValidationError as error:
        raise LocalError(f"spec.podTemplate makes a pod that cannot be read: {one_line(str(error))}") from error


def _runtime_container(pod: PodSpec) -> ContainerSpec:
    container = pod.containers[0]
    others = [*pod.containers[1:], *pod.init_containers]
    for other in (one for one in others if one.name != names.LISTENER_CONTAINER):  # here the balancer retries
        raise LocalError(f"spec.podTemplate has a container {quoted(other.name)}; local mode runs the runtime alone")
    if container.command != ("flyball",) or not {word.partition("=")[0] for word in container.args} >= ADDRESS_FLAGS:
        raise LocalError("spec.podTemplate changes the runtime's command or args; use spec.runtime.extraArgs here")
    if container.env_from:
        raise LocalError("spec.runtime.envFrom names cluster objects; give the values in spec.runtime.env here")
    return container


def _probe(probe: PodProbe | None, name: str) -> Probe:
    if probe is None or probe.http_get is None:
        raise LocalError(f"spec.podTemplate makes the {name} no httpGet probe; local mode knows no other kind")
    return Probe(
        path=probe.http_get.path,
        period_s=probe.period_seconds,
        timeout_s=probe.timeout_seconds,
        failure_threshold=probe.failure_threshold,
        grace_s=probe.termination_grace_period_seconds,
    )


def _check_keys(volumes: Sequence[Volume]) -> None:
    if any(volume.name == names.API_KEYS_VOLUME for volume in volumes):
        raise LocalError(
            f"spec.runtime.apiKeysSecretRef names a Secret, which needs a cluster; leave it out and set {API_KEY_ENV} in the "
            "environment of this command"
        )


def _check_folders(volumes: Sequence[Volume]) -> None:
    """Refuse a model that is not on this machine. Other volumes have no effect: this machine has its own folders for them."""
    for volume in (volume for volume in volumes if volume.name == "model"):
        if volume.host_path is None:
            scheme = "oci://" if volume.persistent_volume_claim is None else "pvc://"
            raise LocalError(f"spec.model.uri: {scheme} needs a cluster; on this machine use file:FOLDER or ORG/NAME")
        if not os.path.isdir(volume.host_path.path):  # noqa: PTH112 (Path.is_dir raises for a name that is too long)
            raise LocalError(
                f"spec.model.uri: {one_line(volume.host_path.path)} is not a folder; "
                "a relative file: uri is meant from the manifest's own folder"
            )


def _env(pod: PodSpec, container: ContainerSpec) -> Iterator[tuple[str, str]]:
    """Yield the container's variables, but the admin token (the runner's own) and paths that exist inside a pod only."""
    here = {volume.name for volume in pod.volumes if volume.host_path is not None}
    pod_only = tuple(mount.mount_path for mount in container.volume_mounts if mount.name not in here)
    for variable in container.env:
        if variable.value_from is not None:
            if variable.name not in (ADMIN_TOKEN_ENV, TEMPLATE_ENV, *os.environ):
                raise LocalError(
                    f"env {one_line(variable.name)} comes from a cluster object; set it in the environment of this command"
                )
        elif not variable.value.startswith(pod_only):
            yield variable.name, variable.value


def _accelerators(container: ContainerSpec) -> int:
    for name in container.resources.limits:
        if "/" in name and name != RESOURCE_NAME:
            raise LocalError(
                f"spec.accelerator.resourceName is {one_line(name)}; local mode can hand out {RESOURCE_NAME} only"
            )
    count = container.resources.limits.get(RESOURCE_NAME, 0)
    if not str(count).isdecimal():
        raise LocalError(f"spec.podTemplate wants {quoted(count)} of {RESOURCE_NAME}; write a whole number")
    return int(count)
