"""What the chart renders to for a few sets of values, kept under tests/chart/golden to be read and reviewed.

``make chart`` writes them anew, and the chart's copy of the CRD and its dashboard too.
"""

import shutil
from pathlib import Path

from chart_kit import dashboard
from chart_kit.helm import CHART, Helm

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "llmdeployments.yaml"
CRD_COPY = CHART / "files" / "llmdeployments.yaml"
DASHBOARD = CHART / "files" / "dashboard.json"
ALERTS = CHART / "files" / "alerts.yaml"
VALUES = sorted((ROOT / "tests" / "chart" / "values").glob("*.yaml"))
VALUES_OF = {path.stem: path for path in VALUES}


def golden_of(values: Path) -> Path:
    """Return the file of what ``values`` render to."""
    return ROOT / "tests" / "chart" / "golden" / values.name


def render(values: Path) -> str:
    """Render without the CRD, which is a file of its own."""
    return Helm().render(f"--values={values}", "--set=crds.install=false")


def main() -> None:
    shutil.copyfile(CRD, CRD_COPY)
    DASHBOARD.write_text(dashboard.as_json())
    for values in VALUES:
        golden_of(values).write_text(render(values))


if __name__ == "__main__":
    main()
