"""KEDA's and the Prometheus operator's kinds come and go while the operator runs."""

import asyncio
from collections.abc import Callable

import pytest

from cluster_kit import Cluster
from cluster_kit.api import until
from cluster_kit.operator_process import ACCOUNT, attentive_options, child_rules, grant
from cluster_kit.world import World
from flyball_operator.cluster.api_server import DEPLOYMENT, OPTIONAL_CHILDREN, POD_MONITOR, SCALED_OBJECT
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.monitoring import Metrics
from flyball_operator.cluster.operator import Operator
from operator_kit.foreign_crds import KEDA, PROMETHEUS_OPERATOR

pytestmark = pytest.mark.slow

FILES = (
    KEDA.file("config/crd/bases/keda.sh_scaledobjects.yaml"),
    PROMETHEUS_OPERATOR.file("example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
)
WANTS_BOTH = {"autoscaling": {"mode": "KEDA", "maxReplicas": 4}, "monitoring": {"podMonitor": "Enabled"}}


def beside_an_operator(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, user: Callable[[], None]
) -> None:
    """Run ``user`` beside an operator in this process, which looks at the cluster's kinds more often than a real one."""
    grant(cluster, namespace, child_rules())
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_of(namespace, ACCOUNT)))
    options = attentive_options(namespace)

    async def scenario() -> None:
        metrics = Metrics()
        running = asyncio.create_task(Operator(await Connection.find(metrics), metrics, options).run())
        try:
            await asyncio.to_thread(user)
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def install(cluster: Cluster) -> None:
    files = [f"--filename={path}" for path in FILES]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.wait_established(*files)


def remove(cluster: Cluster) -> None:
    cluster.kubectl("delete", "--ignore-not-found", *(f"--filename={path}" for path in FILES))


def test_kinds_that_go_end_no_other_work_and_may_come_again(
    cluster: Cluster, namespace: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def user() -> None:
        for name in ("first", "second"):
            install(cluster)
            world.create(name, **WANTS_BOTH)
            for kind in OPTIONAL_CHILDREN:
                world.appears(kind, name)
            remove(cluster)
            until(lambda name=name: "KEDA" in world.ready_is("MissingKind", name)["message"], "a missing KEDA")
            world.change(name, runtime={"maxNumSeqs": 7})
            world.appears(DEPLOYMENT, name, where=lambda obj: "--max-num-seqs=7" in str(obj))
        install(cluster)
        for kind in (SCALED_OBJECT, POD_MONITOR):
            for name in ("first", "second"):
                before = world.appears(kind, name)["metadata"]["uid"]
                world.api.delete(kind, namespace, name)
                world.appears(kind, name, where=lambda obj, before=before: obj["metadata"]["uid"] != before)

    try:
        beside_an_operator(cluster, namespace, monkeypatch, user)
    finally:
        remove(cluster)
