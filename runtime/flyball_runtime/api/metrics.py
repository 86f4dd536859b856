"""Every metric of the API process: how it is counted, its name and its help text.

State is plain numbers, changed on the event loop only, so an update costs about a microsecond and takes no lock; families
are built when /metrics is scraped. Latencies are measured here, where a client would see them: from a request's complete
body to the event that carries a token.

A "request" is one engine request: one choice of one prompt. Values over the window are absent, not 0 or NaN, while the
window holds no sample; a gauge about the engine is absent until the engine has reported.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flyball_protocol import KVBlocks, LatencyWindow, Limits
from flyball_protocol.metrics import REQUESTS_RUNNING_RATIO, REQUESTS_WAITING
from flyball_runtime import __version__
from flyball_runtime.api.window import QUANTILES, BucketCounts, SlidingCounts, SlidingSamples
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.stats import EngineInfo, StepStats
from flyball_runtime.engine.front import EngineFront

Outcome = Literal["stop", "length", "abort", "error"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error")
BLOCKED_REASONS = ("none", "seqs", "kv", "budget", "step_time")

# fmt: off
LATENCY_EDGES_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)
TOKEN_EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# fmt: on

REQUESTS = "flyball_requests_total"
REJECTED = "flyball_requests_rejected_total"
BLOCKED_STEPS = "flyball_blocked_steps_total"
PREFIX_QUERIED = "flyball_prefix_cache_queried_tokens_total"
PREFIX_HITS = "flyball_prefix_cache_hit_tokens_total"
PREEMPTIONS = "flyball_preemptions_total"
RECOMPUTED = "flyball_recomputed_tokens_total"
PROMPT_TOKENS = "flyball_prompt_tokens_total"
GENERATION_TOKENS = "flyball_generation_tokens_total"

COUNTERS = {
    PREFIX_QUERIED: "Prompt tokens looked up in the prefix cache at admission.",
    PREFIX_HITS: "Prompt tokens found in the prefix cache at admission.",
    PREEMPTIONS: "Running sequences whose KV blocks were taken away.",
    RECOMPUTED: "Computed tokens thrown away by preemptions.",
    PROMPT_TOKENS: "Prompt tokens of requests that got their first token.",
    GENERATION_TOKENS: "Output tokens that reached the API process.",
}
LABELLED_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    REQUESTS: ("Requests ended, by outcome.", "outcome", OUTCOMES),
    REJECTED: ("HTTP generation requests that the engine refused, by error code.", "reason", ()),
    BLOCKED_STEPS: ("Engine steps by why the head of the queue was not admitted.", "reason", BLOCKED_REASONS),
}

TTFT = "flyball_time_to_first_token_seconds"
ITL = "flyball_inter_token_latency_seconds"
TPOT = "flyball_time_per_output_token_seconds"
E2E = "flyball_e2e_request_latency_seconds"
STEP_DURATION = "flyball_step_duration_seconds"
STEP_TOKENS = "flyball_step_tokens"
REQUEST_PROMPT_TOKENS = "flyball_request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "flyball_request_generation_tokens"

HISTOGRAMS = {
    TTFT: "Arrival of a request to its first token.",
    ITL: "Gap between two consecutive output tokens; tokens that came in one event share its gap.",
    TPOT: "Last minus first token, over output tokens less one, per finished request.",
    E2E: "Arrival of a request to its end, for requests that were finished.",
    STEP_DURATION: "One engine step: plan, run and commit.",
    STEP_TOKENS: "Tokens computed in one engine step.",
    REQUEST_PROMPT_TOKENS: "Prompt tokens of finished requests.",
    REQUEST_GENERATION_TOKENS: "Output tokens of finished requests.",
}
WINDOW_QUANTILES = {
    TTFT: "flyball_time_to_first_token_window_seconds",
    ITL: "flyball_inter_token_latency_window_seconds",
    E2E: "flyball_e2e_request_latency_window_seconds",
}


class Metrics(Collector):
    """The counts of one API process; implements EngineObserver.

    Args:
        model_name: value of the ``model_name`` label of the vllm: gauges.
        registry: where to register; a new one by default, never the process-wide one.
        window_s: length of the sliding window.
    """

    def __init__(
        self, *, model_name: str, clock: Clock, registry: CollectorRegistry | None = None, window_s: float = 60.0
    ) -> None:
        self.clock = clock
        self.model_name = model_name
        self.window_s = window_s
        self.latest: StepStats | None = None
        self.first_step_s: float | None = None
        self._front: EngineFront | None = None
        self._totals: Counter[Hashable] = Counter()
        self._recent = SlidingCounts(window_s)
        self._histograms = {name: BucketCounts(_edges(name)) for name in HISTOGRAMS}
        self._windows = {name: SlidingSamples(LATENCY_EDGES_S, window_s) for name in (TTFT, ITL, E2E, STEP_DURATION)}
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attach(self, front: EngineFront) -> None:
        """Name the engine whose start-up facts and drain state are shown. They are read at each scrape."""
        self._front = front

    # Counting

    def step(self, stats: StepStats) -> None:
        """Take in one engine step, or the sign of life of an idle engine (0 tokens, blocked by nothing)."""
        now = self.clock.now()
        self.latest = stats
        self.first_step_s = now if self.first_step_s is None else self.first_step_s
        if stats.num_tokens or stats.blocked_by != "none":
            self._count(now, (BLOCKED_STEPS, stats.blocked_by))
        if stats.num_tokens:
            self._observe(STEP_DURATION, now, stats.duration_s)
            self._histograms[STEP_TOKENS].add(stats.num_tokens)
        self._count(now, PREEMPTIONS, stats.num_preemptions)
        self._count(now, RECOMPUTED, stats.num_recomputed_tokens)
        self._count(now, PREFIX_QUERIED, stats.num_prefix_queried_tokens)
        self._count(now, PREFIX_HITS, stats.num_prefix_hit_tokens)

    def request_started(self, arrival_s: float, num_prompt_tokens: int) -> "RequestTimer":
        """Start timing a request that the engine accepted; ``arrival_s`` is on this object's clock."""
        return RequestTimer(self, arrival_s, num_prompt_tokens)

    def request_rejected(self, code: str) -> None:
        self._count(self.clock.now(), (REJECTED, code))

    def _count(self, now: float, key: Hashable, count: int = 1) -> None:
        if count:
            self._totals[key] += count
            self._recent.add(now, key, count)

    def _observe(self, name: str, now: float, value: float, count: int = 1) -> None:
        self._histograms[name].add(value, count)
        if (window := self._windows.get(name)) is not None:
            window.add(now, value, count)

    # Reading

    def window(self, name: str) -> LatencyWindow:
        """The window of TTFT, ITL, E2E or STEP_DURATION."""
        return self._windows[name].summary(self.clock.now())

    def recent(self) -> Counter[Hashable]:
        """Counts over the window: by metric name, or by (name, label value) where it has a label."""
        return self._recent.totals(self.clock.now())

    def blocked_by_shares(self) -> dict[str, float]:
        """Share of the window's steps by BLOCKED_REASONS; empty without steps."""
        recent = self.recent()
        steps = {reason: recent[BLOCKED_STEPS, reason] for reason in BLOCKED_REASONS}
        num_steps = sum(steps.values())
        return {reason: count / num_steps for reason, count in steps.items()} if num_steps else {}

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The scrape in the text format that an Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> list[Metric]:
        """Nothing: registering must not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_counters()
        for name, text in HISTOGRAMS.items():
            yield _histogram(name, text, self._histograms[name])
        yield from self._collect_windows()
        yield from self._collect_queue()
        if self.latest is not None:
            yield from _kv_gauges(self.latest.kv_blocks)
            yield from _limit_gauges(self.latest)
        if self._front is not None:
            yield _gauge("flyball_draining", "1 from the beginning of a drain on.", self._front.draining)
            if self._front.ready:
                yield from self._collect_info(self._front.info)
        yield _labelled_gauge("flyball_build_info", "Always 1; the labels say what runs.", {"version": __version__})

    def _collect_counters(self) -> Iterator[Metric]:
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=self._totals[name])
        for name, (text, label, known) in LABELLED_COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=[label])
            seen = [key[1] for key in self._totals if isinstance(key, tuple) and key[0] == name]
            for value in dict.fromkeys((*known, *seen)):
                family.add_metric([value], self._totals[name, value])
            yield family

    def _collect_windows(self) -> Iterator[Metric]:
        for name, window_name in WINDOW_QUANTILES.items():
            text = f"Quantiles over the last {self.window_s:g} s. {HISTOGRAMS[name]}"
            yield _quantiles(window_name, text, self.window(name))
        yield _by_label(
            "flyball_blocked_by_share",
            f"Share of the last {self.window_s:g} s' steps by why the head of the queue was not admitted.",
            "reason",
            self.blocked_by_shares(),
        )

    def _collect_queue(self) -> Iterator[Metric]:
        running = 0 if self.latest is None else self.latest.num_running
        waiting = 0 if self.latest is None else self.latest.num_waiting
        usage = 0.0 if self.latest is None else kv_usage(self.latest.kv_blocks)
        ratio = 0.0 if self.latest is None else running / self.latest.effective.max_num_seqs
        model = {"model_name": self.model_name}
        yield _gauge("flyball_requests_running", "Requests that hold KV blocks.", running)
        yield _gauge(REQUESTS_WAITING, "Requests in the queue.", waiting)
        yield _gauge(REQUESTS_RUNNING_RATIO, "Running requests over the limit in force, 0 to 1.", ratio)
        yield _labelled_gauge(
            "vllm:num_requests_running", "flyball_requests_running under vLLM's name.", model, running
        )
        yield _labelled_gauge(
            "vllm:num_requests_waiting", "flyball_requests_waiting under vLLM's name.", model, waiting
        )
        yield _labelled_gauge("vllm:kv_cache_usage_perc", "KV cache in use, 0 to 1, under vLLM's name.", model, usage)

    def _collect_info(self, info: EngineInfo) -> Iterator[Metric]:
        yield _by_label(
            "flyball_startup_seconds", "Time from process start to ready, by stage.", "stage", info.startup_s
        )
        config = {
            "model_name": self.model_name,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_kv_blocks),
        }
        yield _labelled_gauge("vllm:cache_config_info", "Always 1; the KV cache's settings, under vLLM's name.", config)


class RequestTimer:
    """Times one request's tokens; the work per event is bounded."""

    __slots__ = ("_arrival_s", "_first_s", "_last_s", "_metrics", "_num_prompt_tokens")

    def __init__(self, metrics: Metrics, arrival_s: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._num_prompt_tokens = num_prompt_tokens
        self._first_s: float | None = None
        self._last_s = 0.0

    def tokens(self, count: int) -> None:
        """``count`` tokens came in one event; behind the first event they share the gap evenly."""
        now = self._metrics.clock.now()
        if self._first_s is None:
            self._first_s = now
            self._metrics._observe(TTFT, now, now - self._arrival_s)
            self._metrics._count(now, PROMPT_TOKENS, self._num_prompt_tokens)
        else:
            self._metrics._observe(ITL, now, (now - self._last_s) / count, count)
        self._last_s = now
        self._metrics._count(now, GENERATION_TOKENS, count)

    def ended(self, outcome: Outcome, num_output_tokens: int) -> None:
        """The request ended. Only stop and length count into latencies and sizes."""
        now = self._metrics.clock.now()
        self._metrics._count(now, (REQUESTS, outcome))
        if outcome not in ("stop", "length"):
            return
        self._metrics._observe(E2E, now, now - self._arrival_s)
        self._metrics._observe(REQUEST_PROMPT_TOKENS, now, self._num_prompt_tokens)
        self._metrics._observe(REQUEST_GENERATION_TOKENS, now, num_output_tokens)
        if self._first_s is not None and num_output_tokens > 1:
            self._metrics._observe(TPOT, now, (self._last_s - self._first_s) / (num_output_tokens - 1))


def kv_usage(blocks: KVBlocks) -> float:
    """Share of the usable KV blocks that running sequences hold; cached blocks without an owner are free to take."""
    return blocks.used / blocks.capacity if blocks.capacity else 0.0


def _edges(name: str) -> tuple[float, ...]:
    return LATENCY_EDGES_S if name.endswith("_seconds") else TOKEN_EDGES


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _labelled_gauge(name: str, text: str, labels: Mapping[str, str], value: float = 1) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _quantiles(name: str, text: str, window: LatencyWindow) -> Metric:
    """A summary without sum and count: promtool allows the label ``quantile`` to no other type."""
    family = Metric(name, text, "summary")
    for quantile, value in zip(QUANTILES, (window.p50_s, window.p95_s, window.p99_s), strict=True):
        if value is not None:
            family.add_sample(name, {"quantile": str(quantile)}, value)
    return family


def _histogram(name: str, text: str, buckets: BucketCounts) -> Metric:
    cumulative, rows = 0, []
    for edge, count in zip([*map(str, buckets.edges), "+Inf"], buckets.counts, strict=True):
        cumulative += count
        rows.append((edge, float(cumulative)))
    return HistogramMetricFamily(name, text, buckets=rows, sum_value=buckets.sum)


def _kv_gauges(blocks: KVBlocks) -> Iterator[Metric]:
    states = {"free": blocks.free, "used": blocks.used, "cached": blocks.cached}
    yield _by_label("flyball_kv_blocks", "KV blocks by state.", "state", states)
    yield _gauge("flyball_kv_blocks_capacity", "KV blocks that may be used or cached under the limit.", blocks.capacity)
    yield _gauge("flyball_kv_cache_usage_ratio", "Used KV blocks over capacity, 0 to 1.", kv_usage(blocks))


def _limit_gauges(stats: StepStats) -> Iterator[Metric]:
    yield _by_label("flyball_limit_target", "The limit asked for.", "limit", _limit_values(stats.target))
    yield _by_label("flyball_limit_effective", "The limit in force now.", "limit", _limit_values(stats.effective))
    yield _gauge("flyball_limits_revision", "Revision of the limits in force.", stats.revision)


def _limit_values(limits: Limits) -> dict[str, float]:
    values = {name: getattr(limits, name) for name in limits.__struct_fields__}
    return {name: float(value) for name, value in values.items() if value is not None}
