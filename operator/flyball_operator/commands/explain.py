"""``flyball explain``: what tuning did to a deployment, on what evidence, and what came of it."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from flyball_operator.commands import where
from flyball_operator.commands.explanation import Explanation, of_records, of_status, render
from flyball_operator.commands.output import add_format_argument, write
from flyball_operator.errors import LocalError
from flyball_operator.local.command import instance_folder
from flyball_operator.tuning.record import DecisionRecord, from_line
from flyball_protocol import endpoints

MAX_READ_BYTES = 8 << 20
"""Of the file of decisions, from its end: some hundred rounds of several replicas."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball explain``."""
    parser.description = "Tell what tuning did to a deployment: what was changed, why, and what came of it."
    where.add_arguments(parser)
    add_format_argument(parser)
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="where the instance on this machine writes decisions.jsonl (default: its state folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print it; returns the exit code. Raises OperatorError when there is nothing to be read."""
    found = _on_cluster(arguments) if where.is_on_cluster(arguments) else _here(arguments)
    if arguments.output == "json":
        write(msgspec.json.encode(found).decode() + "\n")
        return endpoints.EXIT_OK
    console = Console()
    with console.capture() as text:
        console.print(render(found, plain=not _takes_blocks(sys.stdout.encoding)))
    write(text.get())
    return endpoints.EXIT_OK


def _on_cluster(arguments: argparse.Namespace) -> Explanation:
    from flyball_operator.commands import on_cluster  # here: Kopf and kubernetes take a second to import

    found = asyncio.run(on_cluster.find(arguments.name, arguments.namespace, arguments.context))
    return of_status(found.deployment)


def _here(arguments: argparse.Namespace) -> Explanation:
    path = (arguments.log_dir or instance_folder(arguments).log_dir) / "decisions.jsonl"
    try:
        records, num_unreadable = read_last(path)
    except OSError as error:
        raise LocalError(
            f"the decisions of {arguments.name} cannot be read: {error}. They are there once tuning is on and a round has "
            "run; an instance that was started with --log-dir has them there. Give -n NAMESPACE for a cluster"
        ) from error
    if num_unreadable:
        print(f"{path}: {num_unreadable} lines of another version of Flyball are left out", file=sys.stderr)
    if not records:
        raise LocalError(f"{path} has no decision that this version can read; it gets one when tuning is on")
    return of_records(arguments.name, records)


def read_last(path: Path) -> tuple[list[DecisionRecord], int]:
    """Return the last records of a file, oldest first, and how many lines are none. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_READ_BYTES))
        lines = file.read().split(b"\n")
    lines = lines[1:-1] if size > MAX_READ_BYTES else lines[:-1]  # the ends may be cut, or still be written
    records, num_unreadable = [], 0
    for line in lines:
        try:
            records.append(from_line(line))
        except (msgspec.MsgspecError, ValueError):
            num_unreadable += 1
    return records, num_unreadable


def _takes_blocks(encoding: str) -> bool:
    try:
        "▁█".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
