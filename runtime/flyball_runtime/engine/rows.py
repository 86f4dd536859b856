"""Block tables and last tokens on the device, and the tensors of a step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flyball_runtime.model.loader import Backend
from flyball_runtime.model.step_inputs import step_inputs
from flyball_runtime.model.transformer import StepInputs
from flyball_runtime.scheduler import BatchPlan


def entries_of(plan: BatchPlan) -> np.ndarray:
    """Return ``[4, num_entries]`` int64: rows, starts, lengths and samples (0 or 1)."""
    return np.array((plan.rows, plan.starts, plan.num_scheduled, plan.samples), np.int64)


_NO_TOKENS = torch.empty(0, dtype=torch.int64)


class Rows:
    """Block tables and last token of each row, on the device; a plan's row starts and table writes change them.

    A step copies no block table and no token that the device has already. Decodes, the bulk of a busy batch, take their
    tokens from here, so that the next step can be launched before anybody has seen them.

    The C++ ops read what is written here through numpy, number by number or row by row: a step has few to write, and behind the
    weights that it has read, each call of torch and each other function of numpy takes as long as a small op.

    Attributes:
        block_tables: ``[num_groups, max_num_seqs, max_blocks]`` int32; entries that no plan wrote for the row's sequence
            are not read.
        last_token_ids: ``[max_num_seqs]`` int64; negative where the logits gave no token.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        backend: Backend,
        num_groups: int = 1,
    ) -> None:
        self._block_size = block_size
        self._backend = backend
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = torch.zeros(num_groups, max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._host: tuple[np.ndarray, np.ndarray] | None = None
        if backend.name == "cpp":
            self._host = self.block_tables.numpy(), self.last_token_ids.numpy()

    def apply(self, plan: BatchPlan) -> None:
        """Do what the plan says of rows."""
        if self._host is not None:
            block_tables, last_token_ids = self._host
            for start in plan.row_starts:
                last_token_ids[start.row] = start.last_token_id
            for one in plan.row_tokens:
                last_token_ids[one.row] = one.token_id
            for write in plan.table_writes:
                block_tables[write.group, write.row, write.at : write.at + len(write.blocks)] = write.blocks
            return
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

    def inputs(self, plan: BatchPlan, entries: np.ndarray) -> StepInputs:
        """Lay out the plan's tokens one entry after the other, without padding. ``apply`` comes before.

        Args:
            entries: ``entries_of(plan)``.
        """
        if plan.num_drafts:  # of the last entries, the logits of all tokens are wanted
            entries = entries.copy()
            entries[3, -len(plan.num_drafts) :] = entries[2, -len(plan.num_drafts) :]
        token_ids = _NO_TOKENS
        if plan.token_ids:
            token_ids = torch.from_numpy(np.frombuffer(plan.token_ids, np.uint32).astype(np.int64))
        return step_inputs(
            entries,
            plan.num_decodes,
            token_ids,
            self.block_tables,
            self.last_token_ids,
            self._block_size,
            self._backend,
        )

    def remember(self, rows: Sequence[int], token_ids: Tensor) -> None:
        """Keep the tokens just sampled, the inputs of the next decodes."""
        if self._host is not None:
            last_token_ids = self._host[1]
            for row, token_id in zip(rows, token_ids.tolist(), strict=True):
                last_token_ids[row] = token_id
        else:
            self.last_token_ids.index_copy_(0, self._tensor(np.array(rows, np.int64)), token_ids)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
