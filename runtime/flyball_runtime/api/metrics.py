"""The metrics of the API process: names, help texts, and their samples when /metrics is scraped.

``Measurements`` counts; this reads. Latencies are taken where a client would see them: from a request's complete body to
the event that carries a token. Values over the window are absent, not 0 or NaN, while the window holds no sample. Most
gauges about the engine are absent until it has reported.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flyball_protocol import KVBlocks, LatencyWindow, Limits, StepModel
from flyball_protocol.endpoints import REQUESTS_RUNNING_RATIO, REQUESTS_WAITING
from flyball_runtime import __version__
from flyball_runtime.core import measurements
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.measurements import Measurements
from flyball_runtime.core.stats import EngineInfo, StepStats
from flyball_runtime.core.window import QUANTILES, Series
from flyball_runtime.engine.front import EngineFront

# By key of Measurements.counts: flyball_<key>_total.
COUNTERS = {
    measurements.PREFIX_QUERIED: "Prompt tokens looked up in the prefix cache at admission.",
    measurements.PREFIX_HITS: "Prompt tokens found in the prefix cache at admission.",
    measurements.PREEMPTIONS: "Running sequences whose KV blocks were taken away.",
    measurements.RECOMPUTED: "Computed tokens thrown away by preemptions.",
    measurements.SWAPPED_OUT: "Evicted KV blocks that were copied to host memory.",
    measurements.SWAPPED_IN: "KV blocks that were copied back from host memory.",
    measurements.HOST_HITS: "Tokens of admitted sequences that were found in host memory.",
    measurements.DRAFTS: "Drafts that were verified: of one sequence in one step each.",
    measurements.DRAFT_TOKENS: "Tokens of those drafts.",
    measurements.ACCEPTED_TOKENS: "Tokens of those drafts that the model agreed with.",
    measurements.ARRIVED: "Requests accepted, and HTTP requests refused because the queue was full.",
    measurements.PROMPT_TOKENS: "Prompt tokens of requests that got their first token.",
    measurements.GENERATION_TOKENS: "Output tokens that reached the API process.",
}
LABELLED_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    measurements.REQUESTS: ("Requests ended, by outcome.", "outcome", measurements.OUTCOMES),
    measurements.REJECTED: ("HTTP generation requests that the engine refused, by error code.", "reason", ()),
    measurements.BLOCKED_STEPS: (
        "Engine steps by why the head of the queue was not admitted.",
        "reason",
        measurements.BLOCKED_REASONS,
    ),
}

TTFT = "Arrival of a request to its first token."
ITL = "Gap between two consecutive output tokens; tokens that came in one event share its gap."
E2E = "Arrival of a request to its end, for requests that were finished."

VLLM_NAMES = {
    "flyball_requests_running": "vllm:num_requests_running",
    REQUESTS_WAITING: "vllm:num_requests_waiting",
    "flyball_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "flyball_requests": "vllm:request_success",
    "flyball_prompt_tokens": "vllm:prompt_tokens",
    "flyball_generation_tokens": "vllm:generation_tokens",
    "flyball_prefix_cache_queried_tokens": "vllm:prefix_cache_queries",
    "flyball_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "flyball_host_cache_hit_tokens": "vllm:external_prefix_cache_hits",
    "flyball_swap_space_usage_ratio": "vllm:cpu_cache_usage_perc",
    "flyball_preemptions": "vllm:num_preemptions",
    "flyball_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "flyball_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "flyball_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "flyball_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "flyball_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "flyball_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "flyball_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "flyball_request_prompt_tokens": "vllm:request_prompt_tokens",
    "flyball_request_generation_tokens": "vllm:request_generation_tokens",
}
"""Families that vLLM has too, with the same meaning: ours (counters without ``_total``) to vLLM's."""

VLLM_LABELS = {"outcome": "finished_reason"}


class MetricsCollector(Collector):
    """Shows what one API process measures.

    Args:
        model_name: value of the ``model_name`` label of the vllm: names.
        registry: where to register; a new one by default, never the process-wide one.

    Attributes:
        measured: the counts that are shown; whatever happens is reported to it.
    """

    def __init__(self, *, model_name: str, clock: Clock, registry: CollectorRegistry | None = None) -> None:
        self.model_name = model_name
        self.measured = Measurements(clock)
        self._front: EngineFront | None = None
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attach(self, front: EngineFront) -> None:
        """Name the engine whose start-up facts and drain state are shown. They are read at each scrape."""
        self._front = front

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the scrape in the text format that an Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            yield family
            if (name := VLLM_NAMES.get(family.name)) is not None:
                yield self._under(name, family)

    def _under(self, name: str, family: Metric) -> Metric:
        """Return the same samples under vLLM's name and labels."""
        renamed = Metric(name, f"{family.name} under vLLM's name.", family.type)
        for sample in family.samples:
            labels = {VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
            labels["model_name"] = self.model_name
            renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        return renamed

    def _families(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._windows()
        yield from _queue_gauges(self.measured.latest)
        if self.measured.latest is not None:
            yield from _kv_gauges(self.measured.latest.kv_blocks)
            usage = "Share of the swap space that holds KV blocks, 0 to 1."
            yield _gauge("flyball_swap_space_usage_ratio", usage, self.measured.latest.host_usage)
            yield from _limit_gauges(self.measured.latest)
            if self.measured.latest.num_cpu_threads:
                threads = "CPU threads that computed the latest step; fewer where other processes use the cores."
                yield _gauge("flyball_cpu_threads", threads, self.measured.latest.num_cpu_threads)
        if self.measured.step_model is not None:
            yield from _step_model_gauges(self.measured.step_model)
        if self._front is not None:
            yield _gauge("flyball_draining", "1 from the beginning of a drain on.", self._front.draining)
            if self._front.ready:
                yield from self._info(self._front.info)
        yield _info("flyball_build_info", "Always 1; the labels say what runs.", {"version": __version__})

    def _counters(self) -> Iterator[Metric]:
        totals = self.measured.counts.totals
        for key, text in COUNTERS.items():
            yield CounterMetricFamily(f"flyball_{key}", text, value=totals[key])
        for key, (text, label, known) in LABELLED_COUNTERS.items():
            family = CounterMetricFamily(f"flyball_{key}", text, labels=[label])
            seen = [one[1] for one in totals if isinstance(one, tuple) and one[0] == key]
            for value in dict.fromkeys((*known, *seen)):
                family.add_metric([value], totals[key, value])
            yield family

    def _histograms(self) -> Iterator[Metric]:
        measured = self.measured
        tpot = "Last minus first token, over output tokens less one, per finished request."
        for name, text, series in (
            ("flyball_time_to_first_token_seconds", TTFT, measured.ttft),
            ("flyball_inter_token_latency_seconds", ITL, measured.itl),
            ("flyball_time_per_output_token_seconds", tpot, measured.tpot),
            ("flyball_e2e_request_latency_seconds", E2E, measured.e2e),
            ("flyball_step_duration_seconds", "One engine step: plan, run and commit.", measured.step_time),
            (
                "flyball_step_predicted_seconds",
                "Time to the next tokens that was predicted for a step when it was launched.",
                measured.predicted_step_time,
            ),
            ("flyball_step_tokens", "Tokens computed in one engine step.", measured.step_tokens),
            ("flyball_request_prompt_tokens", "Prompt tokens of finished requests.", measured.request_prompt_tokens),
            (
                "flyball_request_generation_tokens",
                "Output tokens of finished requests.",
                measured.request_generation_tokens,
            ),
        ):
            yield _histogram(name, text, series)

    def _windows(self) -> Iterator[Metric]:
        measured, now = self.measured, self.measured.clock.now()
        for name, text, series in (
            ("flyball_time_to_first_token_window_seconds", TTFT, measured.ttft),
            ("flyball_inter_token_latency_window_seconds", ITL, measured.itl),
            ("flyball_e2e_request_latency_window_seconds", E2E, measured.e2e),
        ):
            yield _quantiles(name, f"Quantiles over the last {measured.window_s:g} s. {text}", series.window(now))
        yield _by_label(
            "flyball_blocked_by_share",
            f"Share of the last {measured.window_s:g} s' steps by why the head of the queue was not admitted.",
            "reason",
            measured.blocked_by_shares(),
        )

    def _info(self, info: EngineInfo) -> Iterator[Metric]:
        yield _by_label(
            "flyball_startup_seconds", "Time from process start to ready, by stage.", "stage", info.startup_s
        )
        config = {
            "model_name": self.model_name,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_kv_blocks),
            "cache_dtype": info.kv_cache_dtype,
        }
        yield _info("vllm:cache_config_info", "Always 1; the KV cache's settings, under vLLM's name.", config)


def kv_usage(blocks: KVBlocks) -> float:
    """Return the share of the usable KV blocks that running sequences hold; cached blocks without an owner are free."""
    return blocks.used / blocks.capacity if blocks.capacity else 0.0


def _queue_gauges(stats: StepStats | None) -> Iterator[Metric]:
    """Yield what gateways and scalers read, from the start on."""
    running = 0 if stats is None else stats.num_running
    waiting = 0 if stats is None else stats.num_waiting
    ratio = 0.0 if stats is None else running / stats.max_num_seqs
    usage = 0.0 if stats is None else kv_usage(stats.kv_blocks)
    yield _gauge("flyball_requests_running", "Requests that hold KV blocks.", running)
    yield _gauge(REQUESTS_WAITING, "Requests in the queue.", waiting)
    yield _gauge(REQUESTS_RUNNING_RATIO, "Running requests over the most that the start-up flags allow, 0 to 1.", ratio)
    yield _gauge("flyball_kv_cache_usage_ratio", "Used KV blocks over capacity, 0 to 1.", usage)


def _kv_gauges(blocks: KVBlocks) -> Iterator[Metric]:
    states = {"free": blocks.free, "used": blocks.used, "cached": blocks.cached}
    yield _by_label("flyball_kv_blocks", "KV blocks by state.", "state", states)
    yield _gauge("flyball_kv_blocks_capacity", "KV blocks that may be used or cached under the limit.", blocks.capacity)


def _limit_gauges(stats: StepStats) -> Iterator[Metric]:
    yield _by_label("flyball_limit_target", "The limit asked for.", "limit", _limit_values(stats.target))
    yield _by_label("flyball_limit_effective", "The limit in force now.", "limit", _limit_values(stats.effective))
    yield _gauge("flyball_limits_revision", "Revision of the limits in force.", stats.revision)


def _step_model_gauges(model: StepModel) -> Iterator[Metric]:
    terms = ("base_s", "token_s", "knee_tokens", "context_token_s", "attention_pair_s", "interaction_s")
    yield _by_label(
        "flyball_step_model",
        "The learned model of the step time, by coefficient.",
        "coefficient",
        {term: getattr(model, term) for term in terms},
    )
    residual = Metric("flyball_step_residual_ratio", "|measured - predicted| / predicted of recent steps.", "summary")
    for quantile, value in (("0.5", model.residual_p50), ("0.95", model.residual_p95)):
        if value is not None:
            residual.add_sample(residual.name, {"quantile": quantile}, value)
    yield residual
    yield _gauge("flyball_step_model_settled", "1 if step times can be planned with.", model.settled)
    interrupted = "Share of the last steps that something outside of the engine interrupted, such as a CPU limit."
    yield _gauge("flyball_step_interrupted_ratio", interrupted, model.interrupted_share)


def _limit_values(limits: Limits) -> dict[str, float]:
    values = {name: getattr(limits, name) for name in limits.__struct_fields__}
    return {name: float(value) for name, value in values.items() if value is not None}


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _quantiles(name: str, text: str, window: LatencyWindow) -> Metric:
    """Return a summary without sum and count: promtool allows the label ``quantile`` to no other type."""
    family = Metric(name, text, "summary")
    for quantile, value in zip(QUANTILES, (window.p50_s, window.p95_s, window.p99_s), strict=True):
        if value is not None:
            family.add_sample(name, {"quantile": str(quantile)}, value)
    return family


def _histogram(name: str, text: str, series: Series) -> Metric:
    counts, total = series.totals()
    cumulative, rows = 0, []
    for edge, count in zip([*map(str, series.edges), "+Inf"], counts, strict=True):
        cumulative += count
        rows.append((edge, float(cumulative)))
    return HistogramMetricFamily(name, text, buckets=rows, sum_value=total)
