"""``flyball status``: the state of a deployment."""

import argparse
import asyncio

import msgspec
from rich.console import Console, RenderableType

from flyball_operator.commands import where
from flyball_operator.commands.output import write
from flyball_operator.local.command import instance_folder
from flyball_operator.local.control import ask_status
from flyball_operator.local.snapshot import render
from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball status``."""
    parser.description = "Print the state of a deployment and of its replicas."
    where.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything that is known as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print a table or JSON; returns the exit code. Raises OperatorError when the deployment cannot be found or asked."""
    found, table = _on_cluster(arguments) if where.is_on_cluster(arguments) else _here(arguments)
    if arguments.json:
        write(msgspec.json.encode(found).decode() + "\n")
    else:
        console = Console()
        with console.capture() as text:
            console.print(table)
        write(text.get())
    return endpoints.EXIT_OK


def _here(arguments: argparse.Namespace) -> tuple[object, RenderableType]:
    snapshot = asyncio.run(ask_status(instance_folder(arguments)))
    return snapshot, render(snapshot)


def _on_cluster(arguments: argparse.Namespace) -> tuple[object, RenderableType]:
    from flyball_operator.commands import cluster, cluster_table  # here: Kopf and kubernetes take a second to import

    found = asyncio.run(cluster.find(arguments.name, arguments.namespace, arguments.context))
    return found, cluster_table.render(found)
