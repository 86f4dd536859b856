"""The HTTP face: OpenAI-compatible API, admin port, health and metrics."""

from flyball_runtime.api.admin import create_admin_app
from flyball_runtime.api.app import create_app
from flyball_runtime.api.metrics import MetricsCollector
from flyball_runtime.api.settings import ApiSettings

__all__ = ["ApiSettings", "MetricsCollector", "create_admin_app", "create_app"]
