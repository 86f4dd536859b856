"""What a batch does, and within which bounds."""

import math
from pathlib import Path

from msgspec import Struct

from flyball_clients.errors import ConfigError
from flyball_protocol import endpoints

SERVER_CONCURRENCY = 256
ENGINE_CONCURRENCY = 1024
"""More than with a server: the scheduling policy can put only those requests in a good order that it knows."""


class BatchSettings(Struct, frozen=True, kw_only=True):
    """Settings of one batch.

    Attributes:
        source, target: the input file and the output file.
        base_url: address of the server.
        api_key_env: environment variable that holds the server's key.
        model: checkpoint of an engine of its own; None asks the server.
        engine_flags: further flags of that engine, as ``flyball serve`` has them.
        concurrency: requests in flight; None is a default for a server or for an engine.
        timeout_s: how long one request may take.
        max_retries: how often a request whose connection broke is sent again.
        give_up_after_s: the batch ends when every request has been refused for so long.
        max_body_bytes: longest line of the input.
    """

    source: Path
    target: Path
    base_url: str = endpoints.DEFAULT_BASE_URL
    api_key_env: str | None = None
    model: str | None = None
    engine_flags: tuple[str, ...] = ()
    concurrency: int | None = None
    timeout_s: float = 3600.0
    max_retries: int = 5
    give_up_after_s: float = 600.0
    max_body_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.model is not None and (self.base_url != endpoints.DEFAULT_BASE_URL or self.api_key_env):
            raise ConfigError(
                "--model starts an engine here, --base-url and --api-key-env name a server; give one kind."
            )
        if self.model is None and self.engine_flags:
            raise ConfigError(f"unknown flag {self.engine_flags[0]}; flags of an engine need --model CHECKPOINT.")
        _check_range("--concurrency", self.in_flight, 1, 65536)
        _check_range("--max-retries", self.max_retries, 0, 1000)
        _check_range("--max-body-bytes", self.max_body_bytes, 1, 2**30)
        for flag, value in (("--timeout", self.timeout_s), ("--give-up-after", self.give_up_after_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{flag} is {value:g}; it must be a finite number of seconds above 0.")

    @property
    def in_flight(self) -> int:
        default = SERVER_CONCURRENCY if self.model is None else ENGINE_CONCURRENCY
        return default if self.concurrency is None else self.concurrency


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{flag} is {value}; it must be from {low} to {high}.")
