"""Causal attention over a paged KV cache, prefill chunks and decodes in one call."""

import torch
from torch import Tensor

from flyball_kernels import flash_attention, kv_cache
from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.paged_attention import reference


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    backend: Backend,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dot: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each query token to its sequence's keys up to itself (Kwon et al. 2023, flash-style online softmax).

    Sequence ``i`` owns query rows ``cu_query_lens[i]:cu_query_lens[i + 1]``: the last ones of its ``context_lens[i]``
    tokens, all of which are in the cache already (see ``rope_kv_write``). Query head ``h`` reads KV head
    ``h // (num_q_heads // num_kv_heads)``. Accumulates in fp32. With the cpp backend a token has the same bits whatever other
    tokens and sequences are computed with it.

    Args:
        query: ``[num_tokens, num_q_heads, head_dim]``, contiguous.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, dtype of ``query``;
            or int8 or float8_e4m3fn, with scales. In which order a block has its numbers depends on the backend: see
            ``kv_cache``.
        block_tables: ``[num_seqs, max_blocks]`` int32; entries past a context's last block are not read.
        cu_query_lens: ``[num_seqs + 1]`` int32, cumulative, from 0 to num_tokens.
        context_lens: ``[num_seqs]`` int32, at least the sequence's query length.
        scale: factor on the scores, commonly ``head_dim ** -0.5``.
        max_query_len: the longest query of this call; sizes the GPU grid.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None sees all.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2); None leaves them as they are.
        sinks: ``[num_q_heads]`` fp32, for each head a score of no key, which takes part in the softmax (gpt-oss), or None.
        dot: whether queries in bf16 use the CPU's bf16 dot product instructions (AVX512_BF16 or AMX), which round the
            softmax weights to bf16; None: where that is the faster way.
        out: written in place when given, like ``query`` in shape, dtype and layout.
    Returns:
        ``out``, or a new ``[num_tokens, num_q_heads, head_dim]``.
    Raises:
        ValueError: a shape, dtype or layout is not as above, or the backend has no code for it (FlashAttention 3, a dot
            product).
        IndexError: a length or a block id is out of range, on CPU. A GPU does not check them: what it reads is undefined.
    """
    _check(query, k_cache, v_cache, block_tables, cu_query_lens, context_lens, sliding_window, softcap, sinks)
    kv_cache.check_rounded(k_cache, backend)
    if dot and backend.name != "cpp":
        raise ValueError(
            f"dot=True is for the cpp backend; this is {backend.name}. Leave dot out, or choose cpp on a CPU."
        )
    if out is not None:
        check_shape("out", out, *query.shape)
        check_dtype("out", out, query.dtype)
        check_contiguous("out", out)
    tensors = (query, k_cache, v_cache, block_tables, cu_query_lens, context_lens)
    if backend.attention == "flash_attn":
        flash_attention.check_can_attend(query.dtype, k_cache.dtype, query.shape[2], sinks is not None)
        attended = flash_attention.paged_attention(
            *tensors, scale=scale, max_query_len=max_query_len, sliding_window=sliding_window, softcap=softcap
        )
        return attended if out is None else out.copy_(attended)
    if out is None:
        out = torch.empty_like(query)
    if backend.name == "cpp":
        torch.ops.flyball.paged_attention(*tensors, scale, sliding_window, softcap, sinks, dot, out)
        return out
    if backend.name == "triton":
        from flyball_kernels.paged_attention import kernel  # triton is there on Linux only

        return kernel.paged_attention(
            *tensors,
            scale=scale,
            max_query_len=max_query_len,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )
    return reference.paged_attention(
        *tensors, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks, out=out
    )


def _check(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    check_shape("query", query, None, None, None)
    num_q_heads, head_dim = query.shape[1:]
    is_rounded = kv_cache.is_rounded(k_cache)
    check_shape("k_cache", k_cache, None, None, None, head_dim + kv_cache.SCALE_BYTES if is_rounded else head_dim)
    check_shape("v_cache", v_cache, *k_cache.shape)
    if k_cache.shape[2] == 0 or num_q_heads % k_cache.shape[2]:
        raise ValueError(
            f"query has {num_q_heads} heads; it must be a multiple of the cache's {k_cache.shape[2]} heads."
        )
    for name, tensor in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, tensor, tensor.dtype if name == "query" else k_cache.dtype if is_rounded else query.dtype)
        check_contiguous(name, tensor)
    num_seqs = context_lens.shape[0] if context_lens.dim() else 0
    check_shape("context_lens", context_lens, num_seqs)
    check_shape("block_tables", block_tables, num_seqs, None)
    check_shape("cu_query_lens", cu_query_lens, num_seqs + 1)
    for name, tensor in (
        ("block_tables", block_tables),
        ("cu_query_lens", cu_query_lens),
        ("context_lens", context_lens),
    ):
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for no window.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be above 0, or None for no bound.")
    if sinks is not None:
        check_shape("sinks", sinks, num_q_heads)
        check_dtype("sinks", sinks, torch.float32)
        check_contiguous("sinks", sinks)
