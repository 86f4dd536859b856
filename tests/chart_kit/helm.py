"""Helm, built from its Go module at first use."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster_kit import Cluster, CommandFailed
from cluster_kit.go_program import GoProgram

CHART = Path(__file__).parents[2] / "charts" / "flyball"
RELEASE = "flyball"
NAMESPACE = "flyball-system"
TIMEOUT_S = 120.0

PROGRAM = GoProgram(
    "helm",
    Path(__file__).with_name("go"),
    versioned_by="helm.sh/helm/v4",
    packages=("helm.sh/helm/v4/cmd/helm",),
    ldflags="-s -w -X helm.sh/helm/v4/internal/version.version={version}",
)

Manifest = dict[str, Any]


class Helm:
    """Helm with nobody's settings but ours. ``cluster`` is where releases go; without one it lints and renders."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self._program = PROGRAM.build() / "helm"
        self._cluster = cluster

    def __call__(self, *arguments: str) -> str:
        """Run helm and return what it printed. Raises CommandFailed."""
        prefix, environment = self._surroundings()
        done = subprocess.run(
            (*prefix, str(self._program), *arguments),
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise CommandFailed(("helm", *arguments), done.returncode, done.stderr + done.stdout)
        return done.stdout

    def render(self, *arguments: str, release: str = RELEASE, namespace: str = NAMESPACE, chart: Path = CHART) -> str:
        """Return what an installation would apply, as YAML."""
        return self("template", release, str(chart), f"--namespace={namespace}", *arguments)

    def _surroundings(self) -> tuple[tuple[str, ...], dict[str, str]]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
        if self._cluster is None:
            return (), environment | {"KUBECONFIG": os.devnull}
        return self._cluster.prefix, environment | {"KUBECONFIG": str(self._cluster.kubeconfig)}


def objects(rendered: str) -> Iterator[Manifest]:
    """Yield the objects of a render."""
    yield from (json.loads(json.dumps(one)) for one in yaml.safe_load_all(rendered) if one)
