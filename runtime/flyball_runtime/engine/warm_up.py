"""Steps on made-up tokens before the first request.

On a GPU the largest one shows how much memory a step takes beside weights and KV cache, which no formula knows as well,
and small ones have the kernels compiled, so that no request waits for a compiler. Parts of a step, timed, show on any
device how long the largest step may go without a sign of progress.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from flyball_runtime.core.clock import Clock, MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.engine.physical_pool import SoftPool
from flyball_runtime.model.inputs import StepInputs
from flyball_runtime.model.sampler import SamplingTensors
from flyball_runtime.model.transformer import CausalLM

QUERY_LENS = (1, 2, 4, 8, 16, 32, 64)
"""Longest queries of the small steps: a kernel may use another tile for each power of two, up to 64 tokens."""

TIMED_TOKENS, TIMED_RUNS = 32, 2
"""Tokens of a timed part of a step, and how often it runs: the first run faults pages in and compiles kernels."""

ALL_FILTERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)


class WarmUp:
    """Runs steps whose sequences all lie in one scratch block, let go with this object."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._config = config
        self._max_model_len = max_model_len
        self._max_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        self._device = device
        self._kv = SoftPool(model.config, model.layout.num_tensors, 1, config.block_size, dtype, device).tensors
        self._sampling = SamplingTensors(config.max_num_seqs, device, model.backend)
        for row in range(config.max_num_seqs):
            self._sampling.set_row(row, ALL_FILTERS)

    def largest_step(self) -> None:
        """As many tokens and sequences as the settings allow, each sequence sampled with every filter.

        Raises:
            ConfigError: the device has no room for it.
        """
        config = self._config
        num_seqs, num_tokens = config.max_num_seqs, self._max_tokens
        try:
            self._run([num_tokens // num_seqs + (index < num_tokens % num_seqs) for index in range(num_seqs)])
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of --max-num-batched-tokens {config.max_num_batched_tokens} and --max-num-seqs {num_seqs} does "
                f"not fit beside the weights on {self._device} ({error}). Lower one of the two, or use a smaller model."
            ) from error

    def small_steps(self) -> None:
        """One sequence of each of QUERY_LENS."""
        for query_len in QUERY_LENS:
            if query_len <= min(self._max_model_len, self._config.max_num_batched_tokens):
                self._run([query_len])

    @torch.inference_mode()
    def longest_pause_s(self, clock: Clock | None = None) -> float:
        """Estimate the longest time for which a step shows no progress (see ``Heartbeat``).

        It times one layer for a few tokens at the end of the longest context, and the head with the sampler for a few
        rows, and scales both to the largest step. Many tokens take less time each than a few do, so the result is rather
        too long. A GPU's host runs ahead of it and then waits, so there the whole step is one pause.
        """
        model, clock = self._model, clock or MonotonicClock()
        num_tokens = min(TIMED_TOKENS, self._max_tokens, self._max_model_len)
        num_rows = min(num_tokens, self._config.max_num_seqs)
        inputs = self._inputs([num_tokens], num_computed_tokens=self._max_model_len - num_tokens)
        x = model.embedding[inputs.positions % model.config.vocab_size]
        index, rows = _longest_reach(model.config.sliding_windows), np.arange(num_rows)
        layer = model.layers[index]
        kv = self._kv[model.layout.places[index][1]]
        for cache in kv:
            cache.zero_()
        layer_s = self._least_s(lambda: layer(x, None, inputs, model.cos_sin, kv), clock)
        head_s = self._least_s(lambda: self._sampling.sample(model.lm_head(x[:num_rows]).float(), rows, rows), clock)
        layer_s *= self._max_tokens / num_tokens
        head_s *= self._config.max_num_seqs / num_rows
        if self._device.type == "cuda":
            return len(model.layers) * layer_s + head_s
        return max(layer_s, head_s)

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

    def _run(self, query_lens: list[int]) -> None:
        rows = np.arange(len(query_lens))
        logits = self._model.forward(self._inputs(query_lens), self._kv)
        self._sampling.sample(logits, rows, rows)

    def _inputs(self, query_lens: list[int], num_computed_tokens: int = 0) -> StepInputs:
        """Inputs of sequences that have ``num_computed_tokens`` each in the cache before this step."""
        block_size, device = self._config.block_size, self._device
        positions = torch.cat([torch.arange(query_len) for query_len in query_lens]) + num_computed_tokens
        lens = torch.tensor(query_lens, dtype=torch.int32)
        cu_query_lens = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)))
        longest_context = max(query_lens) + num_computed_tokens
        num_groups = len(self._model.layout.groups)
        block_table = torch.zeros(len(query_lens), -(-longest_context // block_size), dtype=torch.int32, device=device)
        return StepInputs(
            token_ids=torch.zeros_like(positions, device=device),
            positions=positions.to(device),
            slot_mappings=((positions % block_size).to(device),) * num_groups,
            block_tables=(block_table,) * num_groups,
            cu_query_lens=cu_query_lens.to(device),
            context_lens=(lens + num_computed_tokens).to(device),
            max_query_len=max(query_lens),
            max_context_len=longest_context,
            logits_indices=(cu_query_lens[1:].long() - 1).to(device),
        )


def _longest_reach(sliding_windows: Sequence[int | None]) -> int:
    """Return the first of the layers that attend to the most tokens."""
    reaches = [math.inf if window is None else window for window in sliding_windows]
    return reaches.index(max(reaches))


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Most memory of a CUDA device that torch's allocator takes for ``step`` beyond what it holds already."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    step()
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()  # what it left is free to whoever asks the device next
    return peak
