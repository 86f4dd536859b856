"""What lies in the blocks of a KV cache: vectors of the model's dtype, or of 8 bits with a scale for each token and head.

A cache of the model's dtype is ``[num_blocks, block_size, num_kv_heads, head_dim]``. One of 8 bits (int8, or float8_e4m3fn) is
``[num_blocks, block_size, num_kv_heads, head_dim + SCALE_BYTES]``, which counts bytes: a block has the numbers of its
vectors first, and then their fp32 scales, ``[num_kv_heads, block_size]``. So vectors are aligned as without scales, the scales
of a head lie together, and a block that is copied as bytes is whole.

In which order a block has its numbers depends on the backend (see ``Order``). The C++ ops have those of a head together, as
they read them: a head's keys are ``[head_dim, block_size]``, so that a vector register takes one feature of as many tokens;
in bf16 ``[head_dim / 2, block_size, 2]``, because the bf16 dot product takes pairs of features (if head_dim is even).
"""

from typing import Literal

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.linear.reference import round_rows, round_to_float8

SCALE_BYTES = 4

Order = Literal["plain", "keys", "values"]
"""Of a block's numbers. ``plain`` is ``[block_size, num_kv_heads, head_dim]``, the others are the C++ ops' keys and values."""

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


def orders(backend: Backend) -> tuple[Order, Order]:
    """Return the order of a backend's keys, and of its values."""
    return ("keys", "values") if backend.name == "cpp" else ("plain", "plain")


def write(cache: Tensor, slots: Tensor, vectors: Tensor, order: Order = "plain") -> None:
    """Store ``[num_tokens, num_kv_heads, head_dim]`` in slots of the cache; one of 8 bits: rounded as in ``ROUNDINGS``."""
    block_size = cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    numbers, scales = _parts(cache, order)
    if scales is None:
        numbers[blocks, offsets] = vectors.unflatten(-1, numbers.shape[3:])
        return
    rounded = ROUNDINGS[cache.dtype](vectors.flatten(0, 1))
    numbers[blocks, offsets] = rounded.values.view(torch.int8).view(len(slots), *numbers.shape[2:])
    scales[blocks, :, offsets] = rounded.scales.view(*vectors.shape[:2], 1).view(torch.int8)


def reordered(cache: Tensor, order: Order, to: Order) -> Tensor:
    """Return a copy whose numbers are in another order."""
    out = cache.clone()
    (numbers, _), (moved, _) = _parts(cache, order), _parts(out, to)
    moved.copy_(numbers.flatten(3).unflatten(3, moved.shape[3:]))
    return out


def read(cache: Tensor) -> Tensor:
    """Return all vectors of a cache in plain order, ``[num_blocks, block_size, num_kv_heads, head_dim]`` fp32."""
    numbers, scales = _parts(cache, "plain")
    if scales is None:
        return numbers.float()
    units = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return numbers.view(cache.dtype).float() * units.transpose(1, 2)


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


def _parts(cache: Tensor, order: Order) -> tuple[Tensor, Tensor | None]:
    """Return views of a cache: its numbers, ``[num_blocks, block_size, num_kv_heads, ...]`` with one or two dimensions for
    the features, and the bytes of its scales, ``[num_blocks, num_kv_heads, block_size, 4]``, if it has some.
    """
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    head_dim, scales = head_dim_of(cache), None
    numbers = cache.view(num_blocks, -1)
    if is_rounded(cache):
        sizes = [block_size * num_kv_heads * head_dim, block_size * num_kv_heads * SCALE_BYTES]
        numbers, scales = numbers.view(torch.int8).split(sizes, dim=1)
        scales = scales.view(num_blocks, num_kv_heads, block_size, SCALE_BYTES)
    if order == "plain":
        return numbers.view(num_blocks, block_size, num_kv_heads, head_dim), scales
    if order == "values":
        return numbers.view(num_blocks, num_kv_heads, block_size, head_dim).transpose(1, 2), scales
    if cache.dtype == torch.bfloat16 and head_dim % 2 == 0:
        return numbers.view(num_blocks, num_kv_heads, head_dim // 2, block_size, 2).permute(0, 3, 1, 2, 4), scales
    return numbers.view(num_blocks, num_kv_heads, head_dim, block_size).permute(0, 3, 1, 2), scales
