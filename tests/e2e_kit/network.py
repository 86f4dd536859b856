"""The network of the node: inside its namespace, and with no way out of it."""

import socket
import subprocess
from pathlib import Path

from cluster_kit.control_plane import SERVICE_RANGE
from cluster_kit.errors import ClusterError

NODE_IP = "172.30.0.1"
POD_RANGE = "10.244.0.0/24"
_OURS = {"lo", "node0", "node0-peer", "cni0"}


class NotIsolated(ClusterError):
    def __init__(self, interfaces: set[str]) -> None:
        super().__init__(
            f"this process can reach {', '.join(sorted(interfaces))}: the node must run in a network namespace of its own. "
            "Start the tests with `make e2e`."
        )


def check_isolated() -> None:
    """Raise NotIsolated if a packet could leave this namespace."""
    others = {name for _, name in socket.if_nameindex() if not name.startswith("veth")} - _OURS
    if others:
        raise NotIsolated(others)


def set_up() -> None:
    """Give the node an address that is not loopback, and let packets to Services reach kube-proxy's rules.

    A packet that no rule rewrites ends at node0, whose other end nobody reads.
    """
    check_isolated()
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "node0", "type", "veth", "peer", "name", "node0-peer")
    _ip("addr", "add", f"{NODE_IP}/32", "dev", "node0")
    _ip("link", "set", "node0", "up")
    _ip("link", "set", "node0-peer", "up")
    _ip("route", "add", SERVICE_RANGE, "dev", "node0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)
