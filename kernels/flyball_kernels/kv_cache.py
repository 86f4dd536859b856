"""What lies in the blocks of a KV cache: vectors of the model's dtype, or of 8 bits with a scale for each token and head.

A cache of the model's dtype is ``[num_blocks, block_size, num_kv_heads, head_dim]``. One of 8 bits (int8, or float8_e4m3fn) is
``[num_blocks, block_size, num_kv_heads, head_dim + SCALE_BYTES]``, which counts bytes: a block has the numbers of its
vectors first, ``[block_size, num_kv_heads, head_dim]``, and then their fp32 scales, ``[num_kv_heads, block_size]``. So vectors
are aligned as without scales, the scales of a head lie together, and a block that is copied as bytes is whole.
"""

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.linear.reference import round_rows, round_to_float8

SCALE_BYTES = 4

ROUNDINGS = {torch.int8: round_rows, torch.float8_e4m3fn: round_to_float8}
"""How vectors become numbers of 8 bits and a scale, by dtype of the cache."""


def is_rounded(cache: Tensor) -> bool:
    """Whether the vectors have 8 bits and scales."""
    return cache.dtype in ROUNDINGS


def head_dim_of(cache: Tensor) -> int:
    """Return the elements of a vector in the cache."""
    return cache.shape[3] - (SCALE_BYTES if is_rounded(cache) else 0)


def check_rounded(cache: Tensor, backend: Backend) -> None:
    """Raise ValueError if the cache has 8 bits and no room for scales, its scales lie where a GPU cannot read them, or it is
    for C++ and not int8."""
    if not is_rounded(cache):
        return
    if head_dim_of(cache) < 1:
        raise ValueError(
            f"a KV cache of {cache.dtype} has vectors of {cache.shape[3]} bytes; they must be {SCALE_BYTES} more than head_dim."
        )
    if backend.name == "triton" and cache[:1].numel() % SCALE_BYTES:
        raise ValueError(
            f"a KV cache of {cache.dtype} for triton has blocks of {cache[:1].numel()} bytes; they must be a multiple of "
            f"{SCALE_BYTES}, so that their scales are aligned. Choose another block size."
        )
    if backend.name == "cpp" and cache.dtype != torch.int8:
        raise ValueError(f"a KV cache of {cache.dtype} is for the triton and torch backends; this is cpp. Use int8.")


def write(cache: Tensor, slots: Tensor, vectors: Tensor) -> None:
    """Store ``[num_tokens, num_kv_heads, head_dim]`` in slots of the cache; one of 8 bits: rounded as in ``ROUNDINGS``."""
    block_size = cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    if not is_rounded(cache):
        cache[blocks, offsets] = vectors
        return
    values, scales = _parts(cache)
    rounded = ROUNDINGS[cache.dtype](vectors.flatten(0, 1))
    values[blocks, offsets] = rounded.values.view(torch.int8).view(vectors.shape)
    scales[blocks, :, offsets] = rounded.scales.view(*vectors.shape[:2], 1).view(torch.int8)


def read(cache: Tensor) -> Tensor:
    """Return all vectors, ``[num_blocks, block_size, num_kv_heads, head_dim]`` fp32."""
    if not is_rounded(cache):
        return cache.float()
    values, scale_bytes = _parts(cache)
    scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values.view(cache.dtype).float() * scales.transpose(1, 2)


def rounded(cache: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return a cache of the model's dtype rounded to 8 bits."""
    *sizes, head_dim = cache.shape
    out = torch.empty(*sizes, head_dim + SCALE_BYTES, dtype=torch.int8, device=cache.device).view(dtype)
    write(out, torch.arange(sizes[0] * sizes[1], device=cache.device), cache.flatten(0, 1))
    return out


def as_numbers(cache: Tensor) -> Tensor:
    """Return the cache as Triton kernels take it: e4m3 as its bits, for which sm_80 has no type."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def as_words(cache: Tensor) -> Tensor | None:
    """Return the memory of a cache of 8 bits as fp32, which its scales are; None for another cache."""
    return cache.view(torch.int8).view(-1).view(torch.float32) if is_rounded(cache) else None


def rounded_types(numbers: str) -> dict[str, str]:
    """Return the types of a kernel's parameters for a cache of int8 or fp8 numbers, as Triton's compiler takes them."""
    of_cache = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), {"int8": "*i8", "fp8": "*u8"}[numbers])
    return of_cache | dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32")


def _parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of a cache of 8 bits: its numbers, and ``[num_blocks, num_kv_heads, block_size, 4]`` of scales."""
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    head_dim = head_dim_of(cache)
    values, scales = (
        cache.view(torch.int8)
        .view(num_blocks, -1)
        .split([block_size * num_kv_heads * head_dim, block_size * num_kv_heads * SCALE_BYTES], dim=1)
    )
    return (
        values.view(num_blocks, block_size, num_kv_heads, head_dim),
        scales.view(num_blocks, num_kv_heads, block_size, SCALE_BYTES),
    )
