"""Torch reference of the fused op: norm per head, rotation, write to the paged cache."""

from torch import Tensor, cat

from flyball_kernels import kv_cache
from flyball_kernels.rms_norm.reference import rms_norm


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
    query, key, value = split_norm_rope(
        qkv, positions, cos_sin_cache, k_cache.shape[2], kv_cache.head_dim_of(k_cache), q_norm, k_norm, eps, norm_offset
    )
    kv_cache.write(k_cache, slot_mapping, key)
    kv_cache.write(v_cache, slot_mapping, value)
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
    norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated query, rotated key, and value, each ``[num_tokens, heads, head_dim]``; the value is a view of ``qkv``."""
    heads = qkv.unflatten(1, (-1, head_dim))
    query, key, value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps, norm_offset)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps, norm_offset)
    return rope(positions, query, cos_sin_cache), rope(positions, key, cos_sin_cache), value


def rope(positions: Tensor, heads: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head (Su et al. 2021), half-split as in GPT-NeoX and HF Llama."""
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, rotary_dim / 2]
    half = cos.shape[-1]
    x1, x2, rest = heads[..., :half].float(), heads[..., half : 2 * half].float(), heads[..., 2 * half :]
    return cat([(x1 * cos - x2 * sin).to(heads.dtype), (x2 * cos + x1 * sin).to(heads.dtype), rest], dim=-1)
