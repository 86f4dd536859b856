"""The chart's dashboard and alerts, as a cluster gets them."""

import json

import yaml

from chart_kit import dashboard, goldens
from chart_kit.helm import Manifest, objects


def of_kind(kind: str, values: str) -> list[Manifest]:
    rendered = goldens.render(goldens.VALUES_OF[values])
    return [one for one in objects(rendered) if one["kind"] == kind]


def test_the_dashboard_is_the_one_in_the_code() -> None:
    assert goldens.DASHBOARD.read_text() == dashboard.as_json(), "make chart writes it"


def test_the_dashboard_is_a_config_map_that_the_sidecar_finds() -> None:
    (found,) = of_kind("ConfigMap", "everything")
    assert json.loads(found["data"]["flyball.json"]) == dashboard.dashboard()
    assert found["metadata"]["namespace"] == "grafana"
    assert found["metadata"]["labels"].items() >= {"dashboards": "yes", "app.kubernetes.io/name": "flyball"}.items()
    assert found["metadata"]["annotations"] == {"grafana_folder": "Models"}


def test_the_default_label_is_the_one_that_the_sidecar_looks_for() -> None:
    values = yaml.safe_load((goldens.CHART / "values.yaml").read_text())
    assert values["dashboards"]["labels"] == {"grafana_dashboard": "1"}


def test_the_alerts_are_a_prometheus_rule() -> None:
    (found,) = of_kind("PrometheusRule", "everything")
    assert found["spec"] == yaml.safe_load(goldens.ALERTS.read_text())
    assert found["metadata"]["namespace"] == "monitoring"
    assert found["metadata"]["labels"]["release"] == "prometheus"


def test_neither_is_there_unless_it_is_asked_for() -> None:
    """Both need what not every cluster has."""
    assert of_kind("ConfigMap", "default") == of_kind("PrometheusRule", "default") == []


def test_no_panel_covers_another() -> None:
    cells = [cell for panel in dashboard.dashboard()["panels"] for cell in cells_of(panel["gridPos"])]
    assert len(cells) == len(set(cells)) and all(0 <= x < 24 for x, _ in cells)


def cells_of(place: dict[str, int]) -> list[tuple[int, int]]:
    columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in columns for y in lines]


def test_panels_and_queries_have_names_of_their_own() -> None:
    panels = dashboard.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        references = [target["refId"] for target in panel.get("targets", [])]
        assert len(references) == len(set(references))
        assert panel["type"] == "row" or panel["description"]
