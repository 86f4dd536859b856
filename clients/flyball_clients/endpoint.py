"""Where a server is and how to call it."""

import os
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from flyball_clients.errors import ConfigError

Api = Literal["completions", "chat"]

_PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Endpoint(Struct, frozen=True):
    """A server's address without ``/v1``, and the key to it.

    The key stays out of ``repr`` and of settings files: callers pass around the name of its environment variable.
    """

    base_url: str
    api_key: str | None = None

    @classmethod
    def resolve(cls, base_url: str, api_key_env: str | None = None) -> "Endpoint":
        """Return the endpoint. Raises ConfigError for an invalid address or an environment variable that is not set."""
        return cls(normalise_base_url(base_url), None if api_key_env is None else _api_key(api_key_env))

    def __repr__(self) -> str:
        return f"Endpoint({self.base_url})"

    @property
    def headers(self) -> dict[str, str]:
        auth = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **auth}

    @property
    def models_url(self) -> str:
        return f"{self.base_url}/v1/models"

    def url(self, api: Api) -> str:
        return self.base_url + _PATHS[api]


def normalise_base_url(base_url: str) -> str:
    """Return the address without ``/v1``: ``http://host:8000/v1/`` and ``http://host:8000`` are the same server."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_good_port(parts):
        raise ConfigError(f"--base-url is {base_url!r}; it must look like http://127.0.0.1:8000.")
    if parts.username or parts.password:
        raise ConfigError("--base-url contains a user name or password; give the key with --api-key-env NAME instead.")
    if parts.query or parts.fragment:
        raise ConfigError(f"--base-url is {base_url!r}; it must have no query and no fragment.")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # not a number up to 65535
        return False


def _api_key(env_name: str) -> str:
    key = os.environ.get(env_name)
    if not key:
        raise ConfigError(
            f"--api-key-env names the variable {env_name}, which is not set. Export it, or leave the flag out."
        )
    return key
