"""What to measure, and how: settings, latency objective, distributions of lengths."""

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from flyball_clients.endpoint import Api, normalise_base_url
from flyball_clients.errors import ConfigError
from flyball_protocol import endpoints

if TYPE_CHECKING:  # numpy is slow to import, and help and completion do not need it
    import numpy as np

Arrival = Literal["poisson", "gamma", "constant"]

OWN_BODY_FIELDS = frozenset({"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "n"})
DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 100

_BOUND = re.compile(r"(?P<name>\w+)\s*=\s*(?P<value>[0-9.eE+-]+)\s*(?P<unit>ms|s)")
_NAMES = ("ttft", "tpot", "itl", "e2e")

Lengths = Callable[["np.random.Generator", int], list[int]]
"""Draws ``n`` token counts, each at least 1."""

MAX_LENGTH = 10_000_000

_FORMS = "128, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, lognormal:MEDIAN:SIGMA:MAX or zipf:ALPHA:LOW:HIGH"


class Slo(Struct, frozen=True, kw_only=True):
    """Bounds in seconds; None is no bound. Goodput counts requests that meet all of them, as DistServe
    (Zhong et al., OSDI 2024) does with TTFT and TPOT.

    Attributes:
        ttft_s: time from the scheduled arrival to the first token.
        tpot_s: mean time per output token after the first.
        itl_s: 99th percentile of the request's own gaps between tokens, stricter than the mean.
        e2e_s: time from the scheduled arrival to the last token.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        """Bounds that are set, by name, in seconds."""
        pairs = ((name, getattr(self, f"{name}_s")) for name in _NAMES)
        return {name: value for name, value in pairs if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {_seconds(value)}" for name, value in self.bounds.items())


def parse_slo(text: str) -> Slo:
    """Return text like ``ttft=500ms,tpot=50ms,e2e=10s`` as an Slo. Raises ConfigError for anything else."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        match = _BOUND.fullmatch(part.strip())
        if match is None or match["name"] not in _NAMES:
            raise ConfigError(f"--slo has {part!r}; write bounds on {', '.join(_NAMES)} like ttft=500ms,tpot=50ms.")
        name = match["name"] + "_s"
        if name in bounds:
            raise ConfigError(f"--slo bounds {match['name']} twice; give one value.")
        bounds[name] = _parse_seconds(part, match["value"], match["unit"])
    return Slo(**bounds)


def _parse_seconds(part: str, value: str, unit: str) -> float:
    try:
        seconds = float(value) / (1000 if unit == "ms" else 1)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"--slo has {part!r}; the time must be a number above 0 with ms or s.")
    return seconds


def _seconds(value: float) -> str:
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


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
        keep_alive: send requests on connections of earlier ones. Some servers close theirs without saying so.
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
    keep_alive: bool = True
    seed: int = 0
    num_warmup: int = 0
    slo: Slo | None = None
    timeout_s: float = 600.0
    max_duration_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError, which names the first wrong setting."""
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
        """Concurrency of a closed loop, and of the warm-up."""
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
            raise ConfigError(f"{' and '.join(map(_flag, loads))} are different kinds of load; give only one of them.")
        for name in ("trace_limit", "trace_max_tokens"):
            if self.trace is None and getattr(self, name) is not None:
                raise ConfigError(f"{_flag(name)} has no meaning without a trace; add --trace FILE.")
        if self.trace is not None and (self.dataset is not None or self.num_requests is not None):
            raise ConfigError(
                "--trace defines the requests itself; leave out --dataset and --num-requests. To shorten it, "
                "use --trace-limit."
            )
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


def parse_lengths(text: str) -> Lengths:
    """Return a distribution by its name.

    ``128`` or ``fixed:128``; ``uniform:LOW:HIGH``, both ends included; ``lognormal:MEDIAN:SIGMA[:MAX]``, where SIGMA is the
    standard deviation of the logarithm; ``zipf:ALPHA:LOW:HIGH``, where k is drawn with probability proportional to k^-ALPHA.

    Raises:
        ConfigError: no such form, or numbers out of range.
    """
    name, *rest = text.split(":") if ":" in text else ("fixed", text)
    try:
        return _BUILDERS[name](*map(float, rest))
    except (KeyError, TypeError, ValueError) as exc:
        reason = f" ({exc})" if isinstance(exc, ValueError) else ""
        raise ConfigError(f"{text!r} is not a distribution of lengths{reason}; write {_FORMS}.") from exc


def _fixed(length: float) -> Lengths:
    value = _count(length)
    return lambda rng, n: [value] * n


def _uniform(low: float, high: float) -> Lengths:
    first, last = _range(low, high)
    return lambda rng, n: rng.integers(first, last, n, endpoint=True).tolist()


def _lognormal(median: float, sigma: float, largest: float = MAX_LENGTH) -> Lengths:
    first, last = _range(median, largest)
    if not 0 <= sigma <= 10:
        raise ValueError(f"sigma {sigma:g} is not from 0 to 10")
    return lambda rng, n: rng.lognormal(math.log(first), sigma, n).clip(1, last).round().astype(int).tolist()


def _zipf(alpha: float, low: float, high: float) -> Lengths:
    first, last = _range(low, high)
    if not 0 <= alpha <= 20:
        raise ValueError(f"alpha {alpha:g} is not from 0 to 20")

    def draw(rng: "np.random.Generator", n: int) -> list[int]:
        weights = [(value / first) ** -alpha for value in range(first, last + 1)]
        total = math.fsum(weights)
        steps = rng.choice(len(weights), n, p=[weight / total for weight in weights])
        return [first + int(step) for step in steps]

    return draw


def _range(low: float, high: float) -> tuple[int, int]:
    first, last = _count(low), _count(high)
    if first > last:
        raise ValueError(f"{first} is above {last}")
    return first, last


def _count(value: float) -> int:
    if not (1 <= value <= MAX_LENGTH and value == int(value)):
        raise ValueError(f"{value:g} is not a whole number from 1 to {MAX_LENGTH}")
    return int(value)


_BUILDERS: dict[str, Callable[..., Lengths]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "zipf": _zipf,
}
