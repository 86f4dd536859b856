"""What lies in the blocks of a KV cache: vectors of the model's dtype, or int8 with a scale for each token and head.

A cache of the model's dtype is ``[num_blocks, block_size, num_kv_heads, head_dim]``. One of int8 is
``[num_blocks, block_size, num_kv_heads, head_dim + SCALE_BYTES]``, which counts bytes: a block has the whole numbers of its
vectors first, ``[block_size, num_kv_heads, head_dim]``, and then their fp32 scales, ``[num_kv_heads, block_size]``. So vectors
are aligned as without scales, the scales of a head lie together, and a block that is copied as bytes is whole.
"""

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.linear.reference import round_rows

SCALE_BYTES = 4


def head_dim_of(cache: Tensor) -> int:
    """Return the elements of a vector in the cache."""
    return cache.shape[3] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def check_int8(cache: Tensor, backend: Backend) -> None:
    """Raise ValueError if the cache is int8 and has no room for scales, or its scales lie where a GPU cannot read them."""
    if cache.dtype != torch.int8:
        return
    if head_dim_of(cache) < 1:
        raise ValueError(
            f"an int8 KV cache has vectors of {cache.shape[3]} bytes; they must be {SCALE_BYTES} more than head_dim."
        )
    if backend.name == "triton" and cache[:1].numel() % SCALE_BYTES:
        raise ValueError(
            f"an int8 KV cache for triton has blocks of {cache[:1].numel()} bytes; they must be a multiple of {SCALE_BYTES}, "
            "so that their scales are aligned. Choose another block size."
        )


def write(cache: Tensor, slots: Tensor, vectors: Tensor) -> None:
    """Store ``[num_tokens, num_kv_heads, head_dim]`` in slots of the cache; int8: rounded as by ``round_rows``."""
    block_size = cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    if cache.dtype != torch.int8:
        cache[blocks, offsets] = vectors
        return
    values, scales = _parts(cache)
    rounded = round_rows(vectors.flatten(0, 1))
    values[blocks, offsets] = rounded.values.view(vectors.shape)
    scales[blocks, :, offsets] = rounded.scales.view(*vectors.shape[:2], 1).view(torch.int8)


def read(cache: Tensor) -> Tensor:
    """Return all vectors, ``[num_blocks, block_size, num_kv_heads, head_dim]`` fp32."""
    if cache.dtype != torch.int8:
        return cache.float()
    values, scale_bytes = _parts(cache)
    scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values.float() * scales.transpose(1, 2)


def rounded(cache: Tensor) -> Tensor:
    """Return a cache of the model's dtype rounded to int8."""
    *sizes, head_dim = cache.shape
    out = torch.empty(*sizes, head_dim + SCALE_BYTES, dtype=torch.int8, device=cache.device)
    write(out, torch.arange(sizes[0] * sizes[1], device=cache.device), cache.flatten(0, 1))
    return out


def as_words(cache: Tensor) -> Tensor | None:
    """Return the memory of an int8 cache as fp32, which its scales are; None for another cache."""
    return cache.view(-1).view(torch.float32) if cache.dtype == torch.int8 else None


def _parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of an int8 cache: its whole numbers, and ``[num_blocks, num_kv_heads, block_size, 4]`` bytes of scales."""
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    head_dim = head_dim_of(cache)
    values, scales = cache.view(num_blocks, -1).split(
        [block_size * num_kv_heads * head_dim, block_size * num_kv_heads * SCALE_BYTES], dim=1
    )
    return (
        values.view(num_blocks, block_size, num_kv_heads, head_dim),
        scales.view(num_blocks, num_kv_heads, block_size, SCALE_BYTES),
    )
