"""The operator's service account, with exactly the rights that the chart gives it."""

from collections.abc import Sequence
from pathlib import Path

from chart_kit.helm import Helm, Manifest, objects
from cluster_kit import Cluster

RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def rights(namespace: str, *, watched: Sequence[str] = ()) -> list[Manifest]:
    """Return the account, the roles and the bindings of an operator in ``namespace``.

    Args:
        namespace: names the release too, so several in one cluster do not meet.
        watched: the namespaces to serve; none means all, by a ClusterRole.
    """
    values = ("--set=crds.install=false,userRoles.create=false", f"--set-string=watchNamespaces={{{','.join(watched)}}}")
    rendered = Helm().render(*values, release=namespace, namespace=namespace)
    return [one for one in objects(rendered) if one["kind"] in RIGHTS]


def create_operator_account(cluster: Cluster, namespace: str, *, watched: Sequence[str] = ()) -> Path:
    """Give a namespace the operator's account and rights, and return a kubeconfig of that account."""
    cluster.apply(*rights(namespace, watched=watched))
    return cluster.kubeconfig_of(namespace, f"{namespace}-operator")
