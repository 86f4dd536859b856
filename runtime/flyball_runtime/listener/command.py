"""`flyball listener` from its flags to its end."""

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from flyball_protocol import endpoints
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.listener.holder import hold
from flyball_runtime.listener.relay import Relay, Service


def run_command(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    relay = Relay(parse_service(args.service))
    asyncio.run(_until_told(args.host, args.port, Path(args.socket), relay))
    return endpoints.EXIT_OK


def parse_service(text: str) -> Service:
    """Read HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--service is {text!r}; write HOST:PORT with a port from 1 to 65535, such as chat:80.")
    return Service(host, int(port))


async def _until_told(host: str, port: int, path: Path, relay: Relay) -> None:
    holding = asyncio.create_task(hold(host, port, path, relay))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, holding.cancel)
    await asyncio.wait([holding])
    if not holding.cancelled():
        holding.result()
    await relay.finish()
