"""Facts found at start-up (device, length of sequences, number of KV blocks), and the made-up steps that show some of them.

On a GPU the largest made-up step shows how much memory a step takes beside weights and KV cache, which no formula knows as
well, and small ones have the kernels compiled, so that no request waits for a compiler. Parts of a step, timed, show on any
device how long the largest step may go without a sign of progress.
"""

import logging
import math
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flyball_runtime.core.checkpoint import KVDType, ServedModel
from flyball_runtime.core.clock import Clock, MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.cpus import bind_to_numa_node, cpu_limit
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.kv_layout import KVLayout, most_blocks
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.physical_pool import SoftPool, can_return_memory
from flyball_runtime.model.sampler import SamplingTensors
from flyball_runtime.model.step_inputs import step_inputs
from flyball_runtime.model.transformer import LanguageModel, StepInputs

logger = logging.getLogger(__name__)

MAX_DEFAULT_CPU_KV_BYTES = 4 * 2**30
"""Most that the KV cache takes on a CPU unless told: the box runs other things too."""


def resolve_device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device. Use --device cpu, or check the driver.")
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(requested)


def use_numa_node(node: int) -> None:
    """Have the engine run on the cores of a NUMA node, with one thread for each at most. Raises ConfigError if it cannot."""
    num_cores = bind_to_numa_node(node)
    if torch.get_num_threads() > num_cores:
        torch.set_num_threads(num_cores)


def set_num_threads(requested: int | None, root: Path = Path("/")) -> bool:
    """Have torch and our ops use so many threads; None: one for each core, with a CPU limit the nearest whole number of it.

    More than the limit keeps busy are all stopped for a part of each tenth of a second. With a limit of 1.5, two still give
    many clients more tokens than one, and first tokens sooner (benchmarks/cpu_limit.py). OMP_NUM_THREADS holds as it is.

    Returns:
        whether the number may change later: nobody asked for one.
    """
    if requested is not None:
        torch.set_num_threads(requested)
        return False
    if os.environ.get("OMP_NUM_THREADS"):
        return False
    limit = cpu_limit(root)
    if limit is None:
        return True
    nearest = max(1, math.floor(limit + 0.5))
    if torch.get_num_threads() > nearest:
        torch.set_num_threads(nearest)
        logger.info("%d CPU threads: cgroups allow %.3g CPUs (--num-threads sets another number)", nearest, limit)
    return True


def resolve_max_model_len(config: EngineConfig, model: ServedModel) -> int:
    """Return the longest sequence in tokens. Raises ConfigError when the flag exceeds what the model was made for."""
    if config.max_model_len is None:
        return model.default_context_len
    if config.max_model_len > model.max_context_len:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}; this model's positions end at "
            f"{model.max_context_len}. Lower the flag or leave it out."
        )
    return config.max_model_len


class KVCacheSize(NamedTuple):
    """KV blocks at the start, and how many live limits may raise that to."""

    num_blocks: int
    max_blocks: int


def resolve_kv_cache(
    config: EngineConfig,
    model: ServedModel,
    layout: KVLayout,
    *,
    kv_dtype: KVDType,
    device: torch.device,
    max_model_len: int,
    step_tokens: int,
    step_bytes: int,
    draft_bytes_per_token: int = 0,
) -> KVCacheSize:
    """Size the KV cache once the weights are loaded; never more than ``max_num_seqs`` full-length sequences need.

    Args:
        step_tokens: the most that a step computes.
        step_bytes: what one takes beside weights and cache, kept free on a GPU (see ``WarmUp.largest_step``).
        draft_bytes_per_token: what a token takes in the cache of a draft model, which lies in the same blocks.
    Raises:
        ConfigError: not one sequence of ``max_model_len`` tokens would fit, or the most is less than the start.
    """
    bytes_per_token = layout.num_tensors * model.kv_bytes_per_layer(kv_dtype) + draft_bytes_per_token
    bytes_per_block = config.block_size * bytes_per_token
    block_size = config.block_size
    num_needed = sum(most_blocks(window, max_model_len, step_tokens, block_size) for window in layout.windows)
    budget_bytes = config.kv_cache_memory_bytes or _default_kv_bytes(config, device, step_bytes)
    most_useful = config.max_num_seqs * -(-max_model_len // block_size) * len(layout.groups)
    num_blocks = min(budget_bytes // bytes_per_block, most_useful)
    if num_blocks < num_needed:
        num_blocks, budget_bytes = max(0, num_blocks), max(0, budget_bytes)
        raise ConfigError(
            f"the KV cache would get {budget_bytes} bytes, {num_blocks} blocks of {bytes_per_block} bytes; "
            f"one sequence of --max-model-len {max_model_len} needs {num_needed}. "
            f"Raise --kv-cache-memory-bytes to at least {num_needed * bytes_per_block} or lower --max-model-len."
        )
    max_bytes = config.kv_cache_memory_max_bytes
    if max_bytes is None:
        return KVCacheSize(num_blocks, num_blocks)
    if not can_return_memory(device):
        raise ConfigError(
            "--kv-cache-memory-max needs a KV cache that can grow: so far on a CPU under Linux. Leave it out."
        )
    if max_bytes < num_blocks * bytes_per_block:
        raise ConfigError(
            f"--kv-cache-memory-max is {max_bytes} bytes, and the KV cache starts with {num_blocks * bytes_per_block}. "
            "Raise it, or lower --kv-cache-memory-bytes."
        )
    return KVCacheSize(num_blocks, min(max_bytes // bytes_per_block, most_useful))


def _default_kv_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    if device.type == "cpu":
        return min(MAX_DEFAULT_CPU_KV_BYTES, available_memory_bytes() // 2)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    spare_bytes = int(total_bytes * (1.0 - config.gpu_memory_utilization))
    return free_bytes - spare_bytes - step_bytes


QUERY_LENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Longest queries of the small steps: a kernel may use another tile for each power of two, and one for above 64 tokens, or
above 64 for each expert."""

TIMED_TOKENS, TIMED_RUNS = 64, 2
"""Tokens of a timed part of a step, and how often it runs: the first run faults pages in and compiles kernels."""

ALL_FILTERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)


class WarmUp:
    """Runs steps whose sequences all lie in one scratch block, let go with this object."""

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        max_model_len: int,
        step_tokens: int,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._config = config
        self._max_model_len = max_model_len
        self._step_tokens = step_tokens
        self._max_tokens = min(step_tokens, config.max_num_seqs * max_model_len)
        self._num_rows = min(config.max_num_sampled, self._max_tokens)
        self._device = device
        self._kv = SoftPool(model.config, model.layout.num_tensors, 1, config.block_size, kv_dtype, device).tensors
        self._sampling = SamplingTensors(self._num_rows, device, model.backend)
        for row in range(self._num_rows):
            self._sampling.set_row(row, ALL_FILTERS)

    def largest_step(self) -> None:
        """As many tokens as the settings allow, and as many sampled ones, each with every filter.

        Raises:
            ConfigError: the device has no room for it.
        """
        config = self._config
        num_rows, num_tokens = self._num_rows, self._max_tokens
        try:
            self._run([num_tokens // num_rows + (index < num_tokens % num_rows) for index in range(num_rows)])
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of --max-num-batched-tokens {self._step_tokens} and --max-num-seqs "
                f"{config.max_num_seqs} does not fit beside the weights on {self._device} ({error}). Lower one of the two, "
                "or use a smaller model."
            ) from error

    def small_steps(self) -> None:
        """One sequence of each of QUERY_LENS, with no context before it and with the longest: a kernel may split that.

        With experts, also those that have as many tokens for each expert on the average.
        """
        moe = self._model.config.moe
        tokens_per_row = 1 if moe is None else -(-moe.num_experts // moe.experts_per_token)
        for query_len in sorted({*QUERY_LENS, *(tokens_per_row * num_rows for num_rows in QUERY_LENS)}):
            if query_len <= min(self._max_model_len, self._step_tokens):
                for num_computed_tokens in sorted({0, self._max_model_len - query_len}):
                    self._run([query_len], num_computed_tokens)

    @torch.inference_mode()
    def longest_pause_s(self, clock: Clock | None = None) -> float:
        """Estimate the longest time for which a step shows no progress (see ``Heartbeat``).

        It times one layer for a few tokens at the end of the longest context, and the head with the sampler for a few
        rows, and scales both to the largest step, or to the most layers that few tokens run through at once, with the
        head behind them. Many tokens take less time each than a few do, so the result is rather too long. A GPU's host
        runs ahead of it and then waits, so there the whole step is one pause.
        """
        model, clock = self._model, clock or MonotonicClock()
        num_tokens = min(TIMED_TOKENS, self._max_tokens, self._max_model_len)
        num_rows = min(num_tokens, self._num_rows)
        inputs = self._inputs([num_tokens], num_computed_tokens=self._max_model_len - num_tokens)
        rows = np.arange(num_rows)
        for caches in self._kv:
            for cache in caches:
                cache.zero_()
        layer, head = model.timed_parts(inputs, self._kv, num_rows)
        layer_s = self._least_s(layer, clock)
        head_s = self._least_s(lambda: self._sampling.sample(head(), rows, rows), clock)
        largest_s, head_s = layer_s * self._max_tokens / num_tokens, head_s * self._num_rows / num_rows
        if self._device.type == "cuda":
            return len(model.config.sliding_windows) * largest_s + head_s
        at_once = model.layers_at_once
        return max(largest_s, head_s if at_once == 1 else at_once * layer_s + head_s)

    def _least_s(self, part: Callable[[], object], clock: Clock) -> float:
        """Return the seconds of the fastest run."""
        times_s = []
        for _ in range(TIMED_RUNS):
            start_s = clock.now()
            part()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times_s.append(clock.now() - start_s)
        return min(times_s)

    def _run(self, query_lens: list[int], num_computed_tokens: int = 0) -> None:
        rows = np.arange(len(query_lens))
        logits = self._model.forward(self._inputs(query_lens, num_computed_tokens), self._kv)
        self._sampling.sample(logits, rows, rows)

    def _inputs(self, query_lens: list[int], num_computed_tokens: int = 0) -> StepInputs:
        """Inputs of sequences that have ``num_computed_tokens`` each in the cache before this step."""
        num_seqs, block_size, device = len(query_lens), self._config.block_size, self._device
        entries = np.array((range(num_seqs), [num_computed_tokens] * num_seqs, query_lens, [1] * num_seqs), np.int64)
        num_blocks = -(-(max(query_lens) + num_computed_tokens) // block_size)
        return step_inputs(
            entries,
            0,
            torch.zeros(sum(query_lens), dtype=torch.int64),
            torch.zeros(len(self._model.layout.groups), num_seqs, num_blocks, dtype=torch.int32, device=device),
            torch.zeros(num_seqs, dtype=torch.int64, device=device),
            block_size,
            self._model.backend,
        )


def device_name(device: torch.device, root: Path = Path("/")) -> str:
    """Return what step times depend on: the GPU's name, or the CPU's and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = root / "proc/cpuinfo"
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    name = " ".join(found[1].split()) if found else platform.machine()
    return f"{name} x{torch.get_num_threads()}"


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Most memory of a CUDA device that torch's allocator takes for ``step`` beyond what it holds already."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    step()
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()  # what it left is free to whoever asks the device next
    return peak
