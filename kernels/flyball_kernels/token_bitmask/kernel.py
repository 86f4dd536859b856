"""Triton kernel for token bitmasks: one program per (row of the mask, tile of tokens)."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

BLOCK = 4096
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def token_bitmask_kernel(
    logits_ptr,  # [n, vocab] fp32, changed
    bitmask_ptr,  # [num_rows, num_words] int32
    rows_ptr,  # [num_rows] int64, of the logits
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab
    words = tl.load(bitmask_ptr + index * num_words + ids // 32, mask=is_token, other=-1)
    is_banned = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * vocab + ids, float("-inf"), mask=is_token & is_banned)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Sequence[int]) -> None:
    """Launch the kernel; arguments as the public op, already checked."""
    vocab = logits.shape[1]
    if not rows or not vocab:
        return
    on_device = torch.tensor(rows).to(logits.device, non_blocking=True)
    grid = (len(rows), triton.cdiv(vocab, BLOCK))
    token_bitmask_kernel[grid](logits, bitmask, on_device, vocab, bitmask.shape[1], BLOCK=BLOCK, **OPTIONS)


def specs() -> Iterator[Spec]:
    """Yield the variant to compile ahead of time."""
    types = {"logits_ptr": "*fp32", "bitmask_ptr": "*i32", "rows_ptr": "*i64", "vocab": "i32", "num_words": "i32"}
    yield Spec("token_bitmask", token_bitmask_kernel, types, {"BLOCK": BLOCK}, OPTIONS)
