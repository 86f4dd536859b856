"""``flyball-operator run``: the operator on a cluster."""

import argparse
import asyncio
import logging
import os
import socket
from typing import Any

from flyball_operator import names
from flyball_operator.cluster.connection import SERVICE_ACCOUNT, Connection
from flyball_operator.cluster.election import LEASE_NAME, Terms
from flyball_operator.cluster.monitoring import Metrics
from flyball_operator.cluster.operator import Operator, OperatorOptions
from flyball_protocol import endpoints

log = logging.getLogger(__name__)

MAX_SECONDS = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball-operator run``."""
    parser.description = "Watch LLMDeployments and keep their children, status and limits up to date."
    scope = parser.add_mutually_exclusive_group(required=True)
    scope.add_argument("--namespace", action="append", metavar="NAME", help="serve this namespace; may be repeated")
    scope.add_argument("--all-namespaces", action="store_true", help="serve every namespace")
    parser.add_argument(
        "--own-namespace",
        metavar="NAME",
        default=own_namespace(),
        help="namespace of the Lease and of the operator's key (default: the pod's, here %(default)s)",
    )
    parser.add_argument(
        "--runtime-image",
        default=names.runtime_image(),
        help="image of deployments that name none (default: %(default)s)",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address of --metrics-port (default: %(default)s)")
    parser.add_argument(
        "--metrics-port",
        type=_port,
        default=8080,
        metavar="PORT",
        help="port of /metrics, /livez and /readyz (default: %(default)s)",
    )
    parser.add_argument(
        "--no-leader-election", action="store_true", help="act without the Lease; safe for a single process only"
    )
    parser.add_argument(
        "--lease-name",
        metavar="NAME",
        default=LEASE_NAME,
        help="Lease by which the operator's replicas elect a leader; each release needs its own (default: %(default)s)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=_seconds,
        metavar="S",
        default=15.0,
        help="seconds without a renewal after which another replica takes over (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        default=own_name(),
        help="unique name of this process in the Lease (default: the pod's, or host and process, here %(default)s)",
    )
    parser.add_argument(
        "--resync-seconds",
        type=_seconds,
        metavar="S",
        default=300.0,
        help="seconds between two listings of everything (default: %(default)s)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGTERM and return the exit code. Raises OperatorError if it cannot start or continue."""
    if not arguments.verbose:
        logging.getLogger("kopf").setLevel(logging.WARNING)
    for part in ("orchestration", "running"):  # the tracebacks of a watch that failed; the operator logs its reason
        logging.getLogger(f"kopf._core.reactor.{part}").setLevel(logging.CRITICAL)
    options = OperatorOptions(
        namespaces=tuple(arguments.namespace or ()),
        own_namespace=arguments.own_namespace,
        identity=arguments.identity,
        runtime_image=arguments.runtime_image,
        host=arguments.host,
        metrics_port=arguments.metrics_port,
        lease=None if arguments.no_leader_election else Terms(arguments.lease_seconds),
        lease_name=arguments.lease_name,
        resync_s=arguments.resync_seconds,
    )
    log.info("%s", options)
    asyncio.run(_run(options))
    return endpoints.EXIT_OK


async def _run(options: OperatorOptions) -> None:
    asyncio.get_running_loop().set_exception_handler(tell_unhandled)
    metrics = Metrics()
    await Operator(await Connection.find(metrics), metrics, options).run()


def tell_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no task handles.

    At the end asyncio closes all generators at once. A generator of Kopf that is interrupted while it handles an event may find
    its inner generator closed already, and raises. Nothing is lost by that, so it is logged at debug, without a traceback.
    """
    if "asyncgen" in context:
        log.debug("%s: %s", context["message"], context.get("exception"))
    else:
        loop.default_exception_handler(context)


def own_namespace() -> str:
    """Return the namespace of the pod that this process runs in; outside a pod, the default one."""
    file = SERVICE_ACCOUNT / "namespace"
    if given := os.environ.get("POD_NAMESPACE"):
        return given
    return file.read_text(encoding="utf-8").strip() if file.is_file() else names.OPERATOR_NAMESPACE


def own_name() -> str:
    """Return the name of the pod that this process runs in; outside a pod, host name and process id.

    A pod's host name is its name cut to 63 characters, so two replicas with long names may share it. Two processes with the
    same name would take the Lease from each other.
    """
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= MAX_SECONDS:  # neither is nan
        raise argparse.ArgumentTypeError(f"{text} is out of range; give 1 to {MAX_SECONDS} seconds")
    return seconds


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; give 1 to 65535, or 0 for any free one")
    return port
