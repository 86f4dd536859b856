"""The service account of the operator, with exactly the rights that the chart gives it."""

from collections.abc import Sequence
from pathlib import Path

from chart_kit.helm import Helm, objects
from cluster_kit import Cluster

RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def create_operator_account(cluster: Cluster, namespace: str, *, watched: Sequence[str] = ()) -> Path:
    """Give a namespace the operator's service account and rights, and return a kubeconfig of that account.

    Args:
        namespace: where the operator would be installed. A release of this name is rendered, so several do not meet.
        watched: the namespaces to serve; none means all, by a ClusterRole that outlives the namespace.
    """
    values = [f"watchNamespaces[{index}]={name}" for index, name in enumerate(watched)]
    switches = ("crds.install=false", "userRoles.create=false", *values)
    rendered = Helm().render(*(f"--set={one}" for one in switches), release=namespace, namespace=namespace)
    rights = [one for one in objects(rendered) if one["kind"] in RIGHTS]
    cluster.apply(*rights)
    (account,) = (one["metadata"]["name"] for one in rights if one["kind"] == "ServiceAccount")
    return cluster.kubeconfig_of(namespace, account)
