"""Helm, as tests call it."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster_kit import Cluster, CommandFailed
from e2e_kit.programs import HELM

CHART = Path(__file__).parents[2] / "charts" / "flyball"
RELEASE = "flyball"
NAMESPACE = "flyball-system"
TIMEOUT_S = 600.0

Manifest = dict[str, Any]


class Helm:
    """Helm with nobody's settings but ours. ``cluster`` is where releases go; without one it lints and renders."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self._program = HELM.build() / "helm"
        self._cluster = cluster

    def __call__(self, *arguments: str) -> str:
        """Run helm and return what it printed. Raises CommandFailed."""
        done = subprocess.run(
            (str(self._program), *arguments), env=self._environment(), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise CommandFailed(("helm", *arguments), done.returncode, done.stderr + done.stdout)
        return done.stdout

    def render(self, *arguments: str, release: str = RELEASE, namespace: str = NAMESPACE, chart: Path = CHART) -> str:
        """Return what an installation would apply, as YAML."""
        return self("template", release, str(chart), f"--namespace={namespace}", *arguments)

    def _environment(self) -> dict[str, str]:
        kubeconfig = os.devnull if self._cluster is None else str(self._cluster.kubeconfig)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
        return ours | {"KUBECONFIG": kubeconfig}


def objects(rendered: str) -> Iterator[Manifest]:
    """Yield the objects of a render."""
    yield from (json.loads(json.dumps(one)) for one in yaml.safe_load_all(rendered) if one)
