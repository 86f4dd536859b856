"""Pod states as a kubelet and a scheduler write them, and what is read off them."""

from typing import Any

import pytest

from flyball_operator.observed import Pod
from flyball_operator.status.diagnosis import Diagnosis, diagnose, draining, last_words

GPU = "nvidia.com/gpu"
RUNNING = {"running": {"startedAt": "2026-11-21T10:00:00Z"}}
NO_GPU = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu."
NO_CLAIM = 'persistentvolumeclaim "weights" not found'
BACK_OFF = "back-off 20s restarting failed container=runtime pod=chat-1_team(8c0c)"
STACK = """Loading weights
Traceback (most recent call last):
  File "/app/cli.py", line 3, in main
    load()
flyball: model.safetensors is 12 bytes long and its header says 4096; download it again
"""


def pod(name: str = "chat-1", *, ready: bool = False, phase: str = "Pending", **given: Any) -> Pod:
    conditions = [{"type": "Ready", "status": str(ready)}]
    if "unschedulable" in given:
        message = given.pop("unschedulable")
        conditions.append({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message})
    metadata = {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1"}
    if given.pop("deleting", False):
        metadata["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    return Pod.of({"metadata": metadata, "status": {"phase": phase, "conditions": conditions, **given}})


def runtime(state: dict[str, Any], last: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    status = {"name": "runtime", "state": state, "lastState": {"terminated": last} if last else {}, **more}
    return {"containerStatuses": [status]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(exit_code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": "2026-11-21T10:00:00Z"}


@pytest.mark.parametrize(
    ("seen", "reason", "message", "failing"),
    [
        (pod(unschedulable=NO_GPU), "InsufficientGPU", "2 Insufficient nvidia.com/gpu", True),
        (pod(unschedulable="0/3 nodes are available: 3 Insufficient memory."), "Unschedulable", "memory", True),
        (pod(unschedulable=NO_CLAIM), "MissingClaim", "weights", True),
        (pod(**runtime(waiting("ErrImagePull", "not found: registry/x:1"))), "ImagePull", "registry/x:1", True),
        (pod(**runtime(waiting("InvalidImageName"))), "ImagePull", "InvalidImageName", True),
        (
            pod(
                initContainerStatuses=[{"name": "listener", "state": waiting("ErrImagePull", "not found: x:1")}],
                **runtime(waiting("PodInitializing")),
            ),
            "ImagePull",
            "not found: x:1",
            True,
        ),
        (pod(**runtime(waiting("ImageInspectError", "no space left"))), "ImagePull", "no space left", True),
        (pod(**runtime(waiting("SignatureValidationFailed"))), "ImagePull", "SignatureValidationFailed", True),
        (
            pod(**runtime(waiting("CreateContainerConfigError", 'secret "hub" not found'))),
            "MissingReference",
            'secret "hub" not found',
            True,
        ),
        (
            pod(phase="Running", **runtime(waiting("CrashLoopBackOff", BACK_OFF), ended(137, "OOMKilled"))),
            "OutOfMemory",
            "limits.memory",
            True,
        ),
        (
            pod(phase="Running", **runtime(waiting("CrashLoopBackOff", BACK_OFF), ended(2, message=STACK))),
            "CrashLoop",
            "container runtime cannot start: Loading weights\nflyball: model.safetensors is 12 bytes",
            True,
        ),
        (
            pod(phase="Running", **runtime(RUNNING, ended(1, message="torch.OutOfMemoryError: CUDA out of memory"))),
            "OutOfMemory",
            "CUDA",
            True,
        ),
        (pod(phase="Running", **runtime({"terminated": ended(3)})), "CrashLoop", "lost its engine", True),
        (
            pod(phase="Running", **runtime(waiting("CrashLoopBackOff", BACK_OFF))),
            "CrashLoop",
            "restarts again and again",
            True,
        ),
        (
            pod(phase="Failed", reason="Evicted", message="The node was low on memory."),
            "Evicted",
            "low on memory",
            True,
        ),
        (pod(phase="Failed", **runtime({"terminated": ended(1, message="boom")})), "CrashLoop", "boom", True),
        (pod(), "Starting", "being created", False),
        (pod(**runtime(waiting("ContainerCreating"))), "Starting", "being created", False),
        (pod(phase="Running", **runtime(RUNNING, started=False)), "ModelDownload", "downloaded and loaded", False),
        (pod(phase="Running", **runtime(RUNNING, started=True)), "NotReady", "not ready to serve", False),
        (pod(phase="Running", **runtime(RUNNING, ended(3), started=True)), "NotReady", "not ready to serve", False),
        (pod(phase="Running", **runtime(RUNNING, ended(3), started=False)), "CrashLoop", "lost its engine", True),
    ],
)
def test_a_pods_state_names_its_reason(seen: Pod, reason: str, message: str, failing: bool) -> None:
    found = diagnose([seen], GPU)
    assert found is not None
    assert (found.reason, found.failing) == (reason, failing)
    assert message in found.message


def test_the_message_of_a_back_off_does_not_change_with_its_length() -> None:
    """A condition that changes each time the kubelet waits longer would be written for nothing."""
    first, second = (
        pod(**runtime(waiting("CrashLoopBackOff", text))) for text in (BACK_OFF, BACK_OFF.replace("20s", "5m0s"))
    )
    assert diagnose([first], GPU) == diagnose([second], GPU)


def test_what_is_ready_ended_or_on_its_way_out_has_nothing_wrong() -> None:
    pods = [pod(ready=True), pod(phase="Succeeded"), pod(deleting=True, unschedulable=NO_GPU)]
    assert diagnose(pods, GPU) is None
    assert diagnose([], GPU) is None


def test_the_worst_comes_first_and_says_how_many_are_like_it() -> None:
    crashing = runtime(waiting("CrashLoopBackOff", BACK_OFF), ended(2, message="bad model"))
    pods = [pod("chat-1"), pod("chat-3", **crashing), pod("chat-2", **crashing), pod("chat-4", ready=True)]
    assert diagnose(pods, GPU) == Diagnosis(
        "CrashLoop", "pod chat-2 (1 more like it): container runtime cannot start: bad model", failing=True
    )


def test_another_accelerator_than_asked_for_is_not_named_a_gpu() -> None:
    found = diagnose([pod(unschedulable=NO_GPU)], "amd.com/gpu")
    assert found is not None
    assert found.reason == "Unschedulable"


def test_pods_drain_until_their_containers_have_ended() -> None:
    leaving = pod("chat-1", deleting=True, **runtime(RUNNING))
    left = pod("chat-2", deleting=True, **runtime({"terminated": ended(0)}))
    assert [*draining([leaving, left, pod("chat-3", **runtime(RUNNING))])] == [leaving]


def test_last_words_are_short_and_never_empty_for_a_message() -> None:
    assert last_words(" only\n  frames") == "only"
    assert len(last_words("x" * 5000)) < 750
    assert last_words("") == ""
