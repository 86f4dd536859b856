"""docs/performance.md has the figures of benchmarks/results/, and its charts can be drawn from them."""

import importlib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def performance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("performance")


def test_the_page_has_the_tables_of_the_results(performance: ModuleType) -> None:
    page = performance.PAGE.read_text()
    assert performance.with_tables(page) == page, "run python benchmarks/performance.py"
    assert {block[2] for block in performance.BLOCK.finditer(page)} == performance.TABLES.keys()


def test_every_chart_is_on_the_page(performance: ModuleType, tmp_path: Path) -> None:
    written = {path.name: ElementTree.parse(path).getroot() for path in performance.write_charts(tmp_path)}
    assert written.keys() == {path.name for path in performance.DOCS.glob("performance-*.svg")}
    page = performance.PAGE.read_text()
    assert all(f"]({name})" in page and root.tag.endswith("svg") for name, root in written.items())


def test_what_has_not_been_measured_is_said_to_be_so(
    performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert {make() for make in performance.TABLES.values()} == {performance.NOT_MEASURED}
    assert performance.write_charts(tmp_path) == []
