"""``flyball validate``: what an API server and the operator would say about a manifest, without a cluster."""

import argparse

from flyball_operator import children, names
from flyball_operator.commands.output import write
from flyball_operator.spec import manifest
from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball validate``."""
    parser.description = (
        "Check the LLMDeployments in a file: fields, values, and rules that span fields. "
        f"The exit code is {endpoints.EXIT_CONFIG_ERROR} when something is wrong; each problem is one line."
    )
    manifest.add_file_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what is valid; returns the exit code. Raises SpecError that lists the problems."""
    for llm in manifest.read_file(arguments.file):
        children.build(llm, children.Platform(), admin_token_secret=names.rendered_admin_token_secret(llm.name))
        write(f"{llm.namespace}/{llm.name} is valid\n")
    return endpoints.EXIT_OK
