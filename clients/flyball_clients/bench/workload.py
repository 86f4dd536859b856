"""The requests of a run: their times, lengths and texts."""

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from flyball_clients.bench.prompts import Prompts, random_prompt, shared_prefix_prompt
from flyball_clients.bench.recorded import DatasetRow, TraceRequest, read_dataset, read_trace
from flyball_clients.bench.settings import DEFAULT_NUM_REQUESTS, BenchSettings, parse_lengths
from flyball_clients.errors import ConfigError

# One stream of random numbers for each purpose, so that a change of one does not change the others.
_LENGTHS, _ARRIVALS, _TEXT, _WARMUP_TEXT = range(4)


class RequestPlan(Struct, frozen=True, kw_only=True):
    """A request before its prompt is written.

    Attributes:
        offset_s: scheduled arrival, from the start; None in a closed loop.
        input_len: wanted prompt tokens; ``row`` overrules it.
        hash_ids: prefix blocks of a trace.
        warmup: sent before the measurement, with text of its own.
    """

    index: int
    input_len: int
    output_len: int
    offset_s: float | None = None
    hash_ids: tuple[int, ...] = ()
    row: DatasetRow | None = None
    warmup: bool = False


def plan_requests(settings: BenchSettings) -> list[RequestPlan]:
    """Return the measured requests; equal settings give equal requests. Raises ConfigError for a bad trace or dataset."""
    if settings.trace is not None:
        return _from_trace(settings, settings.trace)
    rows = _dataset_rows(settings)
    count = len(rows) or settings.num_requests or DEFAULT_NUM_REQUESTS
    rng = np.random.default_rng((settings.seed, _LENGTHS))
    input_lens = parse_lengths(settings.input_len)(rng, count)
    output_lens = parse_lengths(settings.output_len)(rng, count)
    offsets = _offsets(settings, count)
    return [
        RequestPlan(
            index=i,
            input_len=input_lens[i],
            output_len=(row and row.max_tokens) or output_lens[i],
            offset_s=offsets[i],
            row=row,
        )
        for i, row in enumerate(rows or [None] * count)
    ]


def plan_warmup(settings: BenchSettings, plans: list[RequestPlan]) -> list[RequestPlan]:
    """Return requests that are as long as the measured ones but have other texts, so that they do not fill a prefix cache."""
    return [
        msgspec.structs.replace(plans[i % len(plans)], index=i, offset_s=None, hash_ids=(), row=None, warmup=True)
        for i in range(settings.num_warmup)
    ]


def _offsets(settings: BenchSettings, count: int) -> list[float | None]:
    if settings.closed_loop:
        return [None] * count
    return list(arrival_offsets(settings, count, np.random.default_rng((settings.seed, _ARRIVALS))).tolist())


def _dataset_rows(settings: BenchSettings) -> list[DatasetRow | None]:
    if settings.dataset is None:
        return []
    rows = read_dataset(settings.dataset, settings.endpoint)
    wanted = settings.num_requests or len(rows)
    if wanted > len(rows):
        raise ConfigError(
            f"--num-requests is {wanted} and the dataset has {len(rows)} prompts; prompts sent twice would be answered from "
            f"the prefix cache. Give at most {len(rows)}."
        )
    return list(rows[:wanted])


def _from_trace(settings: BenchSettings, path: str) -> list[RequestPlan]:
    requests = _selected(settings, read_trace(path))
    times = np.array([request.time_s for request in requests])
    times = spread_equal_times(times, np.random.default_rng((settings.seed, _ARRIVALS)))
    offsets = ((times - times[0]) / settings.trace_speed).tolist()
    return [
        RequestPlan(
            index=i,
            input_len=request.input_len,
            output_len=request.output_len,
            offset_s=offsets[i],
            hash_ids=request.hash_ids,
        )
        for i, request in enumerate(requests)
    ]


def _selected(settings: BenchSettings, requests: list[TraceRequest]) -> list[TraceRequest]:
    most = settings.trace_max_tokens
    fitting = [request for request in requests if most is None or request.input_len + request.output_len <= most]
    if not fitting:
        raise ConfigError(f"no request of the trace has at most {most} tokens; raise --trace-max-tokens.")
    return fitting[: settings.trace_limit]


class RequestWriter:
    """Writes the JSON body of a request. Bodies are written one by one, because the prompts of a trace can have gigabytes."""

    def __init__(self, settings: BenchSettings, model: str, prompts: Prompts) -> None:
        self._settings = settings
        self._prompts = prompts
        self._common: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": settings.temperature,
            **({"ignore_eos": True} if settings.ignore_eos else {}),
            **settings.extra_body,
        }

    def body(self, plan: RequestPlan) -> bytes:
        return msgspec.json.encode({**self._common, "max_tokens": plan.output_len, **self._prompt_field(plan)})

    def _prompt_field(self, plan: RequestPlan) -> dict[str, Any]:
        if plan.row is not None and plan.row.messages is not None:
            return {"messages": plan.row.messages}
        prompt = self._prompt(plan)
        if self._settings.endpoint == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    def _prompt(self, plan: RequestPlan) -> str | list[int]:
        if plan.row is not None and plan.row.prompt is not None:
            return plan.row.prompt
        if plan.hash_ids:
            return shared_prefix_prompt(self._prompts, plan.hash_ids, self._settings.seed, plan.input_len)
        stream = _WARMUP_TEXT if plan.warmup else _TEXT
        rng = np.random.default_rng((self._settings.seed, stream, plan.index))
        return random_prompt(self._prompts, rng, plan.input_len)


def arrival_offsets(settings: BenchSettings, num_requests: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the arrival of each of ``num_requests``, in seconds. The first is 0, and gaps have mean ``1 / request_rate``.

    Gamma gaps have shape ``burstiness`` (below 1 is burstier than Poisson), as in BurstGPT (Wang et al. 2024).
    """
    if settings.request_rate is None:
        raise ConfigError("arrivals need a request rate; give --request-rate.")
    gaps = _gaps(settings, max(num_requests - 1, 0), rng) / settings.request_rate
    return np.concatenate(([0.0], np.cumsum(gaps)))[:num_requests]


def _gaps(settings: BenchSettings, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return gaps of mean 1."""
    if settings.arrival == "poisson":
        return rng.exponential(1.0, count)
    if settings.arrival == "gamma":
        return rng.gamma(settings.burstiness, 1.0 / settings.burstiness, count)
    return np.ones(count)


def spread_equal_times(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Spread requests with the same recorded time at random over the clock tick to which their times were rounded.

    The tick is the smallest gap between different times (3 s in Mooncake's traces). A trace without equal times comes
    back as it was; order is kept.

    Args:
        times: seconds, ascending.
    """
    distinct = np.unique(times)
    if len(distinct) == len(times) or len(distinct) < 2:
        return times
    tick = float(np.diff(distinct).min())
    return np.sort(times + rng.uniform(0.0, tick, len(times)))
