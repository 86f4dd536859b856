"""docs/operations.md: its commands do what the page says, in its order. Those that need a node are for tests/e2e."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_kit import CHART
from chart_kit.pages import commands
from cluster_kit import ControlPlane, find_assets
from e2e_kit.programs import HELM
from flyball_operator.errors import SpecError
from flyball_operator.spec import manifest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = CHART.parents[1]
PAGE = ROOT / "docs" / "operations.md"


@pytest.fixture(scope="module")
def bare() -> Iterator[ControlPlane]:
    """A control plane on which nobody has installed anything."""
    with ControlPlane(find_assets()) as ours:
        yield ours


def run(lines: list[str], bare: ControlPlane, folder: Path) -> None:
    path = os.pathsep.join((str(find_assets()), str(HELM.build()), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(bare.kubeconfig)}
    for line in lines:
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_every_command_works(bare: ControlPlane) -> None:
    lines = commands(PAGE, "bash")
    assert len(lines) > 15
    run(lines, bare, ROOT)


CRD = ROOT / "crds" / "llmdeployments.yaml"
FORMER = {
    "model": {"uri": "hf://org/name"},
    "runtime": {"dtype": "BFloat16", "kvCacheMemoryPercent": 80},
    "tuning": {"mode": "Off"},
    "disruption": {"mode": "None"},
    "networkPolicy": {"mode": "None"},
}
"""A spec with every spelling that an earlier alpha had and that is refused now."""


def test_stored_deployments_of_an_earlier_alpha_get_the_present_spelling(bare: ControlPlane, tmp_path: Path) -> None:
    bare.create_namespace("migrated")
    install(bare, without_checks(yaml.safe_load(CRD.read_text())))
    metadata = {"name": "chat", "namespace": "migrated"}
    bare.apply({"apiVersion": "flyball.dev/v1alpha1", "kind": "LLMDeployment", "metadata": metadata, "spec": FORMER})
    install(bare, yaml.safe_load(CRD.read_text()))
    try:
        assert is_accepted(stored(bare)) is False
        run(commands(PAGE, "bash migrate"), bare, tmp_path)
        spec = stored(bare)["spec"]
        assert is_accepted(stored(bare))
        assert (spec["runtime"]["dtype"], spec["runtime"]["gpuMemoryUtilizationPercent"]) == ("bfloat16", 80)
        assert {spec[part]["mode"] for part in ("tuning", "disruption", "networkPolicy")} == {"Disabled"}
    finally:
        bare.kubectl("delete", "-f", str(CRD))


def install(bare: ControlPlane, crd: dict[str, Any]) -> None:
    bare.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=json.dumps(crd))
    bare.wait_established("crd/llmdeployments.flyball.dev")


def stored(bare: ControlPlane) -> dict[str, Any]:
    return bare.get("llmdep", "chat", "--namespace=migrated")


def is_accepted(deployment: dict[str, Any]) -> bool:
    """Whether the operator takes an object as it is stored."""
    try:
        manifest.from_object(deployment)
    except SpecError:
        return False
    return True


def without_checks(node: Any) -> Any:
    """Return a schema that takes what the schemas of earlier alphas took, and more."""
    if isinstance(node, list):
        return [without_checks(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: without_checks(value) for key, value in node.items() if key not in ("enum", "x-kubernetes-validations")
    }
