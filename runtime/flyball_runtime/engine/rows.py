"""Block tables and last tokens on the device, and the tensors of a step."""

import numpy as np
import torch
from torch import Tensor

from flyball_runtime.model.transformer import StepInputs
from flyball_runtime.scheduler import BatchPlan


class Rows:
    """Block tables and last token of each row, on the device; a plan's row starts and table writes change them.

    A step copies no block table and no token that the device has already. Decodes, the bulk of a busy batch, take their
    tokens from here, so that the next step can be launched before anybody has seen them.

    Attributes:
        block_tables: ``[num_groups, max_num_seqs, max_blocks]`` int32; entries that no plan wrote for the row's sequence
            are not read.
        last_token_ids: ``[max_num_seqs]`` int64.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self._block_size = block_size
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = torch.zeros(num_groups, max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def apply(self, plan: BatchPlan) -> None:
        """Do what the plan says of rows."""
        last = [(start.row, start.last_token_id) for start in plan.row_starts]
        last += [(one.row, one.token_id) for one in plan.row_tokens]
        if last:
            rows, tokens = np.array(last, np.int64).T
            self.last_token_ids[self._tensor(rows)] = self._tensor(tokens)
        writes = plan.table_writes
        if writes:
            lens = [len(write.blocks) for write in writes]
            groups, rows = np.repeat(np.array([(write.group, write.row) for write in writes]).T, lens, axis=1)
            ends = np.cumsum(lens)
            at = np.arange(ends[-1]) - np.repeat(ends - lens - np.array([write.at for write in writes]), lens)
            blocks = np.concatenate([np.array(write.blocks, np.int32) for write in writes])
            self.block_tables[self._tensor(groups), self._tensor(rows), self._tensor(at)] = self._tensor(blocks)

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
        logits_indices = cu_query_lens[1:][np.array(plan.samples, bool)] - 1
        if plan.num_drafts:  # of the last entries, the logits of all tokens are wanted
            num_plain = num_seqs - len(plan.num_drafts)
            drafted = np.arange(cu_query_lens[num_plain], plan.num_tokens)
            logits_indices = np.concatenate((logits_indices[: -len(plan.num_drafts)], drafted))
        table_entries = self._tensor(entry_of_token * num_blocks + positions // self._block_size)
        offsets = self._tensor(positions % self._block_size)

        rows = self._tensor(np.array(plan.rows, np.int64))
        block_tables = tuple(table[:, :num_blocks].index_select(0, rows) for table in self.block_tables)
        block_ids = (table.view(-1).index_select(0, table_entries) for table in block_tables)
        token_ids = self.last_token_ids.index_select(0, rows[:num_decodes])
        if plan.token_ids:
            token_ids = torch.cat((token_ids, self._tensor(np.frombuffer(plan.token_ids, np.uint32).astype(np.int64))))
        return StepInputs(
            token_ids=token_ids,
            positions=self._tensor(positions),
            slot_mappings=tuple(ids.long() * self._block_size + offsets for ids in block_ids),
            block_tables=block_tables,
            cu_query_lens=self._tensor(cu_query_lens),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            max_query_len=int(query_lens.max()),
            max_context_len=max_context_len,
            logits_indices=self._tensor(logits_indices.astype(np.int64)),
        )

    def remember(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens just sampled, the inputs of the next decodes; a row whose logits gave none goes on with token 0,
        until its sequence has ended."""
        self.last_token_ids.index_copy_(0, rows, token_ids.clamp(min=0))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
