"""The Deployment's pod template as this machine understands it."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyball_operator import children, names
from flyball_operator.children import Manifest
from flyball_operator.errors import LocalError
from flyball_operator.local.accelerators import RESOURCE_NAME
from flyball_operator.local.probes import Probe
from flyball_operator.spec import LLMDeployment
from flyball_protocol.endpoints import ADMIN_TOKEN_ENV

LOOPBACK = "127.0.0.1"
KUBERNETES_GRACE_S = 30
"""What Kubernetes takes when a pod names no grace period."""


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
        here = {"--host": LOOPBACK, "--port": port, "--admin-host": LOOPBACK, "--admin-port": admin_port}
        return [f"{flag}={here[flag]}" if (flag := word.partition("=")[0]) in here else word for word in self.argv]


def local_deployment(llm: LLMDeployment) -> Manifest:
    """Return the Deployment that a cluster would run."""
    secret = names.rendered_admin_token_secret(llm.name)
    return children.deployment(llm, children.Platform(), admin_token_secret=secret)


def process_template(deployment: Manifest, executable: tuple[str, ...]) -> ProcessTemplate:
    """Read the Deployment's pod template; ``executable`` takes the place of the image's ``flyball``.

    Security context, CPU and memory amounts are the kubelet's business and have no effect here; neither has the preStop sleep,
    which gives load balancers time to notice: ours knows before the process does.

    Raises:
        LocalError: the pod needs something that only a cluster has.
    """
    pod = deployment["spec"]["template"]["spec"]
    container = _runtime_container(pod)
    pre_stop_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    _check_folders(pod.get("volumes", []))
    return ProcessTemplate(
        argv=(*executable, *container["command"][1:], *container["args"]),
        env=dict(_env(pod, container)),
        num_accelerators=_accelerators(container),
        startup=_probe(container, "startupProbe"),
        readiness=_probe(container, "readinessProbe"),
        liveness=_probe(container, "livenessProbe"),
        grace_s=pod.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S) - pre_stop_s,
        digest=hashlib.sha256(json.dumps(deployment["spec"]["template"], sort_keys=True).encode()).hexdigest()[:12],
    )


def _runtime_container(pod: Manifest) -> Manifest:
    container: Manifest = pod["containers"][0]
    others = [*pod["containers"][1:], *pod.get("initContainers", [])]
    for other in (one for one in others if one["name"] != names.LISTENER_CONTAINER):  # here the balancer retries
        raise LocalError(f"spec.podTemplate has a container {other['name']!r}; local mode runs the runtime alone")
    if container.get("command") != ["flyball"] or "args" not in container:
        raise LocalError("spec.podTemplate changes the runtime's command or args; use spec.runtime.extraArgs here")
    if container.get("envFrom"):
        raise LocalError("spec.runtime.envFrom names cluster objects; give the values in spec.runtime.env here")
    return container


def _probe(container: Manifest, name: str) -> Probe:
    if "httpGet" not in container.get(name, {}):
        raise LocalError(f"spec.podTemplate makes the {name} no httpGet probe; local mode knows no other kind")
    try:
        return Probe.from_manifest(container[name])
    except (KeyError, TypeError, ValueError) as error:
        raise LocalError(f"spec.podTemplate makes a {name} that cannot be read: {error}") from error


def _check_folders(volumes: list[Manifest]) -> None:
    """Refuse a model that is not here. Other volumes have no effect: what they hold, this machine keeps in its own places."""
    for volume in (volume for volume in volumes if volume["name"] == "model"):
        if "hostPath" not in volume:
            scheme = "pvc://" if "persistentVolumeClaim" in volume else "oci://"
            raise LocalError(
                f"spec.model.uri: {scheme} needs a cluster; on this machine use file:FOLDER or hf://ORG/NAME"
            )
        if not Path(volume["hostPath"]["path"]).is_dir():
            raise LocalError(
                f"spec.model.uri: {volume['hostPath']['path']} is not a folder; "
                "a relative file: uri is meant from the manifest's own folder"
            )


def _env(pod: Manifest, container: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the container's variables, but the admin token (the runner's own) and paths that exist inside a pod only."""
    here = {volume["name"] for volume in pod.get("volumes", []) if "hostPath" in volume}
    pod_only = tuple(mount["mountPath"] for mount in container.get("volumeMounts", []) if mount["name"] not in here)
    for variable in container.get("env", []):
        name = variable["name"]
        if "valueFrom" in variable:
            if name != ADMIN_TOKEN_ENV and name not in os.environ:
                raise LocalError(f"env {name} comes from a cluster object; set it in the environment of this command")
        elif not variable.get("value", "").startswith(pod_only):
            yield name, variable.get("value", "")


def _accelerators(container: Manifest) -> int:
    limits: dict[str, Any] = container.get("resources", {}).get("limits", {})
    for name in limits:
        if "/" in name and name != RESOURCE_NAME:
            raise LocalError(f"spec.accelerator.resourceName is {name}; local mode can hand out {RESOURCE_NAME} only")
    return int(limits.get(RESOURCE_NAME, 0))
