"""Steps on made-up tokens before the first request.

On a GPU the largest one shows how much memory a step takes beside weights and KV cache, which no formula knows as well,
and small ones have the kernels compiled, so that no request waits for a compiler.
"""

from collections.abc import Callable

import numpy as np
import torch

from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.engine.kv_tensors import allocate_kv_tensors
from flyball_runtime.model.inputs import StepInputs
from flyball_runtime.model.sampler import SamplingTensors
from flyball_runtime.model.transformer import CausalLM

QUERY_LENS = (1, 2, 4, 8, 16, 32, 64)
"""Longest queries of the small steps: a kernel may use another tile for each power of two, up to 64 tokens."""

ALL_FILTERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)


class WarmUp:
    """Runs steps whose sequences all lie in one scratch block, let go with this object."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._config = config
        self._max_model_len = max_model_len
        self._device = device
        self._kv = allocate_kv_tensors(
            model.config, num_blocks=1, block_size=config.block_size, dtype=dtype, device=device
        )
        self._sampling = SamplingTensors(config.max_num_seqs, device)
        for row in range(config.max_num_seqs):
            self._sampling.set_row(row, ALL_FILTERS)

    def largest_step(self) -> None:
        """As many tokens and sequences as the settings allow, each sequence sampled with every filter.

        Raises:
            ConfigError: the device has no room for it.
        """
        config = self._config
        num_seqs = config.max_num_seqs
        num_tokens = min(config.max_num_batched_tokens, num_seqs * self._max_model_len)
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

    def _run(self, query_lens: list[int]) -> None:
        rows = np.arange(len(query_lens))
        logits = self._model.forward(self._inputs(query_lens), self._kv)
        self._sampling.sample(logits, rows, rows)

    def _inputs(self, query_lens: list[int]) -> StepInputs:
        block_size, device = self._config.block_size, self._device
        positions = torch.cat([torch.arange(query_len) for query_len in query_lens])
        lens = torch.tensor(query_lens, dtype=torch.int32)
        cu_query_lens = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)))
        longest = max(query_lens)
        return StepInputs(
            token_ids=torch.zeros_like(positions, device=device),
            positions=positions.to(device),
            slot_mapping=(positions % block_size).to(device),
            block_tables=torch.zeros(len(query_lens), -(-longest // block_size), dtype=torch.int32, device=device),
            cu_query_lens=cu_query_lens.to(device),
            context_lens=lens.to(device),
            max_query_len=longest,
            max_context_len=longest,
            logits_indices=(cu_query_lens[1:].long() - 1).to(device),
        )


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Most memory of a CUDA device that torch's allocator takes for ``step`` beyond what it holds already."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    step()
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()  # what it left is free to whoever asks the device next
    return peak
