"""Why pods are not ready, read off their states. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flyball_operator import names
from flyball_operator.observed import Container, Pod, Terminated
from flyball_protocol import endpoints

MAX_MESSAGE = 700
"""Characters of a container's own last words that a condition repeats."""

_PULL = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
_BACK_OFF = re.compile(r"back-off \S+ restarting failed.*")


class Diagnosis(NamedTuple):
    """What holds a pod up. ``failing``: it does not get better by waiting."""

    reason: str
    message: str
    failing: bool


# In the order of what to tell first when pods differ.
ORDER = (
    "MissingReference",
    "ImagePull",
    "OutOfMemory",
    "CrashLoop",
    "Evicted",
    "InsufficientGPU",
    "MissingClaim",
    "Unschedulable",
    "ModelDownload",
    "NotReady",
    "Starting",
)


def diagnose(pods: Sequence[Pod], accelerator: str) -> Diagnosis | None:
    """Return what most needs attention, None when every pod is ready or on its way out.

    Args:
        accelerator: name of the extended resource that the pods ask for.
    """
    found = [(pod, diagnosis) for pod in pods if (diagnosis := of_pod(pod, accelerator)) is not None]
    if not found:
        return None
    pod, worst = min(found, key=lambda item: (ORDER.index(item[1].reason), item[0].name))
    same = sum(diagnosis.reason == worst.reason for _, diagnosis in found)
    others = f" ({same - 1} more like it)" if same > 1 else ""
    return worst._replace(message=f"pod {pod.name}{others}: {worst.message}")


def telling(pods: Sequence[Pod], *, complete: bool) -> list[Pod]:
    """Return the pods without those that failed and were replaced: Kubernetes keeps an evicted pod for weeks.

    Args:
        complete: as many replicas as wanted serve, so whatever failed was replaced or is not needed.
    """
    alive = [pod for pod in pods if pod.phase != "Failed"]
    if complete:
        return alive
    youngest = max((pod.created for pod in alive if not pod.deleting), default="")
    return [*alive, *(pod for pod in pods if pod.phase == "Failed" and pod.created > youngest)]


def of_pod(pod: Pod, accelerator: str) -> Diagnosis | None:
    """Return why a pod is not ready; None for one that is, or that is being deleted or has ended."""
    if pod.deleting or pod.ready or pod.phase == "Succeeded":
        return None
    if pod.phase == "Failed":
        return Diagnosis(*_end_of_pod(pod), failing=True)
    if pod.unschedulable is not None:
        return _unschedulable(pod.unschedulable, accelerator)
    for container in pod.containers:
        if (found := _of_container(container)) is not None:
            return found
    return _slow(pod)


def _end_of_pod(pod: Pod) -> tuple[str, str]:
    if pod.reason == "Evicted":
        return "Evicted", pod.message
    ended = [container.terminated for container in pod.containers if container.terminated is not None]
    failed = [one for one in ended if one.exit_code != 0]
    return _end(failed[0]) if failed else ("CrashLoop", pod.message or pod.reason or "the pod failed")


def _unschedulable(message: str, accelerator: str) -> Diagnosis:
    if f"Insufficient {accelerator}" in message:
        return Diagnosis("InsufficientGPU", message, failing=True)
    reason = "MissingClaim" if "persistentvolumeclaim" in message else "Unschedulable"
    return Diagnosis(reason, message, failing=True)


def _of_container(container: Container) -> Diagnosis | None:
    # Once its startup probe has succeeded, the runtime's last end is history.
    is_up = container.started and container.name == names.RUNTIME_CONTAINER
    waiting, ended = container.waiting, container.terminated or (None if is_up else container.last)
    if waiting is not None and waiting.reason in _PULL:
        return Diagnosis("ImagePull", waiting.message or waiting.reason, failing=True)
    if waiting is not None and waiting.reason.startswith("CreateContainer"):
        return Diagnosis("MissingReference", waiting.message or waiting.reason, failing=True)
    if ended is not None and ended.exit_code != 0 and not container.ready:
        reason, message = _end(ended)
        return Diagnosis(reason, f"container {container.name} {message}", failing=True)
    if waiting is not None and waiting.reason == "CrashLoopBackOff":
        return Diagnosis("CrashLoop", _BACK_OFF.sub("restarts again and again", waiting.message), failing=True)
    return None


def _end(ended: Terminated) -> tuple[str, str]:
    if ended.reason == "OOMKilled":
        return "OutOfMemory", "was killed for using more memory than its limit; raise spec.resources.limits.memory"
    words = last_words(ended.message)
    what = {
        endpoints.EXIT_CONFIG_ERROR: "cannot start",
        endpoints.EXIT_ENGINE_DIED: "lost its engine",
        endpoints.EXIT_DRAIN_TIMEOUT: "was ended with requests still running",
    }.get(ended.exit_code, f"ended with exit code {ended.exit_code}")
    reason = "OutOfMemory" if "out of memory" in words.lower() else "CrashLoop"
    return reason, f"{what}: {words}" if words else what


def last_words(message: str) -> str:
    """Return the end of a container's log that says what went wrong: its last lines, without a traceback's frames."""
    lines = [line.rstrip() for line in message.strip().splitlines()]
    told = [line for line in lines if line and not line.startswith((" ", "Traceback"))] or lines
    kept = "\n".join(told[-3:])
    return kept if len(kept) <= MAX_MESSAGE else f"...{kept[-MAX_MESSAGE:]}"


def _slow(pod: Pod) -> Diagnosis:
    runtime = next((one for one in pod.containers if one.name == names.RUNTIME_CONTAINER), None)
    if runtime is None or runtime.waiting is not None or not pod.containers:
        return Diagnosis("Starting", "its containers are being created", failing=False)
    if not runtime.started:
        return Diagnosis("ModelDownload", "the model is being downloaded and loaded", failing=False)
    return Diagnosis("NotReady", "the runtime says that it is not ready to serve", failing=False)


def draining(pods: Sequence[Pod]) -> Iterator[Pod]:
    """Yield the pods that finish their requests before they end."""
    return (pod for pod in pods if pod.deleting and any(container.terminated is None for container in pod.containers))
