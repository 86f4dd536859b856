"""The command ``flyball``. It passes each command to the package that has it, and imports no other package."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from flyball_cli import completion
from flyball_cli.commands import COMMANDS
from flyball_protocol import endpoints, installed_version

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(words[0]) if words else None
    if command is None:
        return _run_own(words)
    package = f"flyball_{command.extra}"
    try:
        return int(importlib.import_module(f"{package}.cli").main(words))
    except ModuleNotFoundError as error:
        if str(error.name).startswith("flyball_") and error.name != package:
            raise  # a bug of Flyball
        print(
            f"flyball: {words[0]} needs the Python package {error.name}, which is not installed here. "
            f"Install the packages of this command: pip install 'flyball[{command.extra}]'",
            file=sys.stderr,
        )
        return endpoints.EXIT_CONFIG_ERROR
    except KeyboardInterrupt:  # while the package is imported; after that, the command handles it
        return EXIT_INTERRUPTED


def _run_own(words: list[str]) -> int:
    """Print help, the version, an error of usage, or a completion script."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    print(completion.script(arguments.shell, parser))
    return endpoints.EXIT_OK


def build_parser() -> argparse.ArgumentParser:
    """Return a parser that knows the names of the commands, but not their flags."""
    parser = argparse.ArgumentParser(
        prog="flyball",
        description="Serve language models, on one machine or on Kubernetes; talk to them; measure them.",
        epilog="`flyball COMMAND --help` lists the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"flyball {installed_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if command.summary is not None:
            commands.add_parser(name, help=command.summary)
    completion.add_arguments(
        commands.add_parser("completion", help="print a script that completes commands and flags in a shell")
    )
    return parser
