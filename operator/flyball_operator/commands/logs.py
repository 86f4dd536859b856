"""``flyball logs``: what the replicas of a deployment have logged."""

import argparse
import asyncio
import sys

from flyball_operator.commands import where
from flyball_operator.commands.output import write
from flyball_operator.errors import LocalError, OperatorError
from flyball_operator.local.command import instance_folder
from flyball_operator.local.reports import MAX_LINE_CHARS, find_last_lines, follow_logs, pass_on
from flyball_protocol import endpoints
from flyball_protocol.quoting import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball logs``."""
    parser.description = "Print the logs of a deployment's replicas; each line begins with the replica's or pod's name."
    where.add_arguments(parser)
    parser.add_argument(
        "--tail",
        type=_count,
        default=100,
        metavar="N",
        help="number of last lines of each replica (default: %(default)s)",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines, until Ctrl-C")
    parser.add_argument(
        "-p",
        "--previous",
        action="store_true",
        help="print the logs of containers before their last restart; on a cluster only",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the logs and return the exit code. Raises OperatorError if there are none."""
    if where.is_on_cluster(arguments):
        return _on_cluster(arguments)
    if arguments.previous:
        raise OperatorError("--previous is for a cluster; on this machine, a replica's log has all its restarts")
    return _here(arguments)


def _on_cluster(arguments: argparse.Namespace) -> int:
    from flyball_operator.commands import on_cluster  # here: Kopf and kubernetes take a second to import

    options = {"tail": arguments.tail, "follow": arguments.follow, "previous": arguments.previous}
    place = (arguments.name, arguments.namespace, arguments.context)
    num_printed = asyncio.run(on_cluster.print_logs(*place, **options, echo=_echo))
    return endpoints.EXIT_OK if num_printed else endpoints.EXIT_CONFIG_ERROR


def _here(arguments: argparse.Namespace) -> int:
    log_dir = instance_folder(arguments).log_dir
    try:
        offsets = find_last_lines(log_dir, arguments.tail)
        if not offsets:
            raise LocalError(
                f"there are no logs in {log_dir}; if the instance was started with --log-dir, they are in that folder. "
                "For a deployment on a cluster, give -n NAMESPACE"
            )
        pass_on(offsets, _echo)
    except OSError as error:
        raise LocalError(f"the logs in {log_dir} cannot be read: {error}") from error
    if arguments.follow:
        asyncio.run(follow_logs(log_dir, _echo, _report, offsets))
    return endpoints.EXIT_OK


def _echo(name: str, line: str) -> None:
    write(f"[{name}] {one_line(line, MAX_LINE_CHARS)}\n")


def _report(problem: str) -> None:
    print(problem, file=sys.stderr)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines; give 0 or more")
    return int(text)
