"""One operator acts: a leader that cannot renew its lease makes no write once another may lead."""

import time
from datetime import datetime
from typing import Any

import pytest

from cluster_kit import Cluster
from cluster_kit.api import until
from cluster_kit.fault_proxy import Fault, FaultProxy
from cluster_kit.operator_process import OperatorProcess, child_rules, grant
from cluster_kit.world import World
from flyball_operator.cluster.api_server import DEPLOYMENT, LEASE, LLM_DEPLOYMENT

pytestmark = pytest.mark.slow

LEASE_S = 6
TERMS = f"--lease-seconds={LEASE_S}"


class Writes:
    """Notes when each write came to the proxy, the lease's own not counted. ``lease_fault`` is what those meet."""

    def __init__(self, lease_fault: Fault | None = None) -> None:
        self.at_s: list[float] = []
        self._lease_fault = lease_fault

    def __call__(self, method: str, path: str) -> Fault | None:
        if "/leases" in path:
            return self._lease_fault
        if method != "GET":
            self.at_s.append(time.time())
        return None


def taken_by(world: World, identity: str) -> float:
    """Return since when the process leads, by its own word: it wrote this before it did anything else."""

    def found() -> dict[str, Any] | None:
        lease = world.get(LEASE, "flyball-operator") or {"spec": {}}
        return lease if lease["spec"].get("holderIdentity") == identity else None

    lease = until(found, f"a lease of {identity}")
    return datetime.fromisoformat(lease["spec"]["acquireTime"]).timestamp()


@pytest.mark.parametrize("fault", [Fault(delay_s=600), Fault(503)], ids=["no answer", "an error"])
def test_a_leader_that_cannot_renew_makes_no_write_once_another_leads(
    cluster: Cluster, namespace: str, world: World, fault: Fault
) -> None:
    """All its other calls work, and there is always something to write."""
    grant(cluster, namespace, child_rules())
    writes = Writes(fault)
    with (
        FaultProxy(cluster.kubeconfig) as proxy,
        OperatorProcess(cluster, namespace, TERMS, server=proxy.url, identity="one") as one,
        OperatorProcess(cluster, namespace, TERMS, identity="two") as two,
    ):
        until(lambda: one.is_leader, "the first leader")
        proxy.faults = writes
        for number in range(1000):
            world.create(f"chat-{number}")
            if two.is_leader:
                break
            time.sleep(0.1)
        taken_s = taken_by(world, "two")
        world.create("after")
        world.appears(LLM_DEPLOYMENT, "after", where=lambda obj: obj.get("status"))
        assert one.wait() != 0
        assert f"was not renewed for {LEASE_S * 2 / 3:g} s" in one.log
    assert len(writes.at_s) > 3, "it went on writing while it held the lease"
    assert max(writes.at_s) < taken_s


def test_a_leader_that_was_stopped_for_a_while_writes_nothing_when_it_goes_on(
    cluster: Cluster, namespace: str, world: World
) -> None:
    """It finds work in its watches, and its lease with another."""
    grant(cluster, namespace, child_rules())
    writes = Writes()
    with (
        FaultProxy(cluster.kubeconfig) as proxy,
        OperatorProcess(cluster, namespace, TERMS, server=proxy.url, identity="one") as one,
        OperatorProcess(cluster, namespace, TERMS, identity="two") as two,
    ):
        world.create("before")
        world.appears(DEPLOYMENT, "before")
        one.wait_at_rest()
        proxy.faults = writes
        one.pause()
        try:
            taken_by(world, "two")
            until(lambda: two.is_leader, "the second leader")
            world.create("meanwhile")
            world.change("before", replicas=2)
        finally:
            one.go_on()
        assert one.wait() != 0
        assert "the lease" in one.log
        world.appears(DEPLOYMENT, "before", where=lambda obj: obj["spec"]["replicas"] == 2)
    assert writes.at_s == []


def test_two_processes_of_one_name_do_not_both_lead(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, child_rules())
    with (
        OperatorProcess(cluster, namespace, TERMS, identity="same") as one,
        OperatorProcess(cluster, namespace, TERMS, identity="same") as two,
    ):
        assert one.wait() != 0
        assert "was taken by another process with the name same" in one.log
        assert two.is_running
