"""Triton kernel for rope_kv_write: one program per (token, some of its heads).

A head is loaded in three pieces: the two halves that rotate into each other, and the rest. So no value has to change its
place within a tile, and query, key and value heads take the same path up to the store.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels import kv_cache
from flyball_kernels.rounding import scales_and_units, to_e4m3, whole_numbers
from flyball_kernels.spec import Spec

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
ROUNDED_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fusion, vectors are rounded to 8 bits as the reference does it."""


@triton.jit
def _normed(x, scale, q_norm_ptr, k_norm_ptr, is_query, is_key, dims, mask, offset):
    """Return ``x`` with its query and key heads normed and rounded, where there is a weight."""
    if q_norm_ptr is not None:
        weight = offset + tl.load(q_norm_ptr + dims, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(is_query, (x * scale * weight[None, :]).to(q_norm_ptr.dtype.element_ty).to(tl.float32), x)
    if k_norm_ptr is not None:
        weight = offset + tl.load(k_norm_ptr + dims, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(is_key, (x * scale * weight[None, :]).to(k_norm_ptr.dtype.element_ty).to(tl.float32), x)
    return x


@triton.jit
def _store(x, units, query_row, key_row, value_row, is_query, is_key, is_value, dims, mask):
    """Store each head of ``x`` where its kind goes; keys and values as so many ``units``, or as they are without."""
    x, dims, mask = x.to(query_row.dtype.element_ty), dims[None, :], mask[None, :]
    tl.store(query_row + dims, x, mask=mask & is_query)
    if units is not None:
        x = x.to(tl.float32)
        x = to_e4m3(x, units) if key_row.dtype.element_ty == tl.uint8 else whole_numbers(x, units)
    tl.store(key_row + dims, x, mask=mask & is_key)
    tl.store(value_row + dims, x, mask=mask & is_value)


@triton.jit
def _largest(x, query_row):
    """Return the largest magnitude in each head, as it is stored; infinite if one is not finite."""
    x = x.to(query_row.dtype.element_ty).to(tl.float32)
    magnitudes = tl.where(x < 0, -x, x)  # not abs, which Triton 3.6 cannot compile here in fp32
    return tl.max(tl.where(magnitudes < float("inf"), magnitudes, float("inf")), axis=1)[:, None]


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr,  # [num_tokens, (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], rows qkv_stride apart
    positions_ptr,  # [num_tokens] int64
    cos_sin_ptr,  # [max_pos, ROTARY_DIM]
    k_cache_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM], or int8 or e4m3 (uint8), blocks with scales behind their vectors
    v_cache_ptr,
    k_scales_ptr,  # with 8 bits, the same memory as fp32; or None
    v_scales_ptr,
    slot_mapping_ptr,  # [num_tokens] int64
    q_norm_ptr,  # [HEAD_DIM], or None
    k_norm_ptr,
    query_ptr,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    qkv_stride,
    eps,
    norm_offset,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    BLOCK_HALF: tl.constexpr,  # ROTARY_DIM / 2 rounded up to a power of two
    BLOCK_REST: tl.constexpr,  # likewise HEAD_DIM - ROTARY_DIM
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_head = heads < NUM_Q_HEADS + 2 * NUM_KV_HEADS
    is_query = heads < NUM_Q_HEADS
    is_value = (heads >= NUM_Q_HEADS + NUM_KV_HEADS) & is_head
    is_key = (heads >= NUM_Q_HEADS) & (heads < NUM_Q_HEADS + NUM_KV_HEADS)
    slot = tl.load(slot_mapping_ptr + token)
    cos_sin_row = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM
    qkv_row = qkv_ptr + token * qkv_stride + heads * HEAD_DIM
    query_row = query_ptr + (token * NUM_Q_HEADS + heads) * HEAD_DIM
    key_head, value_head = heads - NUM_Q_HEADS, heads - NUM_Q_HEADS - NUM_KV_HEADS
    SCALE_BYTES: tl.constexpr = 0 if k_scales_ptr is None else 4
    scales_before = slot // BLOCK_SIZE * (BLOCK_SIZE * NUM_KV_HEADS * SCALE_BYTES)  # those of earlier blocks
    key_row = k_cache_ptr + (slot * NUM_KV_HEADS + key_head) * HEAD_DIM + scales_before
    value_row = v_cache_ptr + (slot * NUM_KV_HEADS + value_head) * HEAD_DIM + scales_before

    dims = tl.arange(0, BLOCK_HALF)
    mask = dims < HALF
    rest_dims = ROTARY_DIM + tl.arange(0, BLOCK_REST)
    rest_mask = rest_dims < HEAD_DIM
    first = tl.load(qkv_row + dims[None, :], mask=is_head & mask[None, :], other=0.0).to(tl.float32)
    second = tl.load(qkv_row + HALF + dims[None, :], mask=is_head & mask[None, :], other=0.0).to(tl.float32)
    if ROTARY_DIM < HEAD_DIM:
        rest = tl.load(qkv_row + rest_dims[None, :], mask=is_head & rest_mask[None, :], other=0.0).to(tl.float32)

    if q_norm_ptr is not None or k_norm_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if ROTARY_DIM < HEAD_DIM:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _normed(first, scale, q_norm_ptr, k_norm_ptr, is_query, is_key, dims, mask, norm_offset)
        second = _normed(second, scale, q_norm_ptr, k_norm_ptr, is_query, is_key, HALF + dims, mask, norm_offset)
        if ROTARY_DIM < HEAD_DIM:
            rest = _normed(rest, scale, q_norm_ptr, k_norm_ptr, is_query, is_key, rest_dims, rest_mask, norm_offset)

    cos = tl.load(cos_sin_row + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_sin_row + HALF + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    rotated = tl.where(is_value, first, first * cos - second * sin)
    second = tl.where(is_value, second, second * cos + first * sin)
    units = None
    if k_scales_ptr is not None:
        most = tl.maximum(_largest(rotated, query_row), _largest(second, query_row))
        if ROTARY_DIM < HEAD_DIM:
            most = tl.maximum(most, _largest(rest, query_row))
        LARGEST: tl.constexpr = 448.0 if k_cache_ptr.dtype.element_ty == tl.uint8 else 127.0
        scales, units = scales_and_units(most, most < float("inf"), LARGEST)
        # in fp32: behind the vectors of its block, by head and by place
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        first_scale = ((block + 1) * (BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM) + scales_before) // 4
        tl.store(k_scales_ptr + first_scale + key_head * BLOCK_SIZE + place, scales, mask=is_key)
        tl.store(v_scales_ptr + first_scale + value_head * BLOCK_SIZE + place, scales, mask=is_value)
    _store(rotated, units, query_row, key_row, value_row, is_query, is_key, is_value, dims, mask)
    _store(second, units, query_row, key_row, value_row, is_query, is_key, is_value, HALF + dims, mask)
    if ROTARY_DIM < HEAD_DIM:
        _store(rest, units, query_row, key_row, value_row, is_query, is_key, is_value, rest_dims, rest_mask)


def rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    norm_offset: float = 0.0,
) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[2], kv_cache.head_dim_of(k_cache)
    num_tokens, width = qkv.shape
    num_q_heads = width // head_dim - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    sizes = _sizes(num_q_heads, num_kv_heads, head_dim, cos_sin_cache.shape[1])
    rope_kv_write_kernel[(num_tokens, triton.cdiv(num_q_heads + 2 * num_kv_heads, sizes["HEADS"]))](
        qkv,
        positions.contiguous(),
        cos_sin_cache.contiguous(),
        kv_cache.as_numbers(k_cache),
        kv_cache.as_numbers(v_cache),
        kv_cache.as_words(k_cache),
        kv_cache.as_words(v_cache),
        slot_mapping.contiguous(),
        None if q_norm is None else q_norm.contiguous(),
        None if k_norm is None else k_norm.contiguous(),
        query,
        qkv.stride(0),
        eps,
        norm_offset,
        BLOCK_SIZE=block_size,
        **sizes,
        **(ROUNDED_OPTIONS if kv_cache.is_rounded(k_cache) else OPTIONS),
    )
    return query


def _sizes(num_q_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    num_heads = triton.next_power_of_2(num_q_heads + 2 * num_kv_heads)
    return {
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "HEADS": min(max(1, 1024 // triton.next_power_of_2(head_dim)), num_heads),  # 8 values for each thread
        "BLOCK_HALF": triton.next_power_of_2(max(rotary_dim // 2, 1)),
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
    }


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: heads that are normed, and partly rotated ones; caches of 8 bits."""
    for dtype, heads, head_dim, rotary_dim, norms, numbers in (
        ("bf16", (16, 8), 128, 128, True, None),
        ("fp32", (24, 8), 128, 96, False, None),
        ("bf16", (16, 8), 128, 128, True, "int8"),
        ("bf16", (16, 8), 128, 128, True, "fp8"),
    ):
        types = dict.fromkeys(("qkv_ptr", "k_cache_ptr", "v_cache_ptr", "query_ptr"), f"*{dtype}")
        types |= {"positions_ptr": "*i64", "slot_mapping_ptr": "*i64", "cos_sin_ptr": "*fp32", "qkv_stride": "i32"}
        types |= {"eps": "fp32", "norm_offset": "fp32"}
        weights, scales = ("q_norm_ptr", "k_norm_ptr"), ("k_scales_ptr", "v_scales_ptr")
        types |= dict.fromkeys(weights, f"*{dtype}") if norms else {}
        types |= kv_cache.rounded_types(numbers) if numbers else {}
        constants = _sizes(*heads, head_dim, rotary_dim) | {"BLOCK_SIZE": 16}
        constants |= dict.fromkeys({*weights, *scales} - set(types))
        name = f"rope_kv_write {dtype} {heads[0]}/{heads[1]} d{head_dim} r{rotary_dim}{' norms' if norms else ''}"
        name, options = (f"{name} {numbers} KV", ROUNDED_OPTIONS) if numbers else (name, OPTIONS)
        yield Spec(name, rope_kv_write_kernel, types, constants, options)
