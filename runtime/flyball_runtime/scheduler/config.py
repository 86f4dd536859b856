"""Settings of the scheduler, fixed at start-up."""

import math
from dataclasses import dataclass

from flyball_protocol import Envelope, Limits
from flyball_runtime.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The upper bounds that live limits move under, and what cannot change while serving.

    EngineConfig checks the ranges, where users set them. What depends on the model's length is checked here.

    Attributes:
        max_model_len: longest sequence (prompt and output) in tokens.
        max_num_seqs: most sequences that may run at once; rows of the engine's batch tensors.
        max_num_batched_tokens: most tokens in one step.
        enable_chunked_prefill: False computes each prompt whole, in one step.
        num_start_blocks: KV blocks at the start; None takes all that there may be.
        policy: ``fcfs`` or ``priority``; see policies.py.
        fair_share: clients take turns within a priority; see waiting_queue.py.

    Raises:
        ConfigError: without chunked prefill, the longest prompt does not fit into a step.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    num_start_blocks: int | None = None
    policy: str = "fcfs"
    fair_share: bool = True

    def __post_init__(self) -> None:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below the model length {self.max_model_len}, "
                "and without chunked prefill a whole prompt must fit into one step. "
                "Raise it, lower --max-model-len, or leave --enable-chunked-prefill on."
            )

    def start_limits(self, num_kv_blocks: int) -> Limits:
        """The limits in force until others are posted: everything, but of the KV cache what was allocated at the start."""
        num_start_blocks = num_kv_blocks if self.num_start_blocks is None else self.num_start_blocks
        return Limits(
            max_num_seqs=self.max_num_seqs,
            kv_cache_fraction=num_start_blocks / num_kv_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def envelope(self, num_kv_blocks: int, block_size: int, num_groups: int = 1) -> Envelope:
        """What live limits may be with this many KV blocks, of which each group of layers needs its own for a token.

        The smallest KV fraction and token budget are the least with which any one sequence can always be computed to
        its end, so no limits inside the envelope can stop progress.

        Raises:
            ConfigError: one sequence of ``max_model_len`` tokens does not fit into the KV cache.
        """
        num_needed = -(-self.max_model_len // block_size) * num_groups
        if num_needed > num_kv_blocks:
            num_tokens = num_kv_blocks // num_groups * block_size
            raise ConfigError(
                f"the KV cache has {num_kv_blocks} blocks of {block_size} tokens, {num_tokens} tokens; "
                f"one sequence of --max-model-len {self.max_model_len} needs {num_needed} blocks. "
                "Lower --max-model-len, or raise --kv-cache-memory-bytes or --gpu-memory-utilization."
            )
        return Envelope(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            min_num_batched_tokens=1 if self.enable_chunked_prefill else self.max_model_len,
            num_kv_blocks=num_kv_blocks,
            min_kv_cache_fraction=_round_up(num_needed / num_kv_blocks),
            block_size=block_size,
            max_model_len=self.max_model_len,
        )


def _round_up(fraction: float) -> float:
    """To 4 decimals, so that the bound can be printed, typed and posted."""
    return min(1.0, math.ceil(fraction * 10_000) / 10_000)
