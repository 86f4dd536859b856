"""``flyball status``: how a deployment stands."""

import argparse
import asyncio

import msgspec
from rich.console import Console

from flyball_operator.local.command import add_state_argument, instance_folder
from flyball_operator.local.control import ask_status
from flyball_operator.local.table import render
from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball status``."""
    parser.description = "Print how a deployment stands that runs on this machine."
    parser.add_argument("name", help="metadata.name of the deployment")
    add_state_argument(parser)
    parser.add_argument("--json", action="store_true", help="print everything that is known as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print a table or JSON; returns the exit code. Raises LocalError when no instance runs."""
    snapshot = asyncio.run(ask_status(instance_folder(arguments)))
    if arguments.json:
        print(msgspec.json.encode(snapshot).decode())
    else:
        Console().print(render(snapshot))
    return endpoints.EXIT_OK
