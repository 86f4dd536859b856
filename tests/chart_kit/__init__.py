"""charts/flyball for tests: Helm, and what the chart renders to."""

from chart_kit.helm import CHART, Helm

__all__ = ["CHART", "Helm"]
