"""Ports, paths, environment names, exit codes, metric names and the version: what all packages must spell alike."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, version
from typing import Any

API_PORT = 8000
"""Default port of every address that serves the API: a replica's, a Service's, the balanced one of local mode."""
ADMIN_PORT = 8001
DEFAULT_BASE_URL = f"http://127.0.0.1:{API_PORT}"
"""Where clients look for a server."""

LIVEZ_PATH = "/livez"
READYZ_PATH = "/readyz"
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
OPENAPI_PATH = "/openapi.json"
DOCS_PATH = "/docs"

ADMIN_LIMITS_PATH = "/admin/limits"
ADMIN_EVIDENCE_PATH = "/admin/evidence"
ADMIN_DRAIN_PATH = "/admin/drain"

ADMIN_TOKEN_ENV = "FLYBALL_ADMIN_TOKEN"
"""The admin port's token. An environment variable (from a Secret), because arguments are visible to every process."""

API_KEY_ENV = "FLYBALL_API_KEY"
"""A key that requests to the API need; for the same reason no argument."""

LISTENER_ENV = "FLYBALL_LISTENER"
"""Path of the Unix socket at which ``flyball listener`` gives out the API port; without it ``flyball serve`` opens the port."""

TEMPLATE_ENV = "FLYBALL_TEMPLATE"
"""Name of the pod template that a replica was started from; its evidence contains it."""

EXIT_OK = 0
"""Stopped by request; every accepted request was finished."""
EXIT_CONFIG_ERROR = 2
"""A setting, the model or the machine made start-up impossible; the last line of stderr gives the reason."""
EXIT_ENGINE_DIED = 3
"""The engine process ended while serving; pending requests got an error."""
EXIT_DRAIN_TIMEOUT = 4
"""The drain deadline passed while requests were running; they got an error."""

REQUESTS_WAITING = "flyball_requests_waiting"
"""Requests in a replica's queue."""
REQUESTS_RUNNING_RATIO = "flyball_requests_running_ratio"
"""Running requests of a replica divided by the most that its start-up flags allow, 0 to 1."""

EXAMPLE_QUESTION = "Say hello."
EXAMPLE_MAX_TOKENS = 32
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def installed_version(otherwise: str = "0+unknown") -> str:
    """Return the installed version; ``otherwise`` in a source tree that was never installed."""
    try:
        return version("flyball")
    except PackageNotFoundError:
        return otherwise


def base_url(host: str, port: int) -> str:
    """Return a URL that reaches a server on this machine that listens on ``host``, which may mean every address."""
    reachable = _HERE.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def curl_line(url: str, model: str, *, chat: bool, needs_key: bool = False) -> str:
    """Return a ``curl`` command that asks for an answer of a few tokens.

    Args:
        chat: whether the model has a chat template; without one, the completions API is asked.
        needs_key: send the API key of the environment variable.
    """
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": EXAMPLE_QUESTION}]} if chat else {"prompt": EXAMPLE_QUESTION}
    body: dict[str, Any] = {"model": model, **asked, "max_tokens": EXAMPLE_MAX_TOKENS}
    key = f' -H "Authorization: Bearer ${API_KEY_ENV}"' if needs_key else ""
    return f"curl {url}{path}{key} -d {shlex.quote(json.dumps(body))}"
