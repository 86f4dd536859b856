"""Triton kernels for paged attention.

A program attends a tile of one sequence's query tokens, with all the query heads of one KV head, to its keys, or to one of
several splits of them: rows of the tile are (token, head) pairs, so a group of heads shares every key and value it loads.
Where a batch has too few tiles to fill the GPU, their keys are split (FlashDecoding), and a second kernel joins the splits.
Online softmax after Dao et al. 2022; scores are in base 2.

The grid depends on shapes alone. Nothing is read back to the host, so a step can be captured in a CUDA graph.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels import kv_cache
from flyball_kernels.rounding import from_e4m3
from flyball_kernels.spec import Spec

LOG2E = 1.4426950408889634

PROGRAMS_PER_PROCESSOR = 2
"""Programs that a multiprocessor gets, at least, if the keys suffice."""

MIN_KEYS, MAX_KEYS = 256, 16384
"""Keys of a split: below the least, joining costs more than it gains; a program with more than the most holds up the others."""

MAX_SPLITS = 64

MAX_SCRATCH_BYTES = 64 * 2**20
"""Bound of the splits' results, where splits are made for MAX_KEYS alone."""

# three stages: block ids are loaded a turn ahead of the keys and values that they lead to
OPTIONS = {"num_stages": 3, "enable_fp_fusion": True}
JOIN_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


# lengths change as batches do; specialized on their being 1 or a multiple of 16, they would compile many kernels
@triton.jit(do_not_specialize=["max_blocks", "num_seqs", "num_splits"])
def paged_attention_kernel(
    query_ptr,  # [num_tokens, num_q_heads, head_dim]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim], or int8 or e4m3 (uint8), with scales behind vectors
    v_cache_ptr,
    k_scales_ptr,  # with 8 bits, the same memory as fp32; or None
    v_scales_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    cu_query_lens_ptr,  # [num_seqs + 1] int32
    context_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [num_q_heads] fp32, or None
    out_ptr,  # as query; with SPLIT [num_tokens, num_q_heads, num_splits, head_dim] fp32
    lse_ptr,  # with SPLIT [num_tokens, num_q_heads, num_splits] fp32: log2 of the sum of exponentials; or None
    scale,  # includes log2(e), or 1 / SOFTCAP
    max_blocks,
    num_seqs,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys a token sees, or None
    SOFTCAP: tl.constexpr,  # bound of the scores, times log2(e), or None
    ONE_TILE: tl.constexpr,  # whether no sequence has more than one tile
    SPLIT: tl.constexpr,  # whether num_splits is above 1
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # keys per turn
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    SEARCH: tl.constexpr,  # sequences per turn of the search
    DOT_DTYPE: tl.constexpr,  # what matrices are multiplied in, the tensors' dtype on a GPU
    VALUE_DTYPE: tl.constexpr,  # what weights and values are, likewise
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    place, split = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(1)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq, first_token = place, 0
    if not ONE_TILE:
        seq = _sequence_of(place, cu_query_lens_ptr, num_seqs, TOKENS, SEARCH)
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    if not ONE_TILE:  # the last tile has the most keys, and goes first
        first_token = (tl.cdiv(query_len, TOKENS) - 1 - (place - query_start // TOKENS - seq)) * TOKENS
    if (first_token < 0) | (query_len == 0):
        return
    context_len = tl.load(context_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < query_len)
    positions = context_len - query_len + tokens
    heads = kv_head * GROUP + rows % GROUP
    row_ids = (query_start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    out_ids = row_ids
    tile_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]

    first_position = context_len - query_len + first_token
    end = tl.minimum(first_position + TOKENS, context_len)
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
    begin = first_key // BLOCK_N * BLOCK_N
    if SPLIT:
        split_keys = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
        begin += split * split_keys
        end = tl.minimum(begin + split_keys, end)
        out_ids = row_ids * num_splits + split
        if begin >= end:
            tl.store(lse_ptr + out_ids, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return

    query_offsets = row_ids[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=tile_mask, other=0.0).to(DOT_DTYPE)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * max_blocks
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = (keys >= first_key) & (keys < end)
        block_ids = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = block_ids * BLOCK_SIZE + keys % BLOCK_SIZE
        key_offsets = (slots * NUM_KV_HEADS + kv_head) * HEAD_DIM
        if k_scales_ptr is not None:  # which lie behind the vectors of their block, by head and by place
            key_offsets += block_ids * (4 * BLOCK_SIZE * NUM_KV_HEADS)
            vector_words = (block_ids + 1) * (BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 4)
            scale_offsets = vector_words + (block_ids * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        kv_mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        key = _loaded(k_cache_ptr + key_offsets[:, None] + dims[None, :], kv_mask, DOT_DTYPE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if k_scales_ptr is not None:
            scores *= tl.load(k_scales_ptr + scale_offsets, mask=is_key, other=0.0)[None, :]
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
        value = _loaded(v_cache_ptr + key_offsets[:, None] + dims[None, :], kv_mask, VALUE_DTYPE)
        shares = weights
        if v_scales_ptr is not None:
            shares = weights * tl.load(v_scales_ptr + scale_offsets, mask=is_key, other=0.0)[None, :]
        acc = acc * correction[:, None]
        acc += tl.dot(shares.to(VALUE_DTYPE), value, input_precision="ieee")
        total = total * correction + tl.sum(weights, axis=1)
        top = new_top

    if SPLIT:
        saw_no_key = total == 0.0
        total = tl.where(saw_no_key, 1.0, total)
        tl.store(lse_ptr + out_ids, tl.where(saw_no_key, float("-inf"), top + tl.log2(total)), mask=is_row)
    else:
        if sinks_ptr is not None:
            total += tl.exp2(tl.minimum(tl.load(sinks_ptr + heads) * 1.4426950408889634 - top, 126.0))
        total = tl.where(is_row, total, 1.0)  # a row of padding may have seen no key
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_ids[:, None] * HEAD_DIM + dims[None, :], out, mask=tile_mask)


@triton.jit
def _loaded(vectors_ptr, mask, DTYPE: tl.constexpr):
    """Return vectors of the cache, without their scales."""
    if vectors_ptr.dtype.element_ty == tl.uint8:
        vectors = from_e4m3(tl.load(vectors_ptr, mask=mask, other=0))
    else:
        vectors = tl.load(vectors_ptr, mask=mask, other=0.0)
    return vectors.to(DTYPE)


@triton.jit
def _sequence_of(place, cu_query_lens_ptr, num_seqs, TOKENS: tl.constexpr, SEARCH: tl.constexpr):
    """Return the sequence that a place belongs to: sequence ``i`` has those from ``cu_query_lens[i] // TOKENS + i`` on.

    These are as many as it has tiles, or one more.
    """
    count = 0
    for first in range(0, num_seqs, SEARCH):
        seqs = first + tl.arange(0, SEARCH)
        starts = tl.load(cu_query_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
        count += tl.sum(((seqs < num_seqs) & (starts // TOKENS + seqs <= place)).to(tl.int32), axis=0)
    return count - 1


@triton.jit(do_not_specialize=["num_splits"])
def join_splits_kernel(
    split_ptr,  # [num_tokens, NUM_Q_HEADS, num_splits, HEAD_DIM] fp32
    lse_ptr,  # [num_tokens, NUM_Q_HEADS, num_splits] fp32
    sinks_ptr,  # [NUM_Q_HEADS] fp32, or None
    out_ptr,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    num_splits,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lse, axis=0)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, axis=0)
    if sinks_ptr is not None:
        total += tl.exp2(tl.minimum(tl.load(sinks_ptr + row % NUM_Q_HEADS) * 1.4426950408889634 - top, 126.0))
    # splits without keys wrote no values
    mask = (lse != float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(split_ptr + offsets, mask=mask, other=0.0)
    out = tl.sum(values * weights[:, None], axis=0) / total
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype that matrices of ``dtype`` are multiplied in."""
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32  # the interpreter multiplies bf16 matrices as integers
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _value_dtype(dtype: torch.dtype, is_rounded: bool) -> torch.dtype:
    """Return the dtype of weights and values. Weights times the scales of values in 8 bits can be too small for fp16."""
    return torch.bfloat16 if is_rounded and dtype == torch.float16 else dtype


def tile_shape(
    dtype: torch.dtype, group: int, head_dim: int, max_query_len: int, is_rounded: bool = False
) -> dict[str, int]:
    """Return the kernel's block sizes and warps, chosen so that no register spills (``python -m flyball_kernels.aot``).

    Those of decodes from 8 bits are the fastest of these on an H100.

    Args:
        is_rounded: whether keys and values have to be converted, which takes registers too.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    most_rows = 16 if dtype == torch.float32 else 64 if block_d < 256 else 32
    rows = triton.next_power_of_2(group * min(max_query_len, 64))  # a decode has no more rows than its group of heads
    block_m = max(16, triton.next_power_of_2(group), min(rows, most_rows))
    is_small = block_m == 16 and block_d <= 128
    block_n = 64 if block_d < 128 or is_small else 32
    block_n = 16 if dtype == torch.float32 else block_n // 2 if is_rounded else block_n
    num_warps = 2 if is_rounded and is_small and dtype != torch.float32 else 4
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "SEARCH": 256, "num_warps": num_warps}


def choose_num_splits(num_programs: int, max_context_len: int, num_processors: int, split_bytes: int) -> int:
    """Return into how many parts keys are split.

    Args:
        num_programs: how many there are without splits.
        num_processors: multiprocessors of the GPU.
        split_bytes: bytes of scratch memory that each split takes.
    """
    to_fill = min(PROGRAMS_PER_PROCESSOR * num_processors // num_programs, max_context_len // MIN_KEYS)
    to_even_out = min(triton.cdiv(max_context_len, MAX_KEYS), MAX_SCRATCH_BYTES // split_bytes)
    return min(max(to_fill, to_even_out, 1), MAX_SPLITS)


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter's; few, as it runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    num_splits: int | None = None,
) -> Tensor:
    """Launch the kernels; arguments as the public op, already checked.

    Args:
        num_splits: parts of each context that are attended to apart, up to MAX_SPLITS; None chooses.
    """
    num_tokens, num_q_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    is_rounded = kv_cache.is_rounded(k_cache)
    group = num_q_heads // num_kv_heads
    num_seqs = context_lens.shape[0]
    if num_tokens == 0:
        return out
    shape = tile_shape(query.dtype, group, head_dim, max_query_len, is_rounded)
    tile_tokens = shape["BLOCK_M"] // group
    one_tile = max_query_len <= tile_tokens
    num_programs = num_kv_heads * (num_seqs if one_tile else num_tokens // tile_tokens + num_seqs)
    max_context_len = block_tables.shape[1] * block_size
    if sliding_window is not None:
        max_context_len = min(max_context_len, sliding_window + tile_tokens)
    if num_splits is None:
        split_bytes = 4 * query.numel()
        num_splits = choose_num_splits(num_programs, max_context_len, _num_processors(query.device), split_bytes)
    is_split = num_splits > 1
    lse = split_out = None
    if is_split:
        split_out = torch.empty(num_tokens, num_q_heads, num_splits, head_dim, device=query.device)
        lse = torch.empty(num_tokens, num_q_heads, num_splits, device=query.device)
    paged_attention_kernel[(num_programs, num_splits)](
        query,
        kv_cache.as_numbers(k_cache),
        kv_cache.as_numbers(v_cache),
        kv_cache.as_words(k_cache),
        kv_cache.as_words(v_cache),
        block_tables,
        cu_query_lens,
        context_lens,
        None if is_split else sinks,
        split_out if is_split else out,
        lse,
        scale * LOG2E if softcap is None else scale / softcap,
        block_tables.shape[1],
        num_seqs,
        num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window,
        SOFTCAP=None if softcap is None else softcap * LOG2E,
        ONE_TILE=one_tile,
        SPLIT=is_split,
        DOT_DTYPE=dot_dtype(query.dtype),
        VALUE_DTYPE=dot_dtype(_value_dtype(query.dtype, is_rounded)),
        **shape,
        **OPTIONS,
    )
    if is_split:
        join_splits_kernel[(num_tokens * num_q_heads,)](
            split_out,
            lse,
            sinks,
            out,
            num_splits,
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=shape["BLOCK_D"],
            MAX_SPLITS=MAX_SPLITS,
            **JOIN_OPTIONS,
        )
    return out


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: decode and prefill, each dtype, common head sizes."""
    for max_query_len in (1, 512):
        yield _spec("bf16", 128, 2, max_query_len, is_split=True)
        yield _spec("bf16", 128, 8, max_query_len)
        yield _spec("bf16", 64, 3, max_query_len)
    for dtype in ("fp16", "fp32"):
        yield _spec(dtype, 128, 2, 512)
    yield _spec("bf16", 80, 1, 512, window=4096)
    yield _spec("bf16", 256, 2, 512, window=4096, softcap=50.0)
    yield _spec("bf16", 64, 8, 512, window=128, has_sinks=True)
    for max_query_len in (1, 512):
        for numbers in ("int8", "fp8"):
            yield _spec("bf16", 128, 2, max_query_len, is_split=True, numbers=numbers)
            yield _spec("bf16", 128, 8, max_query_len, numbers=numbers)
    for head_dim in (128, 256):
        types = {"split_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "num_splits": "i32"}
        block_d = triton.next_power_of_2(head_dim)
        sizes = {"NUM_Q_HEADS": 16, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "MAX_SPLITS": MAX_SPLITS}
        constants = {**sizes, "sinks_ptr": None}
        yield Spec(f"join_splits bf16 d{head_dim}", join_splits_kernel, types, constants, JOIN_OPTIONS)


def _spec(
    dtype_name: str,
    head_dim: int,
    group: int,
    max_query_len: int,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    is_split: bool = False,
    numbers: str | None = None,
) -> Spec:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    shape = tile_shape(dtype, group, head_dim, max_query_len, numbers is not None)
    options = OPTIONS | {"num_warps": shape.pop("num_warps")}
    types = dict.fromkeys(("query_ptr", "k_cache_ptr", "v_cache_ptr"), f"*{dtype_name}")
    types |= {"out_ptr": "*fp32", "lse_ptr": "*fp32"} if is_split else {"out_ptr": f"*{dtype_name}"}
    types |= dict.fromkeys(("block_tables_ptr", "cu_query_lens_ptr", "context_lens_ptr"), "*i32")
    types |= {"scale": "fp32"} | dict.fromkeys(("max_blocks", "num_seqs", "num_splits"), "i32")
    types |= {"sinks_ptr": "*fp32"} if has_sinks else {}
    types |= kv_cache.rounded_types(numbers) if numbers else {}
    constants = dict.fromkeys({"sinks_ptr", "lse_ptr", "k_scales_ptr", "v_scales_ptr"} - set(types))
    constants |= {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "WINDOW": window}
    constants |= {"SOFTCAP": softcap, "DOT_DTYPE": dot_dtype(dtype), "SPLIT": is_split, **shape}
    constants |= {"VALUE_DTYPE": dot_dtype(_value_dtype(dtype, numbers is not None))}
    constants |= {"ONE_TILE": max_query_len <= shape["BLOCK_M"] // group}
    kind = ("split " if is_split else "") + ("decode" if max_query_len == 1 else "prefill")
    name = f"paged_attention {kind} {dtype_name} d{head_dim} g{group}{f' {numbers} KV' if numbers else ''}"
    return Spec(name, paged_attention_kernel, types, constants, options)
