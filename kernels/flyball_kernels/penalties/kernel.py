"""Triton kernels for penalties: tokens are counted in a table, then each of the history is penalized by who comes first.

Work grows with the histories; of the vocabulary's size is only the clearing of the table. Histories stay where they are: the
kernels get their addresses.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _tokens(rows_ptr, num_rows, vocab, index, BLOCK: tl.constexpr):
    """Return the row's tile of its history, which of its lanes hold a token, and which of these are of the output."""
    address = tl.load(rows_ptr + num_rows + index)
    num_prompt = tl.load(rows_ptr + 2 * num_rows + index)
    num_tokens = tl.load(rows_ptr + 3 * num_rows + index)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=at < num_tokens, other=-1)
    is_token = (ids >= 0) & (ids < vocab)
    return ids, is_token, is_token & (at >= num_prompt)


@triton.jit
def count_kernel(
    rows_ptr,  # [4, num_rows] int64: rows of the logits, addresses of histories, prompt tokens of each, all tokens of each
    counts_ptr,  # [num_rows, vocab] int32, zeros before
    num_rows,
    vocab,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    ids, _, is_output = _tokens(rows_ptr, num_rows, vocab, index, BLOCK)
    tl.atomic_add(counts_ptr + index * vocab + ids, 1, mask=is_output, sem="relaxed")


@triton.jit
def penalize_kernel(
    rows_ptr,  # as above
    settings_ptr,  # [3, num_rows] fp32: repetition, presence, frequency
    counts_ptr,  # as above; -1 behind a token that has been penalized
    logits_ptr,  # [n, vocab] fp32, changed
    num_rows,
    vocab,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    ids, is_token, _ = _tokens(rows_ptr, num_rows, vocab, index, BLOCK)
    counts = tl.atomic_xchg(counts_ptr + index * vocab + ids, -1, mask=is_token, sem="relaxed")
    is_first = is_token & (counts >= 0)
    repetition = tl.load(settings_ptr + index)
    presence = tl.load(settings_ptr + num_rows + index)
    frequency = tl.load(settings_ptr + 2 * num_rows + index)
    places = logits_ptr + tl.load(rows_ptr + index) * vocab + ids
    logits = tl.load(places, mask=is_first, other=0.0)
    logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    penalized = logits - counts.to(tl.float32) * frequency - presence
    tl.store(places, tl.where(counts > 0, penalized, logits), mask=is_first)


def penalize(
    logits: Tensor,
    rows: Sequence[int],
    histories: Sequence[Tensor],
    num_prompt_tokens: Sequence[int],
    repetition: Sequence[float],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> None:
    """Launch the kernels; arguments as the public op, already checked."""
    lengths = [len(history) for history in histories]
    num_rows, vocab, most = len(rows), logits.shape[1], max(lengths, default=0)
    if most == 0:
        return
    table = [list(rows), [history.data_ptr() for history in histories], list(num_prompt_tokens), lengths]
    on_device = torch.tensor(table).to(logits.device, non_blocking=True)
    settings = torch.tensor([repetition, presence, frequency], dtype=torch.float32).to(logits.device, non_blocking=True)
    counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=logits.device)
    grid = (num_rows, triton.cdiv(most, BLOCK))
    count_kernel[grid](on_device, counts, num_rows, vocab, BLOCK=BLOCK, **OPTIONS)
    penalize_kernel[grid](on_device, settings, counts, logits, num_rows, vocab, BLOCK=BLOCK, **OPTIONS)


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time."""
    types = {"rows_ptr": "*i64", "counts_ptr": "*i32", "num_rows": "i32", "vocab": "i32"}
    yield Spec("penalties count", count_kernel, types, {"BLOCK": BLOCK}, OPTIONS)
    types = types | {"settings_ptr": "*fp32", "logits_ptr": "*fp32"}
    yield Spec("penalties", penalize_kernel, types, {"BLOCK": BLOCK}, OPTIONS)
