"""Holds the API port for the runtime, and gives it the socket (SCM_RIGHTS, unix(7)).

A port is open for as long as any process has its socket. With two of them, in containers of their own, the death of the runtime
closes nothing: connections go on being taken by the kernel, and here, until there is a new runtime. While one is there,
no byte passes through this process.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from pathlib import Path

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.listener.relay import Relay
from flyball_runtime.listener.takeover import HANDED_OVER

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel takes ahead of us; Linux cuts it to net.core.somaxconn."""

PORT_RETRY_S = 0.5


async def hold(host: str, port: int, path: Path, relay: Relay) -> None:
    """Hold the port until cancelled; while no runtime has it, ``relay`` answers.

    Raises:
        ConfigError: the address or the path cannot be used.
    """
    with await _open_port(host, port) as listener, _open_door(path) as door:
        while True:
            with await _next_runtime(listener, door, relay) as runtime:
                logger.info("the runtime takes port %d", port)
                await _lend(listener, runtime)
            logger.warning("the runtime is gone; requests go to the other replicas until there is a new one")


async def _open_port(host: str, port: int) -> socket.socket:
    """Listen on the port. A runtime that outlived an earlier process of ours still has it; then wait for its end."""
    family, is_told = socket.AF_INET6 if ":" in host else socket.AF_INET, False
    while True:
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = f"cannot listen on {host}:{port} ({error.strerror}). Choose another address."
                raise ConfigError(why) from None
            if not is_told:
                logger.warning("waiting for port %d: a runtime has it from an earlier listener, or somebody else", port)
            is_told = True
            await asyncio.sleep(PORT_RETRY_S)
        else:
            listener.setblocking(False)
            return listener


def _open_door(path: Path) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    door.setblocking(False)
    try:
        path.unlink(missing_ok=True)
        door.bind(str(path))
        path.chmod(0o600)
        door.listen()
    except OSError as error:
        door.close()
        raise ConfigError(f"cannot make the socket {path} ({error}). Choose another --socket.") from None
    return door


async def _next_runtime(listener: socket.socket, door: socket.socket, relay: Relay) -> socket.socket:
    meanwhile = await asyncio.start_server(relay.answer, sock=listener.dup(), backlog=BACKLOG)
    try:
        runtime, _ = await asyncio.get_running_loop().sock_accept(door)
    finally:
        meanwhile.close()
    return runtime


async def _lend(listener: socket.socket, runtime: socket.socket) -> None:
    """Give the socket to the process at the other end, and wait for that process's end; it never sends anything."""
    with contextlib.suppress(ConnectionError):
        socket.send_fds(runtime, [HANDED_OVER], [listener.fileno()])
        await asyncio.get_running_loop().sock_recv(runtime, 1)
