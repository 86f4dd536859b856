"""Which web pages of other origins a browser lets read the answers (CORS)."""

import re
from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from flyball_protocol.quoting import quoted
from flyball_runtime.api.identity import REQUEST_ID_HEADER
from flyball_runtime.core.errors import ConfigError

ANY = ("*",)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, kw_only=True)
class Cors:
    """What browsers are told, as vLLM's flags of the same names say it.

    Attributes:
        allowed_origins: like ``https://app.example``; ``*`` allows all. None: no page may read answers.
        allowed_methods, allowed_headers: what such a page may send; ``*`` allows all.
        allow_credentials: whether a page may have cookies sent along.

    Raises:
        ConfigError: a value that no browser could match, or one that has no effect without ``allowed_origins``.
    """

    allowed_origins: tuple[str, ...] | None = None
    allowed_methods: tuple[str, ...] = ANY
    allowed_headers: tuple[str, ...] = ANY
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        if self.allowed_origins is None:
            if self.allow_credentials or (self.allowed_methods, self.allowed_headers) != (ANY, ANY):
                raise ConfigError(
                    "--allowed-methods, --allowed-headers and --allow-credentials have no effect without --allowed-origins. "
                    "Name the origins, or leave them out."
                )
            return
        _check("--allowed-origins", self.allowed_origins, _ORIGIN, "https://app.example, without a path")
        _check("--allowed-methods", self.allowed_methods, _TOKEN, "POST")
        _check("--allowed-headers", self.allowed_headers, _TOKEN, "Authorization")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                '--allow-credentials with the origin "*" would let every web page act for its visitor. Name the origins.'
            )

    def middleware(self) -> list[Middleware]:
        """Return what answers preflights and marks answers; nothing without origins."""
        if self.allowed_origins is None:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=self.allowed_origins,
                allow_methods=self.allowed_methods,
                allow_headers=self.allowed_headers,
                allow_credentials=self.allow_credentials,
                expose_headers=(REQUEST_ID_HEADER, "Retry-After"),
            )
        ]


def _check(flag: str, values: tuple[str, ...], pattern: re.Pattern[str], like: str) -> None:
    wrong = next((one for one in values if one != "*" and not pattern.fullmatch(one)), None)
    if wrong is not None:
        raise ConfigError(f'{flag} has {quoted(wrong)}; each entry must be "*" or like {like}.')
    if not values:
        raise ConfigError(f"{flag} is an empty list. Name at least one entry, or leave the flag out.")


NO_CORS = Cors()
