"""Everything between the QKV projection and attention, in one pass. On CUDA only the cache write is a kernel."""

import torch
from torch import Tensor

from flyball_kernels.backend import backend_for
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.kv_write import check_cache, kv_write
from flyball_kernels.rope import check_cos_sin_cache
from flyball_kernels.rope_kv_write import reference


def rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norm and rotate a fused QKV projection, store its keys and values in the cache, return the query.

    Same as ``rms_norm`` per head on query and key (where a weight is given), then ``rope``, then ``kv_write``.

    Args:
        qkv: ``[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]``: query heads, key heads, value heads.
        positions: ``[num_tokens]`` int64.
        cos_sin_cache: ``[max_pos, rotary_dim]`` as in ``rope``.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, dtype of ``qkv``; written.
        slot_mapping: ``[num_tokens]`` int64 as in ``kv_write``.
        q_norm, k_norm: ``[head_dim]`` RMSNorm weights (Qwen3), or None.
        eps: of both norms.
    Returns:
        The query, a new contiguous ``[num_tokens, num_q_heads, head_dim]``.
    Raises:
        ValueError: a shape, dtype or layout is not as above.
        IndexError: a position or, on CPU, a slot is out of range.
    """
    check_cache(k_cache, v_cache)
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_tokens = positions.shape[0]
    check_shape("qkv", qkv, num_tokens, None)
    if qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * num_kv_heads * head_dim:
        raise ValueError(
            f"qkv has rows of {qkv.shape[1]}; they must hold query heads and 2 * {num_kv_heads} KV heads of {head_dim}."
        )
    check_dtype("qkv", qkv, k_cache.dtype)
    check_shape("slot_mapping", slot_mapping, num_tokens)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("positions", positions, num_tokens)
    check_dtype("positions", positions, torch.int64)
    check_cos_sin_cache(cos_sin_cache, head_dim)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_shape(name, weight, head_dim)
            check_dtype(name, weight, qkv.dtype)
    tensors = (qkv, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, q_norm, k_norm)
    backend = backend_for(qkv)
    if backend == "cpp":
        return torch.ops.flyball.rope_kv_write(*tensors, eps)
    if backend == "triton":
        query, key, value = reference.split_norm_rope(
            qkv, positions, cos_sin_cache, num_kv_heads, head_dim, q_norm, k_norm, eps
        )
        kv_write(key, value, k_cache, v_cache, slot_mapping)
        return query
    return reference.rope_kv_write(*tensors, eps)
