"""A real Kubernetes for tests: built from Go modules, started on loopback, ended with the test session."""

from cluster_kit.assets import find_assets
from cluster_kit.cluster import Cluster
from cluster_kit.control_plane import ControlPlane
from cluster_kit.errors import ClusterError, CommandFailed, MissingProgram, NotOurCluster, StartFailed

__all__ = [
    "Cluster",
    "ClusterError",
    "CommandFailed",
    "ControlPlane",
    "MissingProgram",
    "NotOurCluster",
    "StartFailed",
    "find_assets",
]
