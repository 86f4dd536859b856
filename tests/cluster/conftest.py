"""A cluster for every test that asks for one; started when the first does."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_kit import Cluster, ControlPlane, MissingProgram, NotOurCluster, find_assets
from cluster_kit.api import Api
from cluster_kit.operator_process import OperatorProcess, child_rules, grant
from cluster_kit.world import World
from operator_kit.api_server import ApiServer, connect

KUBECONFIG_VARIABLE = "FLYBALL_TEST_KUBECONFIG"
CRDS = Path(__file__).parents[2] / "crds"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses a cluster is marked so: `-m 'not cluster'` leaves it out, and builds nothing."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the CRD: our own control plane, or the one of FLYBALL_TEST_KUBECONFIG."""
    if given := os.environ.get(KUBECONFIG_VARIABLE):
        yield _with_crds(Cluster(_kubectl_on_path(), Path(given), tmp_path_factory.mktemp("cluster")))
        return
    with ControlPlane(find_assets()) as ours:
        yield _with_crds(ours)


@pytest.fixture(scope="session")
def control_plane(cluster: Cluster) -> ControlPlane:
    """Our own control plane, for tests that stop and start its parts."""
    if not isinstance(cluster, ControlPlane):
        raise NotOurCluster("Stopping parts of a cluster", KUBECONFIG_VARIABLE)
    return cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace; what is in it goes with it, some time after the test."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    cluster.create_namespace(name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def crds() -> Callable[[Cluster], Cluster]:
    """Installs the CRD, again if need be."""
    return _with_crds


@pytest.fixture(scope="session")
def api_server(cluster: Cluster) -> Iterator[ApiServer]:
    """The API server's verdicts on objects."""
    with connect(cluster.kubeconfig) as server:
        yield server


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    """The API as its administrator."""
    made = Api(cluster.kubeconfig)
    yield made
    made.close()


@pytest.fixture
def world(api: Api, namespace: str) -> World:
    """The fresh namespace in a few words."""
    return World(api, namespace)


@pytest.fixture
def operator(cluster: Cluster, namespace: str) -> Iterator[OperatorProcess]:
    """An operator for the fresh namespace, with the rights that the chart gives it."""
    grant(cluster, namespace, child_rules())
    with OperatorProcess(cluster, namespace) as process:
        yield process
        assert "Traceback" not in process.log


def _with_crds(cluster: Cluster) -> Cluster:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    cluster.wait_established("-f", str(CRDS))
    return cluster


def _kubectl_on_path() -> Path:
    if found := shutil.which("kubectl"):
        return Path(found)
    raise MissingProgram("kubectl", f"Put it on PATH, or unset {KUBECONFIG_VARIABLE}.")
