"""A cluster for every test that asks for one; started when the first does."""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_kit import Cluster, ControlPlane, MissingProgram, NotOurCluster, find_assets

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


def _with_crds(cluster: Cluster) -> Cluster:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(CRDS), "--timeout=30s")
    return cluster


def _kubectl_on_path() -> Path:
    if found := shutil.which("kubectl"):
        return Path(found)
    raise MissingProgram("kubectl", f"Put it on PATH, or unset {KUBECONFIG_VARIABLE}.")
