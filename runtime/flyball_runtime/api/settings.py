"""Limits and timeouts of the HTTP face."""

import ipaddress
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flyball_protocol.quoting import quoted
from flyball_runtime.api.cors import NO_CORS, Cors
from flyball_runtime.api.http_protocol import BoundedH11Protocol
from flyball_runtime.core.config import LOOPBACK_PROXIES
from flyball_runtime.core.embedder import Embedder
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.sampling_params import DEFAULT_SAMPLING, SamplingParams
from flyball_runtime.text.parsing.message import AUTO, CALL_PARSERS, NONE, REASONING_PARSERS


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """What requests may ask for and take up, and how long a slow client may take.

    Attributes:
        served_model_names: names that ``model`` may have; the first is the one in answers and metrics.
        default_sampling: settings of a request that brings none of its own; each field of a request wins over it.
        embedder: how embeddings are made.
        lora_dir: folder of the adapters that clients may load; None lets them load and unload none.
        max_body_bytes: longest request body, enforced while reading, chunked bodies too; beyond it 413.
        max_total_body_bytes: most bytes of all bodies that are being received. Beyond it the body that has been arriving for
            longest gets 503. Those that wait in a lane to be tokenized may have as many again.
        max_messages: most messages of one chat.
        max_prompts: most prompts of one completion request.
        max_choices: most outputs of one HTTP request: prompts times ``n``, ``best_of`` or the width of a beam search.
        max_header_bytes: longest request line plus headers (uvicorn's h11 limit; beyond it 400 and the connection ends).
        header_timeout_s: a connection is closed whose request line and headers are not complete by then.
        body_timeout_s: a body that is not complete by then ends in 408.
        write_timeout_s: a client that takes nothing of its answer for so long is dropped and its requests are aborted.
        keep_alive_s: how long an idle connection stays open, a new one too; longer than the 60 s of common load
            balancers, so that they close first.
        max_heartbeat_age_s: /livez turns red when the engine has made no progress for longer, unless the largest step
            may pause for longer (see ``pause_limit``).
        structured_outputs_timeout_s: a schema, regex or grammar that takes more CPU time to compile gets 400.
        forwarded_allow_ips: addresses and networks, comma-separated, whose X-Forwarded-For is believed; ``*`` for all.
        disable_docs: leave out /docs and /openapi.json.
        cors: which web pages of other origins may read answers.
        tool_call_parser, reasoning_parser: how the model writes tool calls and reasoning; see ``MessageFormats``.
        enable_auto_tool_choice: whether the model may call tools when the client leaves that to it.
        stream_interval: tokens of a stream from one event to the next; the first is sent at once.
        max_inline_bytes: longer bodies are decoded, rendered and tokenized in a thread, so that they do not hold up the
            tokens of other requests.
    """

    served_model_names: tuple[str, ...]
    default_sampling: SamplingParams = DEFAULT_SAMPLING
    embedder: Embedder = Embedder()  # noqa: RUF009  frozen
    max_body_bytes: int = 4 * 1024 * 1024
    max_total_body_bytes: int = 64 * 1024 * 1024
    max_messages: int = 2048
    max_prompts: int = 256
    max_choices: int = 256
    max_header_bytes: int = 16 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: int = 75
    max_heartbeat_age_s: float = 30.0
    stream_interval: int = 1
    max_inline_bytes: int = 4096
    structured_outputs_timeout_s: float = 5.0
    forwarded_allow_ips: str = LOOPBACK_PROXIES
    disable_docs: bool = False
    cors: Cors = NO_CORS
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    enable_auto_tool_choice: bool = True
    lora_dir: Path | None = None

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(
                "served_model_names needs at least one name, and none may be empty (--served-model-name)."
            )
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                flag = "--" + name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"{name} is {quoted(value)}; it must be a finite number above 0 ({flag}).")
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-total-body-bytes is {self.max_total_body_bytes}, below --max-body-bytes {self.max_body_bytes}: the "
                "longest body would never fit. Raise the first or lower the second."
            )
        _check_networks(self.forwarded_allow_ips)
        _check_parser("--tool-call-parser", self.tool_call_parser, CALL_PARSERS)
        _check_parser("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]

    def uvicorn_options(self) -> dict[str, Any]:
        """Keyword arguments for ``uvicorn.Config`` that put these limits in force."""
        return {
            "http": partial(
                BoundedH11Protocol, header_timeout_s=self.header_timeout_s, write_timeout_s=self.write_timeout_s
            ),
            "h11_max_incomplete_event_size": self.max_header_bytes,
            "timeout_keep_alive": self.keep_alive_s,
            "server_header": False,
            "access_log": False,
            "forwarded_allow_ips": self.forwarded_allow_ips,
        }


def _check_networks(listed: str) -> None:
    """uvicorn takes what is no address for the name of a host, which no connection has. Raises ConfigError instead."""
    for one in [] if listed == "*" else listed.split(","):
        try:
            ipaddress.ip_network(one.strip())
        except ValueError:
            raise ConfigError(
                f"--forwarded-allow-ips has {quoted(one.strip())}; each must be an address or a network such as 10.0.0.0/8, "
                "separated by commas, or the whole value must be *."
            ) from None


def _check_parser(flag: str, name: str, parsers: Collection[str]) -> None:
    names = [AUTO, NONE, *parsers]
    if name not in names:
        raise ConfigError(f"{flag} is {quoted(name)}; it must be one of {', '.join(names)}.")
