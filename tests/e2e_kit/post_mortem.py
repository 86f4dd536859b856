"""What the namespaces of a failed test hold: pods, events, logs, and the logs of containers that were restarted."""

from collections.abc import Iterator

from cluster_kit.errors import ClusterError
from e2e_kit.node import Node

NUM_LINES = 80


def post_mortem(node: Node) -> str:
    """Return it in words. What cannot be read is told in its place: the API server may be what the test took away."""
    return "\n".join(_parts(node))


def _parts(node: Node) -> Iterator[str]:
    for namespace in _read(node, "get", "namespaces", "--output=name").split():
        name = namespace.removeprefix("namespace/")
        if not name.startswith("e2e-"):
            continue
        yield f"== {name}\n{_read(node, '-n', name, 'get', 'pods', '--output=wide')}"
        yield _read(node, "-n", name, "get", "events", "--sort-by=.lastTimestamp")
        for pod in _read(node, "-n", name, "get", "pods", "--output=name").split():
            logs = ("-n", name, "logs", pod, "--all-containers", "--prefix", f"--tail={NUM_LINES}")
            yield f"-- {pod}\n{_read(node, *logs)}"
            yield f"-- {pod}, containers that ended\n{_read(node, *logs, '--previous', '--ignore-errors')}"


def _read(node: Node, *arguments: str) -> str:
    try:
        return node.kubectl(*arguments, "--request-timeout=10s")
    except ClusterError as error:
        return f"({error})\n"
