"""Which deployment a command is about: one on this machine, or one on a cluster."""

import argparse

from flyball_operator.errors import OperatorError
from flyball_operator.local.command import add_state_argument


def add_arguments(parser: argparse.ArgumentParser, *, may_list: bool = False) -> None:
    """Add the deployment's name, and the options that say where it runs.

    Args:
        may_list: the name may be left out to mean all deployments, with ``--all-namespaces`` those of a whole cluster.
    """
    left_out = " (default: list all)" if may_list else ""
    parser.add_argument("name", nargs="?" if may_list else None, help=f"metadata.name of the deployment{left_out}")
    add_state_argument(parser)
    cluster = parser.add_argument_group("on a cluster", "With one of these, ask a cluster; without, this machine.")
    cluster.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: the context's, or default)")
    cluster.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    parser.set_defaults(all_namespaces=False)
    if may_list:
        cluster.add_argument(
            "-A", "--all-namespaces", action="store_true", help="list the deployments of all namespaces"
        )


def is_on_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether a cluster is to be asked. Raises OperatorError for options that exclude each other."""
    on_cluster = arguments.namespace is not None or arguments.context is not None or arguments.all_namespaces
    if arguments.all_namespaces and (arguments.name is not None or arguments.namespace is not None):
        raise OperatorError("--all-namespaces lists all deployments of a cluster; leave out NAME and --namespace")
    if on_cluster and arguments.state_dir is not None:
        raise OperatorError(
            "--state-dir is for deployments on this machine; --namespace, --context and --all-namespaces are for a cluster; "
            "leave one of them out"
        )
    return on_cluster
