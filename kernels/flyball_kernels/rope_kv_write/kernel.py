"""Triton kernel for the cache write of rope_kv_write: one program per (token, piece of its row)."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def kv_write_kernel(
    key_ptr,  # [num_tokens, row_numel], rows key_stride apart
    value_ptr,
    k_cache_ptr,  # [num_slots, row_numel]
    v_cache_ptr,
    slot_mapping_ptr,  # [num_tokens] int64
    key_stride,
    value_stride,
    row_numel,  # num_kv_heads * head_dim
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < row_numel
    slot = tl.load(slot_mapping_ptr + token)
    key = tl.load(key_ptr + token * key_stride + cols, mask=mask)
    value = tl.load(value_ptr + token * value_stride + cols, mask=mask)
    tl.store(k_cache_ptr + slot * row_numel + cols, key, mask=mask)
    tl.store(v_cache_ptr + slot * row_numel + cols, value, mask=mask)


def kv_write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; the other arguments are as in ``rope_kv_write``, already checked.

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_dim]``, each token's row contiguous, or copied.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    row_numel = num_kv_heads * head_dim
    if num_tokens == 0:
        return
    key, value = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (key, value))
    block = min(1024, triton.next_power_of_2(row_numel))
    kv_write_kernel[(num_tokens, triton.cdiv(row_numel, block))](
        key, value, k_cache, v_cache, slot_mapping, key.stride(0), value.stride(0), row_numel, BLOCK=block, **OPTIONS
    )


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time."""
    pointers = dict.fromkeys(("key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    sizes = dict.fromkeys(("key_stride", "value_stride", "row_numel"), "i32")
    types = {**pointers, "slot_mapping_ptr": "*i64", **sizes}
    yield Spec("kv_write bf16", kv_write_kernel, types, {"BLOCK": 1024}, OPTIONS)
