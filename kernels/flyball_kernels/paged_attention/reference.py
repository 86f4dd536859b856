"""What paged attention means, one sequence at a time."""

import torch
from torch import Tensor

from flyball_kernels import kv_cache


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Gather each sequence's context and attend to it in fp32. Exact and slow."""
    starts = cu_query_lens.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        keys, values = (_gather(cache, block_tables[i], context_len) for cache in (k_cache, v_cache))
        out[rows] = _attend(query[rows], keys, values, scale, sliding_window, softcap, sinks)
    return out


def _gather(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    block_size = cache.shape[1]
    num_blocks = -(-context_len // block_size)
    vectors = kv_cache.read(cache[block_table[:num_blocks].long()])
    return vectors.flatten(0, 1)[:context_len]  # [context_len, num_kv_heads, head_dim]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    query_len, num_q_heads, _ = query.shape
    context_len, num_kv_heads, _ = keys.shape
    group = num_q_heads // num_kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    q_pos = torch.arange(context_len - query_len, context_len, device=query.device)[:, None]
    k_pos = torch.arange(context_len, device=query.device)[None, :]
    hidden = k_pos > q_pos
    if sliding_window is not None:
        hidden |= k_pos <= q_pos - sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, query_len, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
