"""``flyball render``: the objects that the operator would make, without a cluster."""

import argparse

import yaml

from flyball_operator import children, names
from flyball_operator.commands.output import write
from flyball_operator.spec import manifest
from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball render``."""
    parser.description = "Print the Kubernetes objects that an LLMDeployment stands for. Nothing is run or changed."
    manifest.add_file_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the objects as YAML; returns the exit code. Raises SpecError."""
    platform = children.Platform()
    for llm in manifest.read_file(arguments.file):
        secret = names.rendered_admin_token_secret(llm.name)
        built = children.build(llm, platform, admin_token_secret=secret)
        head = f"# {llm.namespace}/{llm.name}. Not shown: the Secret with the admin token, which the operator makes.\n"
        write(head + yaml.safe_dump_all(built, sort_keys=False, explicit_start=True))
    return endpoints.EXIT_OK
