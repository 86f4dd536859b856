"""While many long streams are in flight, nothing that happens to operator or pods loses a request or changes an answer."""

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e_kit import helm, processes
from e2e_kit.admin import admin_ports
from e2e_kit.disturbances import BUSY, STREAMS_PER_REPLICA, Load, drain, roll, undisturbed, work_of
from e2e_kit.models import LONG_TIMEOUT_S, ROLLOUT_TIMEOUT, Model, is_ready, serving
from e2e_kit.node import Node
from e2e_kit.replica import outcomes
from e2e_kit.work import NUM_RUNNING, Work
from flyball_protocol import LimitsStatus

FEW, FULL, FULL_DRAINS = 2, 6, 3
TAKEN = {LimitsStatus.APPLIED, LimitsStatus.DEFERRED}
LOWERED = 8
AT_ONCE = 16
"""Requests sent when a runtime was killed: the Service has not heard of it yet, so that its pod gets some of them."""
CUT = {"ServerDisconnectedError", "ClientOSError", "ClientPayloadError"}
"""What a client of aiohttp says of a connection that ended before the answer did."""


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """How often to do what disturbs."""
    return FULL if request.config.getoption("--full") else FEW


@pytest.fixture(scope="module")
def busy(operator: Node) -> Iterator[Model]:
    """A model for all tests of this file. Each leaves it with any number of replicas, and with the limits of BUSY."""
    with serving(operator, **BUSY) as model:
        yield model


@pytest.fixture(scope="module")
def work(busy: Model) -> Work:
    return work_of(busy)


def test_rolling_updates(busy: Model, work: Work, times: int, figures: dict[str, Any]) -> None:
    busy.scale(1)
    with undisturbed(busy, work, figures) as load:
        for count in range(times):
            load.wait_until_busy()
            roll(busy, f"round-{count}")


def test_scaling_down(busy: Model, work: Work, times: int, figures: dict[str, Any]) -> None:
    with undisturbed(busy, work, figures, num_streams=2 * STREAMS_PER_REPLICA) as load:
        for _ in range(times):
            busy.scale(2)
            load.wait_until_busy()
            busy.scale(1)


def test_draining_the_node(busy: Model, work: Work, times: int, figures: dict[str, Any]) -> None:
    busy.scale(2)
    with undisturbed(busy, work, figures, num_streams=2 * STREAMS_PER_REPLICA) as load:
        for _ in range(min(times, FULL_DRAINS)):
            load.wait_until_busy()
            drain(busy)


def test_killing_the_operator(busy: Model, work: Work, times: int, figures: dict[str, Any]) -> None:
    busy.scale(1)
    chance = random.Random(4)
    deployment = f"deployment/{helm.RELEASE}-operator"
    with undisturbed(busy, work, figures) as load:
        for count in range(times):
            load.wait_until_busy()
            busy.mark(f"kill-{count}", wait=False)
            time.sleep(chance.uniform(0, 4))
            processes.kill("flyball-operator", "run")
            busy.node.kubectl("-n", helm.NAMESPACE, "rollout", "status", deployment, ROLLOUT_TIMEOUT)
            roll(busy, f"kill-{count}")


def test_changing_the_limits_live(busy: Model, work: Work, times: int, figures: dict[str, Any]) -> None:
    busy.scale(1)
    limits = itertools.cycle((LOWERED, NUM_RUNNING))
    with undisturbed(busy, work, figures) as load:
        for revision in range(1, times + 1):
            load.wait_until_busy()
            set_limit(busy, revision, next(limits))
    set_limit(busy, times + 1, NUM_RUNNING)


def set_limit(model: Model, revision: int, max_num_seqs: int) -> None:
    """Post the limit to each replica, and wait until it is in force."""
    ports = admin_ports(model)
    for port in ports:
        assert port.set_limits(revision, max_num_seqs=max_num_seqs).status in TAKEN
    model.until(
        lambda: all(port.limits().effective.max_num_seqs == max_num_seqs for port in ports),
        f"at most {max_num_seqs} sequences in all replicas",
        LONG_TIMEOUT_S,
    )


def test_a_killed_runtime_fails_only_what_it_was_answering(busy: Model, work: Work, figures: dict[str, Any]) -> None:
    busy.scale(2)
    busy.until(lambda: len(busy.pods()) == 2, "the end of earlier replicas", LONG_TIMEOUT_S)
    killed, other = busy.pods()
    with Load(busy, work, 2 * STREAMS_PER_REPLICA) as load:
        load.wait_until_busy()
        (container,) = killed["status"]["containerStatuses"]
        processes.kill("flyball", "serve", cgroup=container["containerID"].removeprefix("containerd://"))
        killed_s = time.monotonic()
        load.send_at_once(AT_ONCE)
        busy.until(lambda: not all(map(is_ready, busy.pods())), "a pod that is not ready")
        busy.kubectl("wait", "--for=condition=Ready", "pod", "--all", ROLLOUT_TIMEOUT)
        back_s = time.monotonic() - killed_s
        load.wait_until_busy()
    verdict = load.verdict
    log = busy.kubectl("logs", killed["metadata"]["name"], "--container=listener")
    figures |= {
        **load.figures,
        "ready_again_s": back_s,
        "relayed": log.count("was accepted by another replica"),
        "known_within_s": max(((one.ended_s or killed_s) - killed_s for one in verdict.failed), default=0.0),
        "problems": sorted({one.problem.partition(":")[0] for one in verdict.failed}),
    }
    late = [one for one in verdict.failed if one.sent_s > killed_s]
    assert not late and not verdict.changed, f"{verdict}\n{log[-3000:]}"
    assert figures["relayed"], "the Service sent the killed pod none, so nothing was shown"
    ended = outcomes(other)
    assert ended and ended.keys() <= {"length", "stop"}, f"the other replica failed some: {ended}"
    assert set(figures["problems"]) <= CUT and figures["known_within_s"] < back_s
