"""The latency objective that makes a request good."""

import math
import re

from msgspec import Struct

from flyball_runtime.core.errors import ConfigError

_BOUND = re.compile(r"(?P<name>\w+)\s*=\s*(?P<value>[0-9.eE+-]+)\s*(?P<unit>ms|s)")
_NAMES = ("ttft", "tpot", "itl", "e2e")


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
        """Name to seconds, for those that are set."""
        pairs = ((name, getattr(self, f"{name}_s")) for name in _NAMES)
        return {name: value for name, value in pairs if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {_seconds(value)}" for name, value in self.bounds.items())


def parse_slo(text: str) -> Slo:
    """``ttft=500ms,tpot=50ms,e2e=10s`` as an Slo. Raises ConfigError for anything else."""
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
