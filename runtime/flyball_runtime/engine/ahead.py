"""Several tokens of each sequence in one call of the model, where nobody has to see them in between."""

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.rows import Rows, entries_of
from flyball_runtime.model.sampler import SamplingTensors
from flyball_runtime.model.transformer import CausalLM, KVTensors
from flyball_runtime.scheduler import BatchPlan


class DecodesAhead:
    """Runs plans that decode the same sequences, each a token further on than the one before.

    It knows by itself which tokens end a sequence, so none is computed for longer than it needs.

    Args:
        model: one that ``can_decode``.
        kv: its caches.
        rows: block tables and last tokens.
        sampling: settings of the rows.
        eos_token_ids: end a sequence unless it ignores them.
        num_rows: most sequences that run at once.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVTensors,
        rows: Rows,
        sampling: SamplingTensors,
        eos_token_ids: frozenset[int],
        num_rows: int,
    ) -> None:
        self._model, self._kv, self._rows, self._sampling = model, kv, rows, sampling
        self._eos_token_ids = eos_token_ids
        self._stops: list[Collection[int]] = [()] * num_rows
        self._has_strings = [False] * num_rows  # which end it too, and only text shows them

    def set_row(self, row: int, sampling: SamplingParams) -> None:
        """Take over what ends the sequence that now owns a row."""
        self._stops[row] = sampling.stops(self._eos_token_ids)
        self._has_strings[row] = bool(sampling.stop)

    def can_run(self, plan: BatchPlan) -> bool:
        """Return whether a plan decodes and does nothing else, with rows that only choose tokens."""
        if plan.num_decodes < len(plan.rows) or plan.row_starts or plan.row_tokens:
            return False
        if plan.block_copies or plan.swap_outs or plan.swap_ins:
            return False
        return self._sampling.only_choose(plan.rows) and not any(self._has_strings[row] for row in plan.rows)

    def run(self, plans: Sequence[BatchPlan]) -> Tensor:
        """Run plans that ``can_run``, of the same rows, each a token further on.

        Returns:
            ``[len(plans), num_rows]`` int64 token ids: NO_TOKEN behind the one that ended a sequence, and where logits give
            none.
        """
        for plan in plans:
            self._rows.apply(plan)
        last = plans[-1]  # its blocks are those of all
        inputs = self._rows.inputs(last, entries_of(last))
        stops, sampling = [self._stops[row] for row in last.rows], self._sampling.choice_of(np.array(last.rows))
        token_ids = self._model.decode(inputs, self._kv, len(plans), stops, sampling)
        self._rows.remember(last.rows, token_ids[-1])
        return token_ids
