"""docs/operations.md: its commands do what the page says, in its order. Those that need a node are for tests/e2e."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from chart_kit import CHART
from chart_kit.pages import commands
from cluster_kit import ControlPlane, find_assets
from e2e_kit.programs import HELM

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = CHART.parents[1]
PAGE = ROOT / "docs" / "operations.md"


@pytest.fixture(scope="module")
def bare() -> Iterator[ControlPlane]:
    """A control plane on which nobody has installed anything."""
    with ControlPlane(find_assets()) as ours:
        yield ours


def test_every_command_works(bare: ControlPlane) -> None:
    path = os.pathsep.join((str(find_assets()), str(HELM.build()), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(bare.kubeconfig)}
    lines = commands(PAGE, "bash")
    assert len(lines) > 15
    for line in lines:
        done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
