"""Grammars of running sequences: masks of the tokens that may come next, advanced by the sampled ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from flyball_protocol.quoting import one_line
from flyball_runtime.grammar.compiler import CompiledGrammar

MAX_REASON_CHARS = 200


class GrammarRow:
    """The position of one sequence in its grammar."""

    def __init__(self, compiled: CompiledGrammar, output_token_ids: Sequence[int]) -> None:
        """Begin after the output so far, which is empty unless the sequence was preempted."""
        self.matcher = compiled.matcher()
        self.num_words = compiled.num_words
        self.matcher.consume_tokens(list(output_token_ids))
        self._mask = np.zeros(0, np.int32)

    def take(self, mask: np.ndarray) -> str:
        """Store the mask of the next token, ``[num_words]``; return why no token is allowed, or "".

        llguidance allows the end of a sequence when it cannot follow a grammar any further. Here no token is allowed then.
        """
        self._mask = mask
        if not self.matcher.is_error():
            return ""
        mask[:] = 0
        return f"the grammar became too complex to follow ({one_line(self.matcher.get_error(), MAX_REASON_CHARS)})"

    def allows_only(self, token_ids: np.ndarray) -> bool:
        """Return whether all tokens that may come next are among these int64 ids."""
        others = self._mask.copy()
        np.bitwise_and.at(others, token_ids // 32, ~(np.int32(1) << (token_ids % 32).astype(np.int32)))
        return not others.any()


class _Sampled(NamedTuple):
    """Tokens that are being copied to the host; ``done`` is None if they are there already."""

    rows: list[GrammarRow]
    token_ids: Tensor
    done: torch.cuda.Event | None


class GrammarMasks:
    """Fills the masks of a step, and advances the grammars by the tokens that it samples.

    On a GPU, filling the next masks waits for the sampled tokens; by then the next step's kernels are running. On a CPU, which
    runs one step after the other, masks are filled right before they are used.
    """

    def __init__(self) -> None:
        self._executor = LLExecutor()
        self._sampled: _Sampled | None = None

    def fill(self, rows: Sequence[GrammarRow]) -> tuple[np.ndarray, dict[int, str]]:
        """Return ``[len(rows), num_words]`` int32 masks, and the reasons of rows for which no token is allowed, by index."""
        self.catch_up()
        masks = np.empty((len(rows), rows[0].num_words), np.int32)
        matchers = [(row.matcher, index) for index, row in enumerate(rows)]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(rows))
        reasons = {index: row.take(masks[index]) for index, row in enumerate(rows)}
        return masks, {index: reason for index, reason in reasons.items() if reason}

    def sampled(self, rows: list[GrammarRow], token_ids: Tensor) -> None:
        """Note the tokens that these rows got, ``[len(rows)]``; a negative id means no token."""
        if token_ids.device.type != "cuda":
            self._sampled = _Sampled(rows, token_ids, None)
            return
        host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._sampled = _Sampled(rows, host, done)

    def catch_up(self) -> None:
        """Advance the grammars by the tokens that were sampled last."""
        if self._sampled is None:
            return
        rows, token_ids, done = self._sampled
        self._sampled = None
        if done is not None:
            done.synchronize()
        for row, token_id in zip(rows, token_ids.tolist(), strict=True):
            if token_id >= 0 and not row.matcher.is_error():
                row.matcher.consume_token(token_id)
