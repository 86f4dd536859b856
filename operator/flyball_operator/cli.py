"""The commands of ``flyball-operator``, most of which ``flyball`` has too. Each one's module is imported when it is used."""

import argparse
import importlib
import logging
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from flyball_operator.commands.output import ReaderGone
from flyball_operator.errors import OperatorError
from flyball_protocol import endpoints, installed_version
from flyball_protocol.quoting import lines

EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """A command. ``module`` has ``add_arguments(parser)``, and ``run(arguments)``, which returns the exit code."""

    summary: str
    module: str


COMMANDS = {
    "run": Command("run the operator on a cluster", "cluster.command"),
    "local": Command("run an LLMDeployment as processes on this machine", "local.command"),
    "status": Command("print the state of a deployment, on this machine or on a cluster", "commands.status"),
    "explain": Command("tell what tuning did to a deployment, and why", "commands.explain"),
    "logs": Command("print the logs of a deployment's replicas, on this machine or on a cluster", "commands.logs"),
    "validate": Command("check the LLMDeployments in a file", "commands.validate"),
    "render": Command("print the Kubernetes objects that an LLMDeployment stands for", "commands.render"),
    "crd": Command("print the CustomResourceDefinition", "commands.crd"),
}


def operator(argv: Sequence[str] | None = None) -> int:
    """Run ``flyball-operator``; returns the exit code."""
    return main(argv, prog="flyball-operator")


def main(argv: Sequence[str] | None = None, prog: str = "flyball") -> int:
    """Run one command; returns the exit code. Errors that a user can mend end with their message on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser(prog, words[:1]).parse_args(words)
    verbose = getattr(arguments, "verbose", False)
    logging.basicConfig(format="%(asctime)s  %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("flyball_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        return int(arguments.run(arguments))
    except ReaderGone:
        return endpoints.EXIT_OK
    except OperatorError as error:
        print(f"{prog} {words[0]}: {lines(str(error))}", file=sys.stderr)
        return endpoints.EXIT_CONFIG_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser(
    prog: str = "flyball-operator", complete: Collection[str] = tuple(COMMANDS)
) -> argparse.ArgumentParser:
    """Return the parser; the parsed namespace's ``run`` takes it and returns an exit code.

    Args:
        complete: commands whose modules are imported, to add their flags. The others are listed in the help only.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Serve and tune language models from LLMDeployments.")
    parser.add_argument("--version", action="version", version=f"{prog} {installed_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary)
        if name in complete:
            module = importlib.import_module(f"flyball_operator.{command.module}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(operator())
