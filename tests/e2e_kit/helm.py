"""Helm, and the operator's chart with the images of the tests."""

import os
import subprocess
from pathlib import Path

from cluster_kit.errors import CommandFailed
from e2e_kit import images
from e2e_kit.node import Node
from e2e_kit.programs import HELM

CHART = images.ROOT / "charts" / "flyball"
NAMESPACE = "flyball-system"
RELEASE = "flyball"


def helm(node: Node, *arguments: str) -> str:
    home = node.folder / "helm"
    environment = {**os.environ, "KUBECONFIG": str(node.kubeconfig), "HOME": str(home), "HELM_NO_PLUGINS": "1"}
    command = (str(HELM.build() / "helm"), *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(("helm", *arguments), done.returncode, done.stderr)
    return done.stdout


def install(node: Node, chart: Path = CHART) -> None:
    """Install the operator and wait until it runs."""
    repository, tag = images.OPERATOR.split(":")
    values = {"image.repository": repository, "image.tag": tag, "runtimeImage": images.RUNTIME, "logLevel": "Debug"}
    flags = [f"--set={key}={value}" for key, value in values.items()]
    helm(node, "install", RELEASE, str(chart), "-n", NAMESPACE, "--create-namespace", "--wait", "--timeout=90s", *flags)
