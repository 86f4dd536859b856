"""What the layout of a step means, in numpy and torch."""

import numpy as np
import torch
from torch import Tensor


def step_layout(
    entries: Tensor, num_decodes: int, token_ids: Tensor, block_tables: Tensor, last_token_ids: Tensor, block_size: int
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor, Tensor, Tensor, int, int, int]:
    check(entries, num_decodes, token_ids, block_tables, block_size)
    rows, starts, query_lens, num_sampled = entries.numpy()
    context_lens = starts + query_lens
    device = block_tables.device
    ends, sampled_ends = np.cumsum(query_lens), np.cumsum(num_sampled)
    num_tokens, max_context_len = int(ends[-1]), int(context_lens.max())
    num_blocks = -(-max_context_len // block_size)
    entry_of_token = np.repeat(np.arange(len(rows)), query_lens)
    positions = np.arange(num_tokens) - (ends - query_lens)[entry_of_token] + starts[entry_of_token]
    left = np.repeat(sampled_ends, num_sampled) - np.arange(num_sampled.sum())

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    table_entries = there(entry_of_token * num_blocks + positions // block_size)
    offsets, on_device = there(positions % block_size), there(rows)
    tables = [table[:, :num_blocks].index_select(0, on_device) for table in block_tables]
    decoded = last_token_ids.index_select(0, on_device[:num_decodes]).clamp_(min=0)
    return (
        torch.cat((decoded, there(token_ids.numpy()))) if len(token_ids) else decoded,
        there(positions),
        [table.view(-1).index_select(0, table_entries).long() * block_size + offsets for table in tables],
        tables,
        there(np.concatenate(([0], ends)).astype(np.int32)),
        there(context_lens.astype(np.int32)),
        there(np.repeat(ends, num_sampled) - left),
        there(np.concatenate(([0], sampled_ends)).astype(np.int32)),
        int(query_lens.max()),
        int(num_sampled.max()),
        max_context_len,
    )


def check(entries: Tensor, num_decodes: int, token_ids: Tensor, block_tables: Tensor, block_size: int) -> None:
    """Raise if an entry cannot be, as the public op says."""
    _, num_rows, max_blocks = block_tables.shape
    if entries.shape[1] == 0:
        raise ValueError("a step has at least one entry")
    rows, starts, query_lens, num_sampled = entries.numpy()
    max_len = max_blocks * block_size
    outside = (rows < 0) | (rows >= num_rows) | (starts < 0) | (query_lens < 1) | (starts > max_len - query_lens)
    if outside.any():
        at = outside.argmax()
        raise IndexError(
            f"entry {at} computes {query_lens[at]} tokens behind {starts[at]} in row {rows[at]}; there are {num_rows} rows "
            f"of up to {max_len} tokens."
        )
    wrong = (num_sampled < 0) | (num_sampled > query_lens)
    wrong[:num_decodes] |= query_lens[:num_decodes] != 1
    if wrong.any():
        at = wrong.argmax()
        raise IndexError(f"entry {at} computes {query_lens[at]} tokens and wants logits of {num_sampled[at]}")
    num_given = int(query_lens[num_decodes:].sum())
    if len(token_ids) != num_given:
        raise ValueError(f"token_ids has {len(token_ids)} tokens; the entries but the decodes compute {num_given}.")
