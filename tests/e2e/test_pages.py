"""README.md and docs/operations.md, followed line by line.

Images have the names that the pages count on. The examples keep their names, but serve the demo model on the CPU.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from chart_kit.pages import commands
from cluster_kit import find_assets
from e2e_kit import images
from e2e_kit.models import SMALL
from e2e_kit.node import Node
from e2e_kit.programs import HELM

EXAMPLES = (Path("examples/cpu.yaml"), Path("examples/llmdeployment.yaml"))
NAMES = {
    images.OPERATOR: ("docker.io/library/flyball-operator:0.1.0", "registry.example.com/flyball-operator:0.1.0"),
    images.RUNTIME: ("docker.io/library/flyball-runtime:0.1.0", "registry.example.com/flyball-runtime:0.1.0"),
}
LEAVE_NOTHING_BEHIND = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The repository as far as the pages speak of it."""
    for name in ("charts", "crds"):
        (tmp_path / name).symlink_to(images.ROOT / name)
    (tmp_path / "examples").mkdir()
    for example in EXAMPLES:
        llm = yaml.safe_load((images.ROOT / example).read_text())
        llm["spec"] = {**SMALL, "model": {**llm["spec"]["model"], "uri": SMALL["model"]["uri"]}}
        (tmp_path / example).write_text(yaml.safe_dump(llm))
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def names(node: Node) -> None:
    for image, others in NAMES.items():
        node.tag_image(image, *others)


def follow(node: Node, checkout: Path, lines: list[str]) -> str:
    """Run the lines as one script that stops at the first that fails; return what they printed."""
    path = os.pathsep.join((str(find_assets()), str(HELM.build()), os.environ["PATH"]))
    script = "\n".join(("set -euo pipefail", LEAVE_NOTHING_BEHIND, *lines))
    done = subprocess.run(
        ("bash", "-x", "-c", script),
        cwd=checkout,
        env={**os.environ, "PATH": path, "KUBECONFIG": str(node.kubeconfig)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_readme(node_without_operator: Node, checkout: Path) -> None:
    printed = follow(node_without_operator, checkout, commands(images.ROOT / "README.md", "bash cluster"))
    assert '"role":"assistant"' in printed.replace(" ", ""), printed


def test_the_operations_page(node_without_operator: Node, checkout: Path) -> None:
    page = images.ROOT / "docs" / "operations.md"
    printed = follow(node_without_operator, checkout, commands(page, "bash", "bash node"))
    assert "http://chat.team-a.svc:8000" in printed, printed
