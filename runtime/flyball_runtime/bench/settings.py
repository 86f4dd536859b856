"""What to measure, and how."""

import math
from typing import Any, Literal

import msgspec
from msgspec import Struct

from flyball_protocol import endpoints
from flyball_runtime.bench.lengths import parse_lengths
from flyball_runtime.bench.slo import Slo
from flyball_runtime.client.endpoint import Api, normalise_base_url
from flyball_runtime.core.errors import ConfigError

Arrival = Literal["poisson", "gamma", "constant"]

OWN_BODY_FIELDS = frozenset({"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "n"})
DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 100


class BenchSettings(Struct, frozen=True, kw_only=True):
    """One benchmark run. At most one of ``concurrency``, ``request_rate`` and ``trace`` says how the load arrives.

    Attributes:
        base_url: the server, with or without ``/v1``.
        model: name to ask for; None takes the first that the server lists.
        endpoint: which API: completions or chat.
        api_key_env: environment variable that holds the key; the key itself is in no setting and no result.
        num_requests: how many to measure; None means 100, or all of a trace or dataset.
        concurrency: closed loop: this many requests are kept in flight. 8 when nothing else is chosen.
        request_rate: open loop: mean arrivals a second; infinity sends all at once.
        arrival: gaps between arrivals: exponential (poisson), gamma, or constant.
        burstiness: shape of the gamma gaps; their coefficient of variation is 1/sqrt(burstiness). 1 is poisson.
        trace: open loop from a file of recorded arrivals and lengths.
        trace_speed: 2 replays a trace in half its time.
        trace_limit: only the first so many requests of the trace.
        trace_max_tokens: leave out what has more input and output tokens together.
        dataset: JSONL of prompts, in place of random ones.
        input_len, output_len: tokens; ``128``, ``uniform:64:256``, ``lognormal:128:0.8``, ``zipf:1.2:16:2048``.
        tokenizer: a tokenizer.json or its folder: prompts are then random token ids of exact length.
        ignore_eos: ask the server to go on after end-of-sequence; sent only when true, since some servers refuse it.
        extra_body: further fields of every request.
        num_warmup: requests sent before, and not counted.
        slo: bounds that a request must meet to count as good.
        timeout_s: of one request, from connecting to its last byte.
        max_duration_s: start no request after this time; those in flight finish.
    """

    base_url: str = endpoints.DEFAULT_BASE_URL
    model: str | None = None
    endpoint: Api = "completions"
    api_key_env: str | None = None
    num_requests: int | None = None
    concurrency: int | None = None
    request_rate: float | None = None
    arrival: Arrival = "poisson"
    burstiness: float = 1.0
    trace: str | None = None
    trace_speed: float = 1.0
    trace_limit: int | None = None
    trace_max_tokens: int | None = None
    dataset: str | None = None
    input_len: str = "128"
    output_len: str = "128"
    tokenizer: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = msgspec.field(default_factory=dict)
    seed: int = 0
    num_warmup: int = 0
    slo: Slo | None = None
    timeout_s: float = 600.0
    max_duration_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first setting that is wrong."""
        normalise_base_url(self.base_url)
        self._check_numbers()
        self._check_combinations()
        parse_lengths(self.input_len)
        parse_lengths(self.output_len)

    @property
    def closed_loop(self) -> bool:
        return self.request_rate is None and self.trace is None

    @property
    def max_in_flight(self) -> int:
        """Closed loop's concurrency; also how many warm-up requests go at a time."""
        return self.concurrency or DEFAULT_CONCURRENCY

    def _check_numbers(self) -> None:
        for name in ("num_requests", "concurrency", "trace_limit", "trace_max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} is {value}; it must be at least 1.")
        for name in ("seed", "num_warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}; it must be at least 0.")
        for name in ("burstiness", "trace_speed", "timeout_s", "max_duration_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{_flag(name)} is {value}; it must be a number above 0.")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"--request-rate is {self.request_rate}; it must be above 0 requests a second, or inf.")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"--temperature is {self.temperature}; it must be from 0 to 2.")

    def _check_combinations(self) -> None:
        loads = [name for name in ("concurrency", "request_rate", "trace") if getattr(self, name) is not None]
        if len(loads) > 1:
            raise ConfigError(f"{' and '.join(map(_flag, loads))} are different kinds of load; give one of them.")
        for name in ("trace_limit", "trace_max_tokens"):
            if self.trace is None and getattr(self, name) is not None:
                raise ConfigError(f"{_flag(name)} is for a trace; add --trace FILE.")
        if self.trace is not None and (self.dataset is not None or self.num_requests is not None):
            raise ConfigError("--trace brings its own requests; drop --dataset, and use --trace-limit to shorten it.")
        if self.burstiness != 1.0 and (self.request_rate is None or self.arrival != "gamma"):
            raise ConfigError(f"--burstiness {self.burstiness:g} needs --request-rate and --arrival gamma.")
        if taken := sorted(OWN_BODY_FIELDS & self.extra_body.keys()):
            raise ConfigError(f"--extra-body has {', '.join(taken)}, which flyball bench sets itself; leave it out.")
        if self.tokenizer is not None and (self.endpoint == "chat" or self.dataset is not None):
            raise ConfigError(
                "--tokenizer makes random token-id prompts, which only the completions API takes and a dataset "
                "replaces; drop it or use --endpoint completions without --dataset."
            )


def _flag(field_name: str) -> str:
    return "--" + field_name.removesuffix("_s").replace("_", "-")
