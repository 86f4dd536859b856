"""The command ``flyball-operator``."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from flyball_operator import children, manifest, names, reference, schema
from flyball_operator.cluster import command as cluster_command
from flyball_operator.errors import OperatorError
from flyball_operator.local import command
from flyball_protocol import endpoints
from flyball_protocol.quoting import lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    verbose = getattr(arguments, "verbose", False)
    logging.basicConfig(format="%(asctime)s  %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("flyball_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        return int(arguments.run(arguments))
    except OperatorError as error:
        print(f"flyball-operator: {lines(str(error))}", file=sys.stderr)
        return endpoints.EXIT_CONFIG_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; the parsed namespace's ``run`` takes it and returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="flyball-operator", description="Serve and tune language models from LLMDeployments."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    on_cluster = commands.add_parser(
        "run",
        help="run the operator on a cluster",
        description="Watch LLMDeployments and keep their children, status and limits as they should be.",
    )
    cluster_command.add_arguments(on_cluster)
    on_cluster.set_defaults(run=cluster_command.run)
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
    crd = commands.add_parser("crd", help="print the CustomResourceDefinition")
    crd.add_argument("--reference", action="store_true", help="print its fields as a page of documentation instead")
    crd.set_defaults(run=_crd)
    return parser


def _render(arguments: argparse.Namespace) -> int:
    platform = children.Platform()
    for llm in manifest.read_file(arguments.file):
        secret = names.rendered_admin_token_secret(llm.name)
        built = children.build(llm, platform, admin_token_secret=secret)
        head = f"# {llm.namespace}/{llm.name}. Not shown: the Secret with the admin token, which the operator makes.\n"
        _write(head + yaml.safe_dump_all(built, sort_keys=False, explicit_start=True))
    return endpoints.EXIT_OK


def _crd(arguments: argparse.Namespace) -> int:
    _write(reference.markdown() if arguments.reference else schema.crd_text())
    return endpoints.EXIT_OK


def _write(text: str) -> None:
    """Write to standard output. Raises OperatorError when that cannot be written; a reader that has enough is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        raise OperatorError(f"standard output cannot be written: {error.strerror}") from error


def _drop_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's end does not try to write it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
