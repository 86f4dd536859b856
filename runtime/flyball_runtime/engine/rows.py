"""What the device keeps for each running sequence, and the tensors of a step."""

import numpy as np
import torch
from torch import Tensor

from flyball_runtime.model.inputs import StepInputs
from flyball_runtime.scheduler import BatchPlan


class Rows:
    """Block table and last token of each row, on the device; a plan's row starts and table writes change them.

    A step copies no block table and no token that the device has already. Decodes, the bulk of a busy batch, take their
    tokens from here, so that the next step can be launched before anybody has seen them.

    Attributes:
        block_tables: ``[max_num_seqs, max_blocks]`` int32; entries that no plan wrote for the row's sequence are not read.
        last_token_ids: ``[max_num_seqs]`` int64.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def apply(self, plan: BatchPlan) -> None:
        """Do what the plan says of rows."""
        if plan.row_starts:
            rows, tokens = np.array([(start.row, start.last_token_id) for start in plan.row_starts], np.int64).T
            self.last_token_ids[self._tensor(rows)] = self._tensor(tokens)
        writes = plan.table_writes
        if writes:
            lens = [len(write.blocks) for write in writes]
            rows = np.repeat(np.array([write.row for write in writes]), lens)
            ends = np.cumsum(lens)
            at = np.arange(ends[-1]) - np.repeat(ends - lens - np.array([write.at for write in writes]), lens)
            blocks = np.concatenate([np.array(write.blocks, np.int32) for write in writes])
            self.block_tables[self._tensor(rows), self._tensor(at)] = self._tensor(blocks)

    def inputs(self, plan: BatchPlan) -> StepInputs:
        """Lay out the plan's tokens one entry after the other, without padding. ``apply`` comes before."""
        num_seqs, num_decodes = len(plan.rows), plan.num_decodes
        starts = np.array(plan.starts, np.int64)
        query_lens = np.array(plan.num_scheduled, np.int64)
        cu_query_lens = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(query_lens, out=cu_query_lens[1:])
        context_lens = starts + query_lens
        max_context_len = int(context_lens.max())
        num_blocks = -(-max_context_len // self._block_size)

        entry_of_token = np.repeat(np.arange(num_seqs), query_lens)
        positions = np.arange(plan.num_tokens) - cu_query_lens[entry_of_token] + starts[entry_of_token]
        samples = np.array(plan.samples, bool)
        table_entries = entry_of_token * num_blocks + positions // self._block_size

        rows = self._tensor(np.array(plan.rows, np.int64))
        block_tables = self.block_tables[:, :num_blocks].index_select(0, rows)
        block_ids = block_tables.view(-1).index_select(0, self._tensor(table_entries))
        token_ids = self.last_token_ids.index_select(0, rows[:num_decodes])
        if plan.token_ids:
            token_ids = torch.cat((token_ids, self._tensor(np.array(plan.token_ids, np.int64))))
        return StepInputs(
            token_ids=token_ids,
            positions=self._tensor(positions),
            slot_mapping=block_ids.long() * self._block_size + self._tensor(positions % self._block_size),
            block_tables=block_tables,
            cu_query_lens=self._tensor(cu_query_lens),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            max_query_len=int(query_lens.max()),
            max_context_len=max_context_len,
            logits_indices=self._tensor(cu_query_lens[1:][samples].astype(np.int64) - 1),
        )

    def remember(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens just sampled, the inputs of the next decodes; a row whose logits gave none goes on with token 0,
        until its sequence has ended."""
        self.last_token_ids.index_copy_(0, rows, token_ids.clamp(min=0))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
