"""The tensors of one step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One ragged batch: the tokens of all sequences one after another, no padding.

    Attributes:
        token_ids, positions: ``[num_tokens]`` int64.
        slot_mappings: for each group of layers ``[num_tokens]`` int64, where each token's K and V go:
            ``block_id * block_size + offset``.
        block_tables: for each group ``[num_seqs, max_blocks]`` int32; entries past a context's last block, and before a
            window's first, are not read.
        cu_query_lens: ``[num_seqs + 1]`` int32, cumulative numbers of this step's tokens, from 0.
        context_lens: ``[num_seqs]`` int32, tokens in the cache once this step's are written.
        max_query_len, max_context_len: the largest of each.
        logits_indices: ``[num_sampled]`` int64, tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    cu_query_lens: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context_len: int
    logits_indices: Tensor
