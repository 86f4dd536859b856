"""The tensors behind the KV blocks: allocated once, addressed by block id."""

import torch
from torch import Tensor

from flyball_runtime.core.model_config import ModelConfig


def allocate_kv_tensors(
    config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return K and V of each layer, ``[num_blocks, block_size, num_kv_heads, head_dim]`` each, uninitialised.

    On a CPU the pages are mapped by the kernel on first touch, so blocks never used cost no memory.
    """
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(config.num_hidden_layers)
    ]
