"""Rotary position embedding. CUDA runs the torch reference."""

import torch
from torch import Tensor

from flyball_kernels.backend import backend_for
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.rope import reference


def rope(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` elements of each head; the others pass through.

    Half-split layout (GPT-NeoX, HF Llama): element ``i`` pairs with ``i + rotary_dim / 2``. Computed in fp32.

    Args:
        positions: ``[num_tokens]`` int64, each below ``max_pos``.
        query, key: ``[num_tokens, num_heads, head_dim]``, each with its own number of heads.
        cos_sin_cache: ``[max_pos, rotary_dim]``, cosines in the first half of a row, sines in the second.
    Returns:
        New contiguous ``(query, key)``.
    Raises:
        ValueError: a shape or dtype is not as above, or rotary_dim is odd or larger than head_dim.
        IndexError: a position is outside the table.
    """
    check_shape("positions", positions, None)
    check_dtype("positions", positions, torch.int64)
    check_shape("query", query, positions.shape[0], None, None)
    check_shape("key", key, positions.shape[0], None, query.shape[2])
    check_dtype("key", key, query.dtype)
    check_cos_sin_cache(cos_sin_cache, query.shape[2])
    if backend_for(query) == "cpp":
        return torch.ops.flyball.rope(positions, query, key, cos_sin_cache)
    return reference.rope(positions, query, key, cos_sin_cache)


def check_cos_sin_cache(cos_sin_cache: Tensor, head_dim: int) -> None:
    """Raise ValueError unless the table fits heads of this size."""
    check_shape("cos_sin_cache", cos_sin_cache, None, None)
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"cos_sin_cache has rotary_dim {rotary_dim}; it must be even and at most head_dim {head_dim}.")
