"""API keys: which ones are valid, and the check that every request passes."""

import hashlib
import hmac
import logging
import os
import re
import stat
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flyball_protocol import endpoints
from flyball_runtime.api.errors import InvalidApiKey
from flyball_runtime.api.identity import sent_key
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.errors import ConfigError

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {
        endpoints.LIVEZ_PATH,
        endpoints.READYZ_PATH,
        endpoints.HEALTH_PATH,
        endpoints.METRICS_PATH,
        endpoints.OPENAPI_PATH,
        endpoints.DOCS_PATH,
    },
)
"""Need no key: probes, Prometheus and browsers have none."""

MAX_FILE_BYTES = 64 * 1024
REREAD_AFTER_S = 1.0

_KEY = re.compile(rb"[!-~]{8,512}")
_ALLOWED = "8 to 512 characters of printable ASCII, without spaces"


class ApiKeys:
    """The valid keys, as SHA-256 hashes: those of a file, and one of the environment.

    The file is read again by a request that comes REREAD_AFTER_S or more after the last reading. It is read whole, so neither
    a coarse modification time nor the link of a Secret volume can hide a change. If it cannot be used then, the keys that were
    read before stay valid, and the log has one warning.

    Raises:
        ConfigError: the file cannot be read or has no keys, or a key is malformed. The message has no key in it.
    """

    def __init__(self, file: Path | None, variable: str | None, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._fixed = () if variable is None else (_hash(_checked(variable.encode(), endpoints.API_KEY_ENV)),)
        self._of_file = () if file is None else _read(file)
        self._read_s = clock.now()
        self._trouble: str | None = None

    def __len__(self) -> int:
        return len(self._fixed) + len(self._of_file)

    def find(self, key: str) -> bytes | None:
        """Return the hash of ``key`` if it is valid, else None. The time does not depend on which key it is."""
        if self._file is not None and self._clock.now() - self._read_s >= REREAD_AFTER_S:
            self._read_again(self._file)
        given = _hash(key.encode())
        matches = [hmac.compare_digest(given, known) for known in (*self._fixed, *self._of_file)]
        return given if any(matches) else None

    def _read_again(self, file: Path) -> None:
        self._read_s = self._clock.now()
        try:
            found = _read(file)
        except ConfigError as error:
            if str(error) != self._trouble:
                logger.warning("%s The keys that were read before stay valid.", error)
            self._trouble = str(error)
            return
        if found != self._of_file or self._trouble is not None:
            logger.info("API keys read again: --api-key-file has %d", len(found))
        self._of_file, self._trouble = found, None


def _read(file: Path) -> tuple[bytes, ...]:
    """Return the hashes of the keys in a file: one key per line; lines that are empty or begin with # do not count."""
    where = f"--api-key-file {file}"
    lines = enumerate(_content(file).splitlines(), start=1)
    keys = [
        _checked(key, f"line {number} of {where}")
        for number, line in lines
        if (key := line.strip()) and key[:1] != b"#"
    ]
    if not keys:
        raise ConfigError(f"{where} has no keys. Write one key per line, or leave the flag out to serve without keys.")
    return tuple(map(_hash, keys))


def _content(file: Path) -> bytes:
    try:
        # A FIFO could be read once only, and would block.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(
                    f"--api-key-file {file} is not a regular file, so it cannot be read again. Name a file."
                )
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read --api-key-file {file}: {error.strerror}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {file} has more than {MAX_FILE_BYTES} bytes, the limit. Use fewer keys.")
    return content


def _checked(key: bytes, where: str) -> bytes:
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"{where} is not an API key; a key has {_ALLOWED}.")
    return key


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeyAuth:
    """Lets requests through that have a valid key, and those that need none: OPEN_PATHS, and OPTIONS, which browsers send
    without headers of their own.

    The hash of the key is put into ``scope["state"]["api_key"]``, so that one key is one client however the header spells it.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"] not in OPEN_PATHS:
            scope.setdefault("state", {})["api_key"] = self._check(sent_key(Headers(scope=scope)))
        await self._app(scope, receive, send)

    def _check(self, header: str) -> bytes:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("none")
        found = self._keys.find(key.strip())
        if found is None:
            raise InvalidApiKey("this server does not have it")
        return found
