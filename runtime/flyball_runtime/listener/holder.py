"""Holds the API port for the runtime, and gives it the socket (SCM_RIGHTS, unix(7)).

A port is open for as long as any process has its socket. With two of them, in containers of their own, the death of the runtime
closes nothing: connections go on being taken by the kernel, and here, until there is a new runtime. While one is there,
no byte passes through this process.
"""

import argparse
import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from flyball_protocol import endpoints
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.listener.relay import Relay, ServiceAddress

logger = logging.getLogger(__name__)

HANDED_OVER = b"."
"""What comes with the socket: a descriptor does not travel without a byte."""

WAIT_S = 15.0
"""How long a holder may take that was started at the same time, or that waits for a dead runtime's port."""

_RETRY_S = 0.1


@contextlib.contextmanager
def taken_listener(path: Path) -> Iterator[socket.socket]:
    """Give the listening socket from the holder at ``path``, which takes it as given back at the end of the block.

    Raises:
        ConfigError: there is no holder for 15 s.
    """
    with _connect(path) as holder:
        _, descriptors, _, _ = socket.recv_fds(holder, len(HANDED_OVER), 1)
        if not descriptors:
            raise ConfigError(
                f"the listener at {path} ended before it passed its port. The log of its container has the reason."
            )
        with socket.socket(fileno=descriptors[0]) as listener:
            yield listener


def _connect(path: Path) -> socket.socket:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.connect(str(path))
        except OSError as error:
            holder.close()
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"no listener answers at {path} ({error.strerror}) for {WAIT_S:g} s. Is the container 'listener' running?"
                ) from None
            time.sleep(_RETRY_S)
        else:
            return holder


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
                logger.info("the runtime now accepts connections on port %d", port)
                await _lend(listener, runtime)
            logger.warning("the runtime has ended; until a new one runs, requests go to the other replicas")


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
                logger.warning(
                    "waiting for port %d, which is in use by a runtime of an earlier listener or by another program",
                    port,
                )
            is_told = True
            await asyncio.sleep(PORT_RETRY_S)
        else:
            listener.setblocking(False)
            send_at_once(listener)
            return listener


def send_at_once(listener: socket.socket) -> None:
    """Have the connections of a port send what is written without waiting for the peer to acknowledge what came before.

    On a connection that is kept, Linux delays acknowledgements by 40 ms, and a stream would come in bunches. asyncio sets the
    option only where it has made the socket itself; Linux lets connections inherit it (RFC 896, RFC 1122 section 4.2.3).
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
    async with asyncio.TaskGroup() as group:
        meanwhile = group.create_task(relay.serve(listener))
        runtime, _ = await asyncio.get_running_loop().sock_accept(door)
        meanwhile.cancel()
    return runtime


async def _lend(listener: socket.socket, runtime: socket.socket) -> None:
    """Give the socket to the process at the other end, and wait for that process's end; it never sends anything."""
    with contextlib.suppress(ConnectionError):
        socket.send_fds(runtime, [HANDED_OVER], [listener.fileno()])
        await asyncio.get_running_loop().sock_recv(runtime, 1)


def run_listener(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    relay = Relay(parse_service(args.service))
    asyncio.run(_until_told(args.host, args.port, Path(args.socket), relay))
    return endpoints.EXIT_OK


def parse_service(text: str) -> ServiceAddress:
    """Read HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--service is {text!r}; write HOST:PORT with a port from 1 to 65535, such as chat:80.")
    return ServiceAddress(host, int(port))


async def _until_told(host: str, port: int, path: Path, relay: Relay) -> None:
    holding = asyncio.create_task(hold(host, port, path, relay))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, holding.cancel)
    await asyncio.wait([holding])
    if not holding.cancelled():
        holding.result()
    await relay.finish()
