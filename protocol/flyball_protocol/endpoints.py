"""Ports, paths and environment names that both sides must spell alike."""

API_PORT = 8000
"""Default port of every address that serves the API: a replica's, a Service's, the balanced one of local mode."""
ADMIN_PORT = 8001
DEFAULT_BASE_URL = f"http://127.0.0.1:{API_PORT}"
"""Where clients look for a server."""

LIVEZ_PATH = "/livez"
READYZ_PATH = "/readyz"
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"

ADMIN_LIMITS_PATH = "/admin/limits"
ADMIN_EVIDENCE_PATH = "/admin/evidence"
ADMIN_DRAIN_PATH = "/admin/drain"

ADMIN_TOKEN_ENV = "FLYBALL_ADMIN_TOKEN"
"""The admin port's token. An environment variable (from a Secret), because arguments are visible to every process."""

LISTENER_ENV = "FLYBALL_LISTENER"
"""Path of the Unix socket at which ``flyball listener`` gives out the API port; without it ``flyball serve`` opens the port."""

TEMPLATE_ENV = "FLYBALL_TEMPLATE"
"""Name of the pod template that a replica was started from; its evidence says it again."""

EXIT_OK = 0
"""Stopped by request; every accepted request was finished."""
EXIT_CONFIG_ERROR = 2
"""A setting, the model or the machine made start-up impossible; the last line of stderr says which."""
EXIT_ENGINE_DIED = 3
"""The engine process ended while serving; pending requests were failed."""
EXIT_DRAIN_TIMEOUT = 4
"""The drain deadline passed with requests still running; they were failed."""
