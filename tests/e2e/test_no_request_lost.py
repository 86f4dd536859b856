"""Under steady traffic through the Service, nothing that happens to operator or pods loses a request or changes an answer."""

import itertools
import random
import subprocess
import time
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e_kit import helm, processes
from e2e_kit.admin import admin_ports
from e2e_kit.models import ROLLOUT_TIMEOUT, SERVED_NAME, Model, is_ready
from e2e_kit.node import NAME
from e2e_kit.traffic import Traffic, undisturbed
from flyball_protocol import LimitsStatus
from flyball_protocol.endpoints import API_PORT, METRICS_PATH

FEW, FULL, FULL_DRAINS = 2, 20, 5
TAKEN = {LimitsStatus.APPLIED, LimitsStatus.DEFERRED}
CUT = {"ServerDisconnectedError", "ClientOSError", "ClientPayloadError"}
"""What a client of aiohttp says of a connection that ended before the answer did."""


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


def test_a_killed_runtime_fails_only_what_it_was_answering(model: Model, figures: dict[str, Any]) -> None:
    model.scale(2)
    killed, other = model.pods()
    with Traffic(model.url, SERVED_NAME, period_s=0.02) as traffic:  # so that there is always one in flight
        time.sleep(3)
        (container,) = killed["status"]["containerStatuses"]
        processes.kill("flyball", "serve", cgroup=container["containerID"].removeprefix("containerd://"))
        killed_s = time.monotonic()
        model.until(lambda: not all(map(is_ready, model.pods())), "a pod that is not ready")
        model.kubectl("wait", "--for=condition=Ready", "pod", "--all", ROLLOUT_TIMEOUT)
        back_s = time.monotonic() - killed_s
        time.sleep(2)
    verdict = traffic.verdict
    log = model.kubectl("logs", killed["metadata"]["name"], "--container=listener")
    figures |= {
        **verdict.figures,
        "ready_again_s": back_s,
        "relayed": log.count("was taken by another replica"),
        "known_within_s": max((one.ended_s - killed_s for one in verdict.failed), default=0.0),
        "problems": sorted({type_of(one.problem) for one in verdict.failed}),
    }
    late = [one for one in verdict.failed if one.sent_s > killed_s]
    assert not late and not verdict.changed, f"{figures}: {late[:5]} {verdict.changed[:5]}\n{log[-3000:]}"
    assert figures["relayed"], "the Service sent the killed pod none, so nothing was shown"
    ended = outcomes(other)
    assert ended and ended.keys() <= {"length", "stop"}, f"the other replica failed some: {ended}"
    assert set(figures["problems"]) <= CUT and figures["known_within_s"] < back_s


def outcomes(pod: dict[str, Any]) -> dict[str, float]:
    """How the requests of a pod ended since it started, by its own count."""
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{API_PORT}{METRICS_PATH}", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [one for family in families for one in family.samples if one.name == "flyball_requests_total"]
    return {one.labels["outcome"]: one.value for one in samples if one.value}


def type_of(problem: str) -> str:
    return problem.partition(":")[0]
