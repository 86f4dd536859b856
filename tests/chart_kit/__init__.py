"""charts/flyball for tests: Helm, what the chart renders to, and the operator's rights as the chart grants them."""

from chart_kit.account import create_operator_account
from chart_kit.helm import CHART, Helm

__all__ = ["CHART", "Helm", "create_operator_account"]
