"""Triton kernel for paged attention.

One program attends a tile of one sequence's query tokens, with all the query heads of one KV head, to its keys: rows of
the tile are (token, head) pairs, so a group of heads shares every key and value it loads. Online softmax after Dao et
al. 2022; scores are in base 2.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

LOG2E = 1.4426950408889634
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


# max_blocks changes as contexts grow; specialized on its being 1 or a multiple of 16, it would compile three kernels
@triton.jit(do_not_specialize=["max_blocks"])
def paged_attention_kernel(
    query_ptr,  # [num_tokens, num_q_heads, head_dim]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    v_cache_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    cu_query_lens_ptr,  # [num_seqs + 1] int32
    context_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [num_q_heads] fp32, or None
    out_ptr,  # as query
    scale,  # includes log2(e), or 1 / SOFTCAP
    max_blocks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys a token sees, or None
    SOFTCAP: tl.constexpr,  # bound of the scores, times log2(e), or None
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # keys per turn
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    DOT_DTYPE: tl.constexpr,  # what matrices are multiplied in, the tensors' dtype on a GPU
):
    tile, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    first_token = tile * TOKENS
    if first_token >= query_len:
        return
    context_len = tl.load(context_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < query_len)
    positions = context_len - query_len + tokens
    heads = kv_head * GROUP + rows % GROUP
    row_offsets = ((query_start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    tile_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + row_offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0).to(DOT_DTYPE)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_position = context_len - query_len + first_token
    end = tl.minimum(first_position + TOKENS, context_len)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    table_ptr = block_tables_ptr + seq.to(tl.int64) * max_blocks
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < end
        block_ids = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = block_ids * BLOCK_SIZE + keys % BLOCK_SIZE
        key_offsets = (slots * NUM_KV_HEADS + kv_head) * HEAD_DIM
        kv_mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(k_cache_ptr + key_offsets[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP is not None:
            doubled = tl.minimum(scores * 2.8853900817779268, 126.0)  # 2 * log2(e); beyond, tanh is 1
            scores = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp2(doubled))
        visible = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if WINDOW is not None:
            visible &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(top - base)
        value = tl.load(v_cache_ptr + key_offsets[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(DOT_DTYPE)
        acc = acc * correction[:, None]
        acc += tl.dot(weights.to(DOT_DTYPE), value, input_precision="ieee")
        total = total * correction + tl.sum(weights, axis=1)
        top = new_top

    if sinks_ptr is not None:
        total += tl.exp2(tl.minimum(tl.load(sinks_ptr + heads) * 1.4426950408889634 - top, 126.0))
    out = acc / tl.where(is_row, total, 1.0)[:, None]  # a row of padding may have seen no key
    tl.store(out_ptr + row_offsets[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=tile_mask)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype that matrices of ``dtype`` are multiplied in."""
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32  # the interpreter multiplies bf16 matrices as integers
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def tile_shape(dtype: torch.dtype, group: int, head_dim: int, max_query_len: int) -> dict[str, int]:
    """Return the kernel's block sizes, chosen so that no register spills (``python -m flyball_kernels.aot``)."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    most_rows = 16 if dtype == torch.float32 else 64 if block_d < 256 else 32
    rows = triton.next_power_of_2(group * min(max_query_len, 64))  # a decode has no more rows than its group of heads
    return {
        "BLOCK_M": max(16, triton.next_power_of_2(group), min(rows, most_rows)),
        "BLOCK_N": 16 if dtype == torch.float32 else 64 if block_d < 128 else 32,
        "BLOCK_D": block_d,
    }


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
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    num_q_heads, head_dim = query.shape[1:]
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    num_seqs = context_lens.shape[0]
    if num_seqs == 0 or max_query_len == 0:
        return out
    shape = tile_shape(query.dtype, group, head_dim, max_query_len)
    grid = (triton.cdiv(max_query_len, shape["BLOCK_M"] // group), num_kv_heads, num_seqs)
    paged_attention_kernel[grid](
        query,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        context_lens,
        sinks,
        out,
        scale * LOG2E if softcap is None else scale / softcap,
        block_tables.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window,
        SOFTCAP=None if softcap is None else softcap * LOG2E,
        DOT_DTYPE=dot_dtype(query.dtype),
        **shape,
        **OPTIONS,
    )
    return out


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: decode and prefill, each dtype, common head sizes."""
    for head_dim, group in ((64, 3), (128, 8)):
        for max_query_len in (1, 512):
            yield _spec("bf16", head_dim, group, max_query_len, window=None)
    for dtype in ("fp16", "fp32"):
        yield _spec(dtype, 128, 2, 512, window=None)
    yield _spec("bf16", 80, 1, 512, window=4096)
    yield _spec("bf16", 256, 2, 512, window=4096, softcap=50.0)
    yield _spec("bf16", 64, 8, 512, window=128, has_sinks=True)


def _spec(
    dtype_name: str,
    head_dim: int,
    group: int,
    max_query_len: int,
    window: int | None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> Spec:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    types = dict.fromkeys(("query_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), f"*{dtype_name}")
    types |= dict.fromkeys(("block_tables_ptr", "cu_query_lens_ptr", "context_lens_ptr"), "*i32")
    types |= {"scale": "fp32", "max_blocks": "i32"} | ({"sinks_ptr": "*fp32"} if has_sinks else {})
    constants = {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "WINDOW": window}
    constants |= {"SOFTCAP": softcap, "DOT_DTYPE": dot_dtype(dtype)} | ({} if has_sinks else {"sinks_ptr": None})
    constants |= tile_shape(dtype, group, head_dim, max_query_len)
    name = f"paged_attention {'decode' if max_query_len == 1 else 'prefill'} {dtype_name} d{head_dim} g{group}"
    return Spec(name, paged_attention_kernel, types, constants, OPTIONS)
