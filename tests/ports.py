"""Ports for servers that tests start."""

import random
import socket

SERVER_PORTS = range(20000, 30000)
"""Linux gives none of these to a connection, which could take one between the look and the server's start; nor are they
NodePorts."""


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on."""
    for port in random.SystemRandom().sample(SERVER_PORTS, 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"of 100 ports from {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1} none is free")
