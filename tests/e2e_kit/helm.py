"""Helm, and the operator's chart with the images of the tests."""

from pathlib import Path

from chart_kit import CHART, Helm
from chart_kit.helm import NAMESPACE, RELEASE
from e2e_kit import images
from e2e_kit.node import Node


def helm(node: Node, *arguments: str) -> str:
    return Helm(node)(*arguments)


def install(node: Node, chart: Path = CHART) -> None:
    """Install the operator and wait until it runs."""
    repository, tag = images.OPERATOR.split(":")
    values = {"image.repository": repository, "image.tag": tag, "runtimeImage": images.RUNTIME, "logLevel": "Debug"}
    flags = [f"--set={key}={value}" for key, value in values.items()]
    helm(node, "install", RELEASE, str(chart), "-n", NAMESPACE, "--create-namespace", "--wait", "--timeout=90s", *flags)
