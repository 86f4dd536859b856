"""``flyball status``: the state of a deployment."""

import argparse
import asyncio
import sys

import msgspec
from rich.console import Console, RenderableType

from flyball_operator.commands import where
from flyball_operator.commands.output import add_format_argument, write
from flyball_operator.local.command import default_state_dir, instance_folder
from flyball_operator.local.control import ask_all, ask_status
from flyball_operator.local.snapshot import render, render_list
from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball status``."""
    parser.description = "Print the state of a deployment and of its replicas, or list all deployments."
    where.add_arguments(parser, may_list=True)
    add_format_argument(parser)
    parser.add_argument("--json", dest="output", action="store_const", const="json", help="the same as -o json")


def run(arguments: argparse.Namespace) -> int:
    """Print a table or JSON; returns the exit code. Raises OperatorError when a deployment cannot be found or asked."""
    if where.is_on_cluster(arguments):
        found, shown = _on_cluster(arguments) if arguments.name is not None else _all_on_cluster(arguments)
    else:
        found, shown = _here(arguments) if arguments.name is not None else _all_here(arguments)
    if arguments.output == "json":
        write(msgspec.json.encode(found).decode() + "\n")
    elif shown is None:
        print("no deployments found; -n NAMESPACE lists those of a cluster's namespace, -A of all", file=sys.stderr)
    else:
        console = Console()
        with console.capture() as text:
            console.print(shown)
        write(text.get())
    return endpoints.EXIT_OK


def _here(arguments: argparse.Namespace) -> tuple[object, RenderableType]:
    snapshot = asyncio.run(ask_status(instance_folder(arguments)))
    return snapshot, render(snapshot)


def _on_cluster(arguments: argparse.Namespace) -> tuple[object, RenderableType]:
    from flyball_operator.commands import on_cluster  # here: Kopf and kubernetes take a second to import

    found = asyncio.run(on_cluster.find(arguments.name, arguments.namespace, arguments.context))
    return found, on_cluster.render(found)


def _all_here(arguments: argparse.Namespace) -> tuple[object, RenderableType | None]:
    found = asyncio.run(ask_all(arguments.state_dir or default_state_dir()))
    return found, render_list(found) if found else None


def _all_on_cluster(arguments: argparse.Namespace) -> tuple[object, RenderableType | None]:
    from flyball_operator.commands import on_cluster  # here: Kopf and kubernetes take a second to import

    everywhere = arguments.all_namespaces
    place = {"namespace": arguments.namespace, "context": arguments.context, "everywhere": everywhere}
    if arguments.output == "json":
        return asyncio.run(on_cluster.find_all(**place)), None
    return None, on_cluster.render_list(asyncio.run(on_cluster.find_tables(**place)), with_namespace=everywhere)
