"""``flyball crd``: the CustomResourceDefinition, or its fields as a page."""

import argparse

from flyball_operator import reference
from flyball_operator.commands.output import write
from flyball_operator.spec import schema
from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball crd``."""
    parser.description = "Print the CustomResourceDefinition of LLMDeployments."
    parser.add_argument("--reference", action="store_true", help="print its fields as a page of documentation instead")


def run(arguments: argparse.Namespace) -> int:
    """Print it; returns the exit code."""
    write(reference.markdown() if arguments.reference else schema.crd_text())
    return endpoints.EXIT_OK
