"""Everything between the QKV projection and attention, in one pass."""

import torch
from torch import Tensor

from flyball_kernels import kv_cache
from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.rope_kv_write import reference


def rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: Backend,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> Tensor:
    """Norm and rotate a fused QKV projection, store its keys and values in the cache, return the query.

    Query and key heads are normed (where a weight is given) and rotated: of the first ``rotary_dim`` elements of a head,
    element ``i`` pairs with ``i + rotary_dim / 2`` (half-split layout: GPT-NeoX, HF Llama); the others pass through.
    Computed in fp32. Then each token's key and value go to its slot of the cache.

    Args:
        qkv: ``[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]``: query heads, key heads, value heads.
        positions: ``[num_tokens]`` int64, each below ``max_pos``.
        cos_sin_cache: ``[max_pos, rotary_dim]``, cosines in the first half of a row, sines in the second.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, dtype of ``qkv``; written.
            Or int8 or float8_e4m3fn, with room for scales: vectors are rounded, each with a scale. A block's numbers are
            in the order of the backend (see ``kv_cache``).
        slot_mapping: ``[num_tokens]`` int64, ``block_id * block_size + offset``; no slot twice.
        q_norm, k_norm: ``[head_dim]`` RMSNorm weights (Qwen3), or None.
        eps, norm_offset: of both norms, see ``rms_norm``.
    Returns:
        The query, a new contiguous ``[num_tokens, num_q_heads, head_dim]``.
    Raises:
        ValueError: a shape, dtype or layout is not as above, or rotary_dim is odd or larger than head_dim.
        IndexError: a position or a slot is out of range, on CPU. A GPU does not check them: what it reads and writes then is
            undefined.
    """
    _check_cache(k_cache, v_cache)
    kv_cache.check_rounded(k_cache, backend)
    num_kv_heads, head_dim = k_cache.shape[2], kv_cache.head_dim_of(k_cache)
    num_tokens = positions.shape[0]
    check_shape("qkv", qkv, num_tokens, None)
    if qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * num_kv_heads * head_dim:
        raise ValueError(
            f"qkv has rows of {qkv.shape[1]}; they must hold query heads and 2 * {num_kv_heads} KV heads of {head_dim}."
        )
    if not kv_cache.is_rounded(k_cache):
        check_dtype("qkv", qkv, k_cache.dtype)
    check_shape("slot_mapping", slot_mapping, num_tokens)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("positions", positions, num_tokens)
    check_dtype("positions", positions, torch.int64)
    _check_cos_sin_cache(cos_sin_cache, head_dim)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_shape(name, weight, head_dim)
            check_dtype(name, weight, qkv.dtype)
    tensors = (qkv, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, q_norm, k_norm)
    if backend.name == "cpp":
        return torch.ops.flyball.rope_kv_write(*tensors, eps, norm_offset)
    if backend.name == "triton":
        from flyball_kernels.rope_kv_write import kernel  # triton is there on Linux only

        return kernel.rope_kv_write(*tensors, eps, norm_offset)
    return reference.rope_kv_write(*tensors, eps, norm_offset)


def _check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    check_shape("k_cache", k_cache, None, None, None, None)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_contiguous("k_cache", k_cache)
    check_contiguous("v_cache", v_cache)


def _check_cos_sin_cache(cos_sin_cache: Tensor, head_dim: int) -> None:
    check_shape("cos_sin_cache", cos_sin_cache, None, None)
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"cos_sin_cache has rotary_dim {rotary_dim}; it must be even and at most head_dim {head_dim}.")
