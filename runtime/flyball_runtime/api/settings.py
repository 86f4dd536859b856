"""Limits and timeouts of the HTTP face."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from flyball_runtime.api.http_protocol import BoundedH11Protocol
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.sampling import DEFAULT_SAMPLING, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """What one request may ask for, and how long a slow client may take.

    Attributes:
        served_model_names: names that ``model`` may have; the first is the one in answers and metrics.
        default_sampling: settings of a request that brings none of its own; each field of a request wins over it.
        max_body_bytes: longest request body, enforced while reading, chunked bodies too; beyond it 413.
        max_messages: most messages of one chat.
        max_prompts: most prompts of one completion request.
        max_choices: most choices of one HTTP request (prompts times ``n``); each is one engine request.
        max_header_bytes: longest request line plus headers (uvicorn's h11 limit; beyond it 400 and the connection ends).
        header_timeout_s: a connection is closed whose request line and headers are not complete by then.
        body_timeout_s: a body that is not complete by then ends in 408.
        write_timeout_s: a reader that takes nothing for so long is dropped and its requests are aborted.
        keep_alive_s: how long an idle connection stays open, a new one too; longer than the 60 s of common load
            balancers, so that they close first.
        max_heartbeat_age_s: /livez turns red when the engine has made no progress for longer.
        max_inline_chars: longer prompts are rendered and tokenized in a thread, so that they do not hold up the tokens
            of other requests.
    """

    served_model_names: tuple[str, ...]
    default_sampling: SamplingParams = DEFAULT_SAMPLING
    max_body_bytes: int = 4 * 1024 * 1024
    max_messages: int = 2048
    max_prompts: int = 256
    max_choices: int = 256
    max_header_bytes: int = 16 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: int = 75
    max_heartbeat_age_s: float = 30.0
    max_inline_chars: int = 4096

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(
                "served_model_names needs at least one name, and none may be empty (--served-model-name)."
            )
        for name, value in vars(self).items():
            if name not in ("served_model_names", "default_sampling") and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0.")

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]

    def uvicorn_options(self) -> dict[str, Any]:
        """Keyword arguments for ``uvicorn.Config`` that put these limits in force."""
        return {
            "http": partial(BoundedH11Protocol, header_timeout_s=self.header_timeout_s),
            "h11_max_incomplete_event_size": self.max_header_bytes,
            "timeout_keep_alive": self.keep_alive_s,
            "server_header": False,
            "access_log": False,
        }
