"""Which deployment a command is about: one on this machine, or one on a cluster."""

import argparse

from flyball_operator.errors import OperatorError
from flyball_operator.local.command import add_state_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the deployment's name, and the options that say where it runs."""
    parser.add_argument("name", help="metadata.name of the deployment")
    add_state_argument(parser)
    cluster = parser.add_argument_group("on a cluster", "With one of these, ask a cluster; without, this machine.")
    cluster.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: the context's, or default)")
    cluster.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")


def is_on_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether a cluster is to be asked. Raises OperatorError for options that exclude each other."""
    on_cluster = arguments.namespace is not None or arguments.context is not None
    if on_cluster and arguments.state_dir is not None:
        raise OperatorError(
            "--state-dir is for a deployment on this machine, --namespace and --context are for one on a cluster; "
            "leave one of them out"
        )
    return on_cluster
