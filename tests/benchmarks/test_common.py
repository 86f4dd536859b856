"""Where results go."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("machine", "name"), [(None, "figures.json"), ("", "figures.json"), ("zen4", "figures_zen4.json")]
)
def test_a_machine_has_results_of_its_own(
    machine: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "benchmarks/results")
    monkeypatch.delenv(common.MACHINE_VARIABLE, raising=False)
    if machine is not None:
        monkeypatch.setenv(common.MACHINE_VARIABLE, machine)
    path = common.save("figures", {"answer": 42})
    assert path == common.RESULTS / name
    assert json.loads(path.read_text())["answer"] == 42
