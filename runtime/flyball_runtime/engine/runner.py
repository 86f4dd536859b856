"""Runs plans on this process's device: rows -> input tensors -> model -> sampler -> token ids."""

import time
from concurrent.futures import Future
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from flyball_runtime.core.clock import MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.cpus import cores
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.core.quantization import resolve_quantization
from flyball_runtime.core.stats import EngineInfo, Sampled
from flyball_runtime.engine.adapted_rows import AdaptedRows, check_can_adapt
from flyball_runtime.engine.ahead import DecodesAhead
from flyball_runtime.engine.draft_model import DraftModel
from flyball_runtime.engine.engine import Engine, Executor, InThread, Progress
from flyball_runtime.engine.physical_pool import make_pool
from flyball_runtime.engine.rows import Rows, entries_of
from flyball_runtime.engine.start_up import (
    KVCacheSize,
    WarmUp,
    device_name,
    peak_bytes,
    resolve_device,
    resolve_kv_cache,
    resolve_max_model_len,
    set_num_threads,
    use_numa_node,
)
from flyball_runtime.engine.swap_space import SwapSpace, resolve_num_slots
from flyball_runtime.engine.threads import ThreadCount, thread_count
from flyball_runtime.grammar.cache import GrammarCache
from flyball_runtime.grammar.compiler import CompiledGrammar, GrammarCompiler
from flyball_runtime.model.kv_blocks import cache_blocks
from flyball_runtime.model.linear import Place
from flyball_runtime.model.loader import (
    TORCH_DTYPES,
    check_attention,
    describe_model,
    kernel_backend,
    kv_torch_dtype,
    load_model,
    resolve_dtype,
)
from flyball_runtime.model.logprobs import SampledLogprobs
from flyball_runtime.model.pooled import PooledStates, Sums
from flyball_runtime.model.prompt_logprobs import PromptLogprobs
from flyball_runtime.model.sampler import NO_TOKEN, SamplingTensors
from flyball_runtime.model.threads import compute_with
from flyball_runtime.model.transformer import CausalLM
from flyball_runtime.model.verify import verify
from flyball_runtime.scheduler import BatchPlan

Moment = float | torch.cuda.Event
"""A time of ``time.monotonic``, or an event with one."""


class LaunchedStep(NamedTuple):
    """A step under way.

    Attributes:
        token_ids: ``[num_sampled]`` int64 on the host, whole once ``done`` is.
        logprobs: likewise; None when nobody asks for them.
        prompt_logprobs: likewise.
        done: None on a CPU, which has computed them.
        stuck: as in Sampled.
        pooled: like ``token_ids``.
        num_accepted: ``[num_drafted]`` int64 on the host, likewise; None when nothing was drafted.
        drafts: of a draft model, of all entries; None without one.
        drafting_s: seconds in which it made them.
        swapping: when blocks began to be copied to host memory and back, and when that ended: times, or events on a GPU.
    """

    token_ids: Tensor
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    done: torch.cuda.Event | None = None
    stuck: dict[int, str] = {}  # noqa: RUF012  never changed
    pooled: PooledStates | None = None
    num_accepted: Tensor | None = None
    drafts: np.ndarray | None = None
    drafting_s: float = 0.0
    swapping: tuple[Moment, Moment] = (0.0, 0.0)


class ModelRunner:
    """Owns everything that lives on the device: weights, KV tensors, rows, sampling settings. An Executor.

    It starts in stages, so that the ranks of a replica can agree in between: made, it has its weights; ``measure()`` says
    how many KV blocks fit beside them; ``allocate()`` makes as many as the rank with the least room has. ``start()`` is
    all three, for a replica of one.

    Args:
        on_progress: called after each layer of a step.
        owns_process: nothing else computes in this process, so that its threads may be told on which cores to run.
    Raises:
        ConfigError: the checkpoint, a setting or the machine makes start-up impossible.
    """

    def __init__(self, config: EngineConfig, on_progress: Progress, *, owns_process: bool) -> None:
        self._config = config
        self._on_progress = on_progress
        self._stages = _Stages()
        if config.numa_node is not None:
            use_numa_node(config.numa_node)
        may_change = set_num_threads(config.num_threads)
        self._model_config = describe_model(Path(config.model), config.model_impl)
        self._device = resolve_device(config.device)
        self._dtype_name = resolve_dtype(config.dtype, self._model_config)
        self._dtype = TORCH_DTYPES[self._dtype_name]
        self._kv_dtype_name = config.kv_dtype(self._dtype_name)
        self._max_model_len = resolve_max_model_len(config, self._model_config)
        self._step_tokens = config.step_tokens(self._device.type, self._max_model_len)
        self._backend = kernel_backend(config.kernel_backend, self._device, config.attention_backend)
        self._cores = cores() if owns_process else set()
        self._threads: ThreadCount | None = None
        if may_change and self._device.type == "cpu":
            num_threads = torch.get_num_threads()
            can_be_apart = len(self._cores) == num_threads and self._backend.name == "cpp"
            self._threads = thread_count(num_threads, MonotonicClock(), can_be_apart=can_be_apart)
        self._kv_dtype = kv_torch_dtype(self._kv_dtype_name, self._backend)
        check_attention(self._backend, self._model_config, self._dtype, self._kv_dtype)
        if config.lora is not None:
            check_can_adapt(self._model_config)
        self._stages.done("config")
        self._grammars = GrammarCache(GrammarCompiler.of_checkpoint(Path(config.model)))
        self._stages.done("vocabulary")
        self._model = load_model(
            config.model,
            self._model_config,
            dtype=self._dtype,
            device=self._device,
            backend=self._backend,
            max_model_len=self._max_model_len,
            quantization=config.quantization,
        )
        speculation = config.speculative_config
        self._draft_model: DraftModel | None = None
        if speculation is not None and speculation.model is not None:
            self._draft_model = DraftModel(
                speculation.model,
                self._model_config,
                served_path=Path(config.model),
                dtype=self._dtype_name,
                kv_dtype=self._kv_dtype_name,
                device=self._device,
                backend=self._backend,
                max_model_len=self._max_model_len,
            )
        self._adapted: AdaptedRows | None = None
        if config.lora is not None:
            assert isinstance(self._model, CausalLM)
            place = Place(self._dtype, self._device, self._backend)
            self._adapted = AdaptedRows(config.lora, self._model, place, config.max_num_seqs)
        self._stages.done("weights")
        self.eos_token_ids = self._model_config.eos_token_ids

    @classmethod
    def start(cls, config: EngineConfig, on_progress: Progress, *, owns_process: bool = False) -> "ModelRunner":
        runner = cls(config, on_progress, owns_process=owns_process)
        runner.allocate(runner.measure())
        return runner

    def measure(self) -> KVCacheSize:
        """Return how many KV blocks fit, after steps that show what one takes; a GPU's kernels are compiled in them."""
        models = [self._model] if self._draft_model is None else [self._model, self._draft_model.model]
        warm_ups = [
            WarmUp(
                model,
                self._config,
                max_model_len=self._max_model_len,
                step_tokens=self._step_tokens,
                kv_dtype=self._kv_dtype,
                device=self._device,
            )
            for model in models
        ]
        step_bytes = 0
        if self._device.type == "cuda":
            for warm_up in warm_ups:
                warm_up.small_steps()
                step_bytes = max(step_bytes, peak_bytes(warm_up.largest_step, self._device))
            if self._adapted is not None:
                step_bytes += self._adapted.most_bytes
        self._longest_pause_s = max(warm_up.longest_pause_s() for warm_up in warm_ups)
        self._stages.done("warm_up")
        return resolve_kv_cache(
            self._config,
            self._model_config,
            self._model.layout,
            kv_dtype=self._kv_dtype_name,
            device=self._device,
            max_model_len=self._max_model_len,
            step_tokens=self._step_tokens,
            step_bytes=step_bytes,
            draft_bytes_per_token=self._draft_bytes_per_token,
        )

    def allocate(self, size: KVCacheSize) -> None:
        """Make the KV tensors and the rows; then ``info`` is there and plans can be launched."""
        config = self._config
        layout = self._model.layout
        self._pool = make_pool(
            self._model_config,
            layout.num_tensors,
            num_blocks=size.max_blocks,
            block_size=config.block_size,
            dtype=self._kv_dtype,
            device=self._device,
        )
        kv = [*self._pool.tensors]
        if self._draft_model is not None:
            self._draft_model.allocate(size.max_blocks, config.block_size)
            kv += self._draft_model.kv_tensors
        self.resize(size.num_blocks)
        self._blocks = cache_blocks(kv, self._backend)
        block_bytes = self._kv_block_bytes
        reserved_bytes = size.num_blocks * block_bytes if self._device.type == "cpu" else 0
        num_slots = resolve_num_slots(config.swap_space_bytes, block_bytes, reserved_bytes)
        self._swap_space = SwapSpace(self._blocks, num_slots) if num_slots else None
        self._rows = Rows(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            device=self._device,
            backend=self._backend,
            num_groups=len(layout.groups),
        )
        self._sampling = SamplingTensors(config.max_num_seqs, self._device, self._backend, self._grammars)
        self._sums: Sums = {}
        self._ahead = self._make_ahead() if config.num_scheduler_steps > 1 else None
        self._stages.done("kv_cache")
        self.info = EngineInfo(
            model=config.served_model_name,
            dtype=self._dtype_name,
            quantization=resolve_quantization(config.quantization, self._model_config.stored),
            kv_cache_dtype=config.kv_cache_dtype,
            device=str(self._device),
            kernel_backend=self._backend.name,
            attention_backend=self._backend.attention,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=self._step_tokens,
            vocab_size=self._model_config.vocab_size,
            block_size=config.block_size,
            kv_windows=layout.windows,
            num_kv_blocks=size.max_blocks,
            num_start_kv_blocks=size.num_blocks,
            num_parameters=self._model.num_parameters,
            device_name=device_name(self._device),
            kv_block_bytes=block_bytes,
            startup_s=self._stages.seconds,
            longest_pause_s=self._longest_pause_s,
            draft_model=(config.speculative_config and config.speculative_config.model) or "",
            num_swap_slots=num_slots,
            block_copy_s=0.0 if self._swap_space is None else self._swap_space.block_copy_s,
        )

    @property
    def _kv_block_bytes(self) -> int:
        layer_bytes = self._model_config.kv_bytes_per_layer(self._kv_dtype_name)
        return self._config.block_size * (self._model.layout.num_tensors * layer_bytes + self._draft_bytes_per_token)

    @property
    def _draft_bytes_per_token(self) -> int:
        return 0 if self._draft_model is None else self._draft_model.kv_bytes_per_token

    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Run a step; on a GPU, return when its kernels are launched."""
        self._update_threads()
        copies = [(one.source, one.target) for one in plan.block_copies]
        if self._swap_space is None or not (plan.swap_outs or plan.swap_ins):
            self._blocks.copy(copies)
            return self._compute(plan)
        start = self._now()
        self._swap_space.swap_out(plan.swap_outs)
        self._blocks.copy(copies)
        self._swap_space.swap_in(plan.swap_ins)
        end = self._now()
        return self._compute(plan)._replace(swapping=(start, end))

    def _make_ahead(self) -> DecodesAhead | None:
        model, kv = self._model, self._pool.tensors
        if self._adapted is not None or not isinstance(model, CausalLM) or not model.can_decode:
            return None
        return DecodesAhead(model, kv, self._rows, self._sampling, self.eos_token_ids, self._config.max_num_seqs)

    def decodes_ahead(self, plan: BatchPlan) -> bool:
        return self._ahead is not None and self._ahead.can_run(plan)

    def launch_decodes(self, plans: list[BatchPlan]) -> list[LaunchedStep]:
        assert self._ahead is not None, "there is no op that decodes by itself"
        self._update_threads()
        token_ids = self._ahead.run(plans)
        self._on_progress()
        return [self._to_host(of_step, None, None, None) for of_step in token_ids]

    def _update_threads(self) -> None:
        if self._threads is not None and self._threads.update():
            compute_with(self._threads.current, self._cores, apart=self._threads.are_apart, backend=self._backend)

    def _now(self) -> Moment:
        """Return the time, or on a GPU an event that stands for it."""
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _compute(self, plan: BatchPlan) -> LaunchedStep:
        """Run a step whose blocks are in place."""
        self._rows.apply(plan)
        for start in plan.row_starts:
            self._sampling.set_row(start.row, start.sampling, start.past)
            self._sums.pop(start.row, None)
            if self._ahead is not None:
                self._ahead.set_row(start.row, start.sampling)
        if self._draft_model is not None:
            plan = self._draft_model.fill(plan, self._rows, self._sampling, self._on_progress)
        entries = entries_of(plan)
        inputs = self._rows.inputs(plan, entries)
        if self._adapted is not None:
            self._adapted.apply(plan)
            inputs = inputs._replace(adapted=self._adapted.of_step(plan))
        scores = self._prompt_logprobs(plan) if plan.prompt_spans else None
        pooled = self._pooled(plan) if plan.pool_spans else None
        logits = self._model.forward(
            inputs,
            self._pool.tensors,
            self._on_progress,
            None if scores is None else scores.score,
            None if pooled is None else pooled.pool,
        )
        if not logits.shape[0]:
            return self._to_host(logits.new_empty(0, dtype=torch.int64), None, scores, pooled)
        rows = list(compress(plan.rows, plan.samples)) if False in plan.samples else plan.rows
        token_ids = None if plan.num_drafts else self._sampling.likeliest(logits, rows)
        logprobs, drafts, num_accepted = None, None, None
        if token_ids is None:
            rows_of, starts, lengths, _ = entries[:, entries[3] != 0]
            ends = starts + lengths
            at = _each_draft(rows_of, ends, plan.num_drafts) if plan.num_drafts else (rows_of, ends)
            token_ids, logprobs = self._sampling.sample_and_score(logits, *at)
        if plan.num_drafts:
            drafts = _drafts_of(plan)
            token_ids, num_accepted = verify(token_ids, drafts, plan.num_drafts)
        self._rows.remember(rows, token_ids)
        handle = self._to_host(token_ids, logprobs, scores, pooled, num_accepted)
        if self._draft_model is None:
            return handle
        return handle._replace(drafts=drafts, drafting_s=self._draft_model.drafting_s)

    def _prompt_logprobs(self, plan: BatchPlan) -> PromptLogprobs:
        begins = _begins(plan)
        return PromptLogprobs(
            plan.prompt_spans,
            [int(begins[span.entry]) + span.at for span in plan.prompt_spans],
            vocab_size=self._model_config.vocab_size,
            device=self._device,
            after_slice=self._on_progress,
        )

    def _pooled(self, plan: BatchPlan) -> PooledStates:
        spans, begins = plan.pool_spans, _begins(plan)
        return PooledStates(
            spans,
            first=[int(begins[span.entry]) + span.at for span in spans],
            num_tokens=[plan.starts[span.entry] + plan.num_scheduled[span.entry] - span.at for span in spans],
            rows=[plan.rows[span.entry] for span in spans],
            sums=self._sums,
            device=self._device,
        )

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        return self._grammars.compile(grammar)

    def load_adapter(self, number: int, path: str) -> Future[None]:
        assert self._adapted is not None, "adapters are loaded where they are enabled"
        return self._adapted.load(number, Path(path))

    def unload_adapter(self, number: int) -> None:
        assert self._adapted is not None, "adapters are loaded where they are enabled"
        self._adapted.unload(number)

    def resize(self, num_blocks: int) -> None:
        self._pool.resize(num_blocks)
        if self._draft_model is not None:
            self._draft_model.resize(num_blocks)

    def collect(self, handle: LaunchedStep) -> Sampled:
        if handle.done is not None:
            handle.done.synchronize()
        token_ids: list[int | None] = handle.token_ids.tolist()
        if NO_TOKEN in token_ids:
            token_ids = [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
        logprobs, scores, pooled = handle.logprobs, handle.prompt_logprobs, handle.pooled
        return Sampled(
            token_ids,
            None if logprobs is None else logprobs.by_index(),
            None if scores is None else scores.by_entry(),
            handle.stuck,
            {} if pooled is None else pooled.by_entry(),
            () if handle.num_accepted is None else handle.num_accepted.tolist(),
            () if handle.drafts is None else handle.drafts.tolist(),
            handle.drafting_s,
            _seconds(*handle.swapping),
            torch.get_num_threads() if self._device.type == "cpu" else 0,
        )

    def _to_host(
        self,
        token_ids: Tensor,
        logprobs: SampledLogprobs | None,
        scores: PromptLogprobs | None,
        pooled: PooledStates | None,
        num_accepted: Tensor | None = None,
    ) -> LaunchedStep:
        """Have the tokens copied as soon as they are there, before any step that is launched later."""
        stuck = self._sampling.stuck
        if self._device.type != "cuda":
            return LaunchedStep(token_ids, logprobs, scores, None, stuck, pooled, num_accepted)
        token_ids = _pinned(token_ids)
        num_accepted = None if num_accepted is None else _pinned(num_accepted)
        logprobs = None if logprobs is None else logprobs.on_host()
        if scores is not None:
            scores.to_host()
        if pooled is not None:
            pooled.to_host()
        done = torch.cuda.Event()
        done.record()
        return LaunchedStep(token_ids, logprobs, scores, done, stuck, pooled, num_accepted)


def _seconds(start: Moment, end: Moment) -> float:
    """Return the seconds between two times, or two events that are done."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "both are of one device"
        return end - start
    return float(start.elapsed_time(end)) / 1000


def _begins(plan: BatchPlan) -> np.ndarray:
    """Return, by entry, where its sequence's first token would be among the step's tokens."""
    return np.cumsum(plan.num_scheduled) - np.array(plan.num_scheduled) - np.array(plan.starts)


def _pinned(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is whole when what was launched so far is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _each_draft(rows: np.ndarray, ends: np.ndarray, num_drafts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return row and position of each token to choose; the last entries choose one behind each of their tokens.

    Args:
        rows, ends: of each entry that samples, its row and the tokens that its sequence then has.
    """
    counts = np.ones(len(rows), np.int64)
    counts[-len(num_drafts) :] += num_drafts
    num_following = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
    return np.repeat(rows, counts), np.repeat(ends, counts) - num_following


def _drafts_of(plan: BatchPlan) -> np.ndarray:
    """Return the drafts of all entries as int64: their tokens but the first of each."""
    num_drafts = np.array(plan.num_drafts)
    token_ids = np.frombuffer(plan.token_ids, np.uint32)[-int(num_drafts.sum()) - len(num_drafts) :]
    return np.delete(token_ids, np.cumsum(num_drafts + 1) - num_drafts - 1).astype(np.int64)


class _Stages:
    """Seconds by stage of start-up, each since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def done(self, stage: str) -> None:
        now_s = time.monotonic()
        self.seconds[stage] = round(now_s - self._last_s, 4)
        self._last_s = now_s


def start_engine(
    config: EngineConfig,
    *,
    on_progress: Progress = lambda: None,
    import_s: float = 0.0,
    owns_process: bool = False,
) -> Engine:
    """Load the model, allocate the KV cache and return an engine over both.

    Args:
        on_progress: called several times within each step.
        import_s: seconds that went into starting the process, reported as a stage of start-up.
        owns_process: nothing else computes in this process, so that its threads may be told on which cores to run.
    Raises:
        ConfigError: the model or the machine makes it impossible.
    """
    runner = ModelRunner.start(config, on_progress, owns_process=owns_process)
    startup_s = {"import": round(import_s, 4)} | runner.info.startup_s
    runner.info = msgspec.structs.replace(runner.info, startup_s=startup_s)
    executor: Executor = runner
    if config.async_scheduling and runner.info.device == "cpu":
        executor = InThread(runner)
    return Engine(config, executor)
