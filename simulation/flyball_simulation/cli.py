"""The command line: ``flyball simulate``."""

import argparse
import sys
from collections.abc import Sequence

from flyball_clients.errors import ConfigError as ClientConfigError
from flyball_operator.errors import SpecError
from flyball_protocol import endpoints, installed_version
from flyball_protocol.quoting import lines
from flyball_runtime.core.errors import ConfigError
from flyball_simulation import command, compiled


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flyball", description="Simulate a tuned deployment.")
    parser.add_argument("--version", action="version", version=f"flyball {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    simulate = commands.add_parser("simulate", help="run a trace through the engine and the tuner on a simulated clock")
    command.add_arguments(simulate)
    simulate.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input ends with its message on stderr."""
    words = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(words)
    try:
        if args.compile and not compiled.is_running():
            return compiled.run(words)
        return int(args.run(args))
    except (ConfigError, ClientConfigError, SpecError) as error:
        print(f"flyball {args.command}: {lines(str(error))}", file=sys.stderr)
        return endpoints.EXIT_CONFIG_ERROR
    except KeyboardInterrupt:
        return 130
