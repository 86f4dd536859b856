"""Keep a replica's port open while the process that serves it is restarted: `flyball listener`."""

import argparse

from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``flyball listener``."""
    parser.description = (
        "Hold the API port of a replica, so that a runtime that is killed refuses nobody: while it is gone, requests go to the "
        f"other replicas. A runtime with {endpoints.LISTENER_ENV}=SOCKET takes the port from here. The operator runs this in "
        "each pod."
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=endpoints.API_PORT, help="the replica's API port (default: %(default)s)"
    )
    parser.add_argument(
        "--socket", required=True, metavar="PATH", help="Unix socket at which the runtime asks for the port"
    )
    parser.add_argument(
        "--service", required=True, metavar="HOST:PORT", help="where all replicas answer, for requests meanwhile"
    )


def run(args: argparse.Namespace) -> int:
    """Run ``flyball listener`` with parsed flags until SIGTERM; returns the exit code. Raises ConfigError."""
    from flyball_runtime.listener.holder import run_listener  # here: the other commands need none of it

    return run_listener(args)
