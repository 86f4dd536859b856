"""Triton kernel for the layout of a step: one copy from the host, and one launch with a program for each entry."""

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec
from flyball_kernels.step_layout.reference import check

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
SIZES = ("num_entries", "num_decodes", "num_rows", "max_blocks", "num_blocks", "slots_stride", "tables_stride")
"""Arguments that change from step to step. A kernel compiled for each kind of them would stop the server."""


@triton.jit(do_not_specialize=SIZES)
def step_layout_kernel(
    packed_ptr,  # int64: [6, num_entries] as ``_packed`` has it, then the token ids of entries that are no decodes
    block_tables_ptr,  # [NUM_GROUPS, num_rows, max_blocks] int32
    last_token_ids_ptr,  # [num_rows] int64
    token_ids_ptr,  # [num_tokens] int64, written, and so is all that follows
    positions_ptr,  # [num_tokens] int64
    slots_ptr,  # [NUM_GROUPS, num_tokens] int64, rows slots_stride apart
    tables_ptr,  # [NUM_GROUPS, num_entries, num_blocks] int32, groups tables_stride apart
    cu_query_lens_ptr,  # [num_entries + 1] int32
    context_lens_ptr,  # [num_entries] int32
    logits_indices_ptr,  # [num_sampled] int64
    cu_logits_lens_ptr,  # [num_entries + 1] int32
    num_entries,
    num_decodes,
    num_rows,
    max_blocks,
    num_blocks,
    slots_stride,
    tables_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(packed_ptr + entry)
    num_computed = tl.load(packed_ptr + num_entries + entry).to(tl.int32)
    query_len = tl.load(packed_ptr + 2 * num_entries + entry).to(tl.int32)
    num_sampled = tl.load(packed_ptr + 3 * num_entries + entry).to(tl.int32)
    end = tl.load(packed_ptr + 4 * num_entries + entry)
    sampled_end = tl.load(packed_ptr + 5 * num_entries + entry)
    if entry == 0:
        tl.store(cu_query_lens_ptr, 0)
        tl.store(cu_logits_lens_ptr, 0)
    tl.store(cu_query_lens_ptr + entry + 1, end.to(tl.int32))
    tl.store(cu_logits_lens_ptr + entry + 1, sampled_end.to(tl.int32))
    tl.store(context_lens_ptr + entry, num_computed + query_len)
    for start in range(0, query_len, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        is_token = offsets < query_len
        tokens = end - query_len + offsets
        positions = num_computed + offsets
        if entry < num_decodes:
            ids = tl.maximum(tl.load(last_token_ids_ptr + row + tl.zeros([BLOCK], tl.int64)), 0)
        else:
            ids = tl.load(packed_ptr + 6 * num_entries + tokens - num_decodes, mask=is_token, other=0)
        tl.store(token_ids_ptr + tokens, ids, mask=is_token)
        tl.store(positions_ptr + tokens, positions.to(tl.int64), mask=is_token)
        is_sampled = is_token & (offsets >= query_len - num_sampled)
        tl.store(logits_indices_ptr + sampled_end - query_len + offsets, tokens, mask=is_sampled)
        for group in tl.static_range(NUM_GROUPS):
            table_ptr = block_tables_ptr + (group * num_rows + row) * max_blocks
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            tl.store(slots_ptr + group * slots_stride + tokens, slots, mask=is_token)
    for start in range(0, num_blocks, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_block = places < num_blocks
        for group in tl.static_range(NUM_GROUPS):
            table_ptr = block_tables_ptr + (group * num_rows + row) * max_blocks
            blocks = tl.load(table_ptr + places, mask=is_block, other=0)
            copy_ptr = tables_ptr + group * tables_stride + entry.to(tl.int64) * num_blocks
            tl.store(copy_ptr + places, blocks, mask=is_block)


def step_layout(
    entries: Tensor, num_decodes: int, token_ids: Tensor, block_tables: Tensor, last_token_ids: Tensor, block_size: int
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Launch the kernel; arguments as the public op, shapes and dtypes already checked."""
    check(entries, num_decodes, token_ids, block_tables, block_size)
    device = block_tables.device
    num_groups, num_rows, max_blocks = block_tables.shape
    _, starts, query_lens, num_sampled = entries.numpy()
    num_entries, num_tokens = len(starts), int(query_lens.sum())
    max_context_len = int((starts + query_lens).max())
    num_blocks = -(-max_context_len // block_size)
    # what kernels read begins at multiples of 16 bytes: others would be compiled for every case
    slots = torch.empty(num_groups, num_tokens + num_tokens % 2, dtype=torch.int64, device=device)
    tables = torch.empty(num_groups, -(-num_entries * num_blocks // 4) * 4, dtype=torch.int32, device=device)
    ids, positions = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    cu_query_lens, cu_logits_lens, context_lens = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_entries + 1, num_entries + 1, num_entries)
    )
    logits_indices = torch.empty(int(num_sampled.sum()), dtype=torch.int64, device=device)
    step_layout_kernel[(num_entries,)](
        _packed(entries, token_ids, device),
        block_tables,
        last_token_ids,
        ids,
        positions,
        slots,
        tables,
        cu_query_lens,
        context_lens,
        logits_indices,
        cu_logits_lens,
        num_entries,
        num_decodes,
        num_rows,
        max_blocks,
        num_blocks,
        slots.shape[1],
        tables.shape[1],
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return (
        ids,
        positions,
        [of_group[:num_tokens] for of_group in slots],
        [of_group[: num_entries * num_blocks].view(num_entries, num_blocks) for of_group in tables],
        cu_query_lens,
        context_lens,
        logits_indices,
        cu_logits_lens,
        int(query_lens.max()),
        int(num_sampled.max()),
        max_context_len,
    )


def _packed(entries: Tensor, token_ids: Tensor, device: torch.device) -> Tensor:
    """Return on the device: the entries, where the tokens of each end, where those end whose logits are wanted, the token ids.

    The host does not wait: the memory that it copies from is pinned, and is not used again before the copy is done.
    """
    num_entries = entries.shape[1]
    packed = torch.empty(6 * num_entries + len(token_ids), dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = packed.numpy()
    numbers[: 4 * num_entries] = entries.numpy().ravel()
    of_entries = numbers[: 6 * num_entries].reshape(6, num_entries)
    np.cumsum(of_entries[2:4], axis=1, out=of_entries[4:])
    numbers[6 * num_entries :] = token_ids.numpy()
    return packed.to(device, non_blocking=True)


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: one group of layers, and two."""
    wide = ("packed_ptr", "last_token_ids_ptr", "token_ids_ptr", "positions_ptr", "slots_ptr", "logits_indices_ptr")
    narrow = ("block_tables_ptr", "tables_ptr", "cu_query_lens_ptr", "context_lens_ptr", "cu_logits_lens_ptr")
    types = dict.fromkeys(wide, "*i64") | dict.fromkeys(narrow, "*i32") | dict.fromkeys(SIZES, "i32")
    for num_groups in (1, 2):
        constants = {"NUM_GROUPS": num_groups, "BLOCK_SIZE": 16, "BLOCK": BLOCK}
        yield Spec(f"step_layout {num_groups} groups", step_layout_kernel, types, constants, OPTIONS)
