"""The command ``flyball-operator``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from flyball_operator import children, manifest, schema
from flyball_operator.errors import OperatorError
from flyball_operator.local import command
from flyball_protocol import endpoints


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    verbose = getattr(arguments, "verbose", False)
    logging.basicConfig(format="%(asctime)s  %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("flyball_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        return int(arguments.run(arguments))
    except OperatorError as error:
        print(f"flyball-operator: {error}", file=sys.stderr)
        return endpoints.EXIT_CONFIG_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; the parsed namespace's ``run`` takes it and returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="flyball-operator", description="Serve and tune language models from LLMDeployments."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    local = commands.add_parser(
        "local",
        help="run an LLMDeployment as processes on this machine",
        description="Run an LLMDeployment as processes on this machine. Run again, or edit the file, to change what runs.",
    )
    status = commands.add_parser("status", help="print how a deployment that runs on this machine stands")
    command.add_status_arguments(status)
    status.set_defaults(run=command.status)
    render = commands.add_parser("render", help="print the Kubernetes objects that an LLMDeployment stands for")
    for sub in (local, render):
        sub.add_argument("-f", "--file", type=Path, required=True, help="a YAML file with LLMDeployments")
    command.add_arguments(local)
    local.set_defaults(run=command.run)
    render.set_defaults(run=_render)
    commands.add_parser("crd", help="print the CustomResourceDefinition").set_defaults(run=_crd)
    return parser


def _render(arguments: argparse.Namespace) -> int:
    manifests = [children.deployment(deployment) for deployment in manifest.read_file(arguments.file)]
    print(yaml.safe_dump_all(manifests, sort_keys=False), end="")
    return endpoints.EXIT_OK


def _crd(arguments: argparse.Namespace) -> int:
    print(schema.crd_text(), end="")
    return endpoints.EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
