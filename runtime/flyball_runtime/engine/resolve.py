"""Facts found at start-up: which device and dtype, how long a sequence may be, how many KV blocks fit."""

import logging
from typing import NamedTuple

import torch

from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.kv_layout import KVLayout
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.core.model_config import DType, ModelConfig
from flyball_runtime.engine.physical_pool import can_return_memory

logger = logging.getLogger(__name__)

MAX_DEFAULT_CPU_KV_BYTES = 4 * 2**30
"""Most that the KV cache takes on a CPU unless told: the box runs other things too."""


def resolve_device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device. Use --device cpu, or check the driver.")
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(requested)


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest sequence in tokens. Raises ConfigError when the flag exceeds what the model was made for."""
    if config.max_model_len is None:
        return model.max_context_len
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
    model: ModelConfig,
    layout: KVLayout,
    *,
    dtype: DType,
    device: torch.device,
    max_model_len: int,
    step_bytes: int,
) -> KVCacheSize:
    """Size the KV cache once the weights are loaded; never more than ``max_num_seqs`` full-length sequences need.

    Args:
        step_bytes: what a step takes beside weights and cache, kept free on a GPU (see ``warm_up``).
    Raises:
        ConfigError: not one sequence of ``max_model_len`` tokens would fit, or the most is less than the start.
    """
    bytes_per_block = config.block_size * layout.num_tensors * model.kv_bytes_per_layer(dtype)
    num_groups = len(layout.groups)
    blocks_per_sequence = -(-max_model_len // config.block_size) * num_groups
    budget_bytes = config.kv_cache_memory_bytes or _default_kv_bytes(config, device, step_bytes)
    most_useful = config.max_num_seqs * blocks_per_sequence
    num_blocks = min(budget_bytes // bytes_per_block, most_useful)
    if num_blocks < blocks_per_sequence:
        num_blocks, budget_bytes = max(0, num_blocks), max(0, budget_bytes)
        raise ConfigError(
            f"the KV cache would get {budget_bytes} bytes, {num_blocks} blocks of {bytes_per_block} bytes: "
            f"room for {num_blocks // num_groups * config.block_size} tokens, but --max-model-len is {max_model_len}. "
            f"Raise --kv-cache-memory-bytes to at least {blocks_per_sequence * bytes_per_block} or lower --max-model-len."
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
