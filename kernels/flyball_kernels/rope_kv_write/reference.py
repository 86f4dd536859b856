"""The fused op as the composition of the references that it replaces."""

from torch import Tensor

from flyball_kernels.kv_write.reference import kv_write
from flyball_kernels.rms_norm.reference import rms_norm
from flyball_kernels.rope.reference import rope


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
) -> Tensor:
    query, key, value = split_norm_rope(
        qkv, positions, cos_sin_cache, k_cache.shape[2], k_cache.shape[3], q_norm, k_norm, eps
    )
    kv_write(key, value, k_cache, v_cache, slot_mapping)
    return query


def split_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what attention needs, each ``[num_tokens, heads, head_dim]``; the value is a view of ``qkv``."""
    heads = qkv.unflatten(1, (-1, head_dim))
    query, key, value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    query, key = rope(positions, query, key, cos_sin_cache)
    return query, key, value
