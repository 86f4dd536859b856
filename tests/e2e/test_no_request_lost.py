"""Under steady traffic through the Service, nothing that happens to operator or pods loses a request or changes an answer."""

import itertools
import random
import subprocess
import time
from typing import Any

import pytest

from e2e_kit import helm, processes
from e2e_kit.admin import admin_ports
from e2e_kit.models import ROLLOUT_TIMEOUT, SERVED_NAME, Model, is_ready
from e2e_kit.node import NAME
from e2e_kit.traffic import Traffic, undisturbed
from flyball_protocol import LimitsStatus

FEW, FULL, FULL_DRAINS = 2, 20, 5
TAKEN = {LimitsStatus.APPLIED, LimitsStatus.DEFERRED}


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """How often to do what disturbs."""
    return FULL if request.config.getoption("--full") else FEW


def roll(model: Model, mark: str) -> None:
    """Change the pods' template, and wait until new pods have taken over."""
    model.mark(mark)
    model.kubectl("rollout", "status", f"deployment/{model.name}", ROLLOUT_TIMEOUT)


def test_rolling_updates(model: Model, times: int, figures: dict[str, Any]) -> None:
    figures["times"] = times
    with undisturbed(model, figures):
        for count in range(times):
            roll(model, f"round-{count}")


def test_scaling_down(model: Model, times: int, figures: dict[str, Any]) -> None:
    figures["times"] = times
    with undisturbed(model, figures):
        for _ in range(times):
            model.scale(2)
            model.scale(1)


def test_draining_the_node(model: Model, times: int, figures: dict[str, Any]) -> None:
    figures["times"] = times = min(times, FULL_DRAINS)
    model.scale(2)
    with undisturbed(model, figures):
        for _ in range(times):
            drain(model)


def drain(model: Model) -> None:
    """Drain our pods off the node. There is no other one, so new pods find it open again once the first has gone."""
    before = uids(model)
    flags = (f"--pod-selector=app.kubernetes.io/instance={model.name}", "--delete-emptydir-data", "--timeout=110s")
    command = model.node.kubectl_command("drain", NAME, *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as draining:
        while before <= uids(model) and draining.poll() is None:
            time.sleep(0.1)
        model.node.kubectl("uncordon", NAME)
        _, errors = draining.communicate()
    assert draining.returncode == 0, errors
    model.until(lambda: not before & uids(model), "the end of the pods that were there")
    model.until(lambda: all(map(is_ready, model.pods())), "new pods that are ready")


def uids(model: Model) -> set[str]:
    return {pod["metadata"]["uid"] for pod in model.pods()}


def test_killing_the_operator(model: Model, times: int, figures: dict[str, Any]) -> None:
    figures["times"] = times
    chance = random.Random(4)
    with undisturbed(model, figures):
        for count in range(times):
            model.mark(f"kill-{count}", wait=False)
            time.sleep(chance.uniform(0, 4))
            processes.kill("flyball-operator", "run")
            model.node.kubectl(
                "-n", helm.NAMESPACE, "rollout", "status", f"deployment/{helm.RELEASE}-operator", ROLLOUT_TIMEOUT
            )
            roll(model, f"kill-{count}")


def test_changing_the_limits_live(model: Model, times: int, figures: dict[str, Any]) -> None:
    figures["times"] = times
    with undisturbed(model, figures):
        for revision, num_seqs in zip(range(1, times + 1), itertools.cycle((2, 16)), strict=False):
            for port in admin_ports(model):
                assert port.set_limits(revision, max_num_seqs=num_seqs).status in TAKEN
            time.sleep(3)


def test_failures_end_before_a_killed_runtime_is_back(model: Model, figures: dict[str, Any]) -> None:
    model.scale(2)
    with Traffic(model.url, SERVED_NAME, period_s=0.02) as traffic:  # so that there is always one in flight
        time.sleep(3)
        container = model.pods()[0]["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        killed_s = time.monotonic()
        processes.kill("flyball", "serve", cgroup=container)
        while all(map(is_ready, model.pods())):
            time.sleep(0.1)
        model.kubectl("wait", "--for=condition=Ready", "pod", "--all", ROLLOUT_TIMEOUT)
        back_s = time.monotonic() - killed_s
        time.sleep(2)
    verdict = traffic.verdict
    figures |= {
        **verdict.figures,
        "ready_again_s": back_s,
        "failed_in_flight": sum(one.sent_s < killed_s for one in verdict.failed),
        "last_failed_after_s": max((one.sent_s - killed_s for one in verdict.failed), default=0.0),
        "problems": sorted({type_of(one.problem) for one in verdict.failed}),
    }
    # Until Kubernetes has seen it, the Service sends a share of the requests to a port that nobody listens on; not for longer.
    assert figures["last_failed_after_s"] < figures["ready_again_s"]
    assert not verdict.changed


def type_of(problem: str) -> str:
    return problem.partition(":")[0]
