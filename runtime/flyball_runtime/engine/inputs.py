"""From an immutable plan to the tensors of one step."""

import numpy as np
import torch

from flyball_runtime.model.inputs import StepInputs
from flyball_runtime.scheduler.batch import BatchPlan

NOBODY = -1
"""The arrival index of no sequence."""


class InputBuilder:
    """Keeps block tables by row between steps, so that a step copies only the tables that changed.

    A sequence owns row ``sequence.row`` while it runs. Decodes, the bulk of a busy batch, are built without touching
    their token lists: a decode's input is the sequence's last token, which waits in ``_last_token_ids``.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._last_token_ids = np.zeros(max_num_seqs, dtype=np.int64)
        # Which blocks a row holds: the sequence's arrival index, its preemptions (a resumed one has new blocks) and how
        # many are copied. Not the sequence itself, which would then live on after its end.
        self._copied: list[tuple[int, int, int]] = [(NOBODY, 0, 0)] * max_num_seqs

    def build(self, plan: BatchPlan) -> StepInputs:
        """Lay out the plan's tokens one sequence after the other, without padding."""
        rows = self._refresh_block_tables(plan)
        starts = np.fromiter(plan.starts, dtype=np.int64, count=len(rows))
        query_lens = np.fromiter(plan.num_scheduled, dtype=np.int64, count=len(rows))
        cu_query_lens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_query_lens[1:])
        context_lens = starts + query_lens
        max_context_len = int(context_lens.max())

        sequence_of_token = np.repeat(np.arange(len(rows)), query_lens)
        positions = np.arange(plan.num_tokens) - cu_query_lens[sequence_of_token] + starts[sequence_of_token]
        block_tables = self._block_tables[rows, : -(-max_context_len // self._block_size)]
        block_ids = block_tables[sequence_of_token, positions // self._block_size].astype(np.int64)
        slot_mapping = block_ids * self._block_size + positions % self._block_size
        samples = np.fromiter(plan.samples, dtype=bool, count=len(rows))
        return StepInputs(
            token_ids=self._tensor(self._token_ids(plan, rows)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            block_tables=self._tensor(block_tables),
            cu_query_lens=self._tensor(cu_query_lens),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            max_query_len=int(query_lens.max()),
            max_context_len=max_context_len,
            logits_indices=self._tensor(cu_query_lens[1:][samples].astype(np.int64) - 1),
        )

    def remember(self, sampled_rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Keep the tokens just sampled, the inputs of the next step's decodes."""
        self._last_token_ids[sampled_rows] = token_ids

    def _refresh_block_tables(self, plan: BatchPlan) -> np.ndarray:
        rows = []
        for sequence in plan.sequences:
            row = sequence.row
            rows.append(row)
            owner, num_preemptions, num_copied = self._copied[row]
            num_blocks = len(sequence.block_table)
            if owner != sequence.arrival_index or num_preemptions != sequence.num_preemptions:
                num_copied = 0
                self._last_token_ids[row] = sequence.token_ids[-1]
            if num_copied != num_blocks:
                self._block_tables[row, num_copied:num_blocks] = sequence.block_table[num_copied:]
                self._copied[row] = (sequence.arrival_index, sequence.num_preemptions, num_blocks)
        return np.array(rows, dtype=np.int64)

    def _token_ids(self, plan: BatchPlan, rows: np.ndarray) -> np.ndarray:
        num_decodes = plan.num_decodes
        token_ids = np.empty(plan.num_tokens, dtype=np.int64)
        token_ids[:num_decodes] = self._last_token_ids[rows[:num_decodes]]
        at = num_decodes
        for index in range(num_decodes, len(rows)):
            start, num_tokens = plan.starts[index], plan.num_scheduled[index]
            token_ids[at : at + num_tokens] = plan.sequences[index].token_ids[start : start + num_tokens]
            at += num_tokens
        return token_ids

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
