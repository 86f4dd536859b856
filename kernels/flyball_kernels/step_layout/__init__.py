"""The tensors of a step: where its tokens stand, and where their keys and values go."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.step_layout import reference

__all__ = ["StepLayout", "step_layout"]


class StepLayout(NamedTuple):
    """One ragged batch: the tokens of all entries one after another, no padding.

    Attributes:
        token_ids, positions: ``[num_tokens]`` int64.
        slot_mappings: for each group of layers ``[num_tokens]`` int64, where each token's K and V go:
            ``block_id * block_size + offset``.
        block_tables: for each group ``[n, max_blocks]`` int32, as far as the longest context goes.
        cu_query_lens: ``[n + 1]`` int32, cumulative numbers of tokens, from 0.
        context_lens: ``[n]`` int32, tokens of the sequence once these are computed.
        logits_indices: ``[num_sampled]`` int64, increasing, tokens whose logits are wanted: the last ones of their entry.
        cu_logits_lens: ``[n + 1]`` int32, cumulative numbers of these, from 0.
        max_query_len, max_logits_len, max_context_len: the largest of each.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: list[Tensor]
    block_tables: list[Tensor]
    cu_query_lens: Tensor
    context_lens: Tensor
    logits_indices: Tensor
    cu_logits_lens: Tensor
    max_query_len: int
    max_logits_len: int
    max_context_len: int


def step_layout(
    entries: Tensor,
    num_decodes: int,
    token_ids: Tensor,
    block_tables: Tensor,
    last_token_ids: Tensor,
    block_size: int,
    *,
    backend: Backend,
) -> StepLayout:
    """Lay out the tokens of a step.

    Args:
        entries: ``[4, n]`` int64 on the host, n at least 1. Of each: its row, how many of its tokens are computed already,
            how many are now (at least 1), and of how many of these, counted from the last, logits are wanted.
        num_decodes: entries at the beginning that compute one token each, the last of their row.
        token_ids: those of the others, int64 on the host.
        block_tables: ``[num_groups, num_rows, max_blocks]`` int32, contiguous.
        last_token_ids: ``[num_rows]`` int64, contiguous, beside ``block_tables``; a negative one stands for token 0.
    Returns:
        Tensors beside ``block_tables``.
    Raises:
        ValueError: a shape or dtype is not as above, or there are more or fewer token ids than tokens.
        IndexError: an entry has a row that is not there, or no tokens, or its blocks go past the tables.
    """
    if backend.name == "cpp":  # which makes these checks itself
        return StepLayout(*_cpp()(entries, num_decodes, token_ids, block_tables, last_token_ids, block_size))
    check_shape("entries", entries, 4, None)
    check_dtype("entries", entries, torch.int64)
    check_contiguous("entries", entries)
    check_shape("token_ids", token_ids, None)
    check_dtype("token_ids", token_ids, torch.int64)
    check_shape("block_tables", block_tables, None, None, None)
    check_dtype("block_tables", block_tables, torch.int32)
    check_contiguous("block_tables", block_tables)
    check_shape("last_token_ids", last_token_ids, block_tables.shape[1])
    check_dtype("last_token_ids", last_token_ids, torch.int64)
    check_contiguous("last_token_ids", last_token_ids)
    if backend.name == "triton":
        from flyball_kernels.step_layout import kernel  # triton is there on Linux only

        return StepLayout(
            *kernel.step_layout(entries, num_decodes, token_ids, block_tables, last_token_ids, block_size)
        )
    return StepLayout(*reference.step_layout(entries, num_decodes, token_ids, block_tables, last_token_ids, block_size))


@cache
def _cpp() -> Any:
    return torch.ops.flyball.step_layout  # to find it takes as long as a part of the op
