"""Log probabilities of prompt tokens, as the model gives them, for the entries of a step that ask for them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from flyball_runtime.core.prompt_span import PromptSpan
from flyball_runtime.core.request import TokenLogprobs
from flyball_runtime.core.sampling_params import MIN_LOGPROB

SLICE_BYTES = 64 * 2**20
"""Logits that are there at a time: those of a prompt of 2000 tokens, in a vocabulary of 150,000, would take 1.2 GB."""

LogitsOf = Callable[[Tensor], Tensor]
"""Takes indices of a step's tokens, ``[n]`` int64; returns their logits, ``[n, vocab]`` fp32."""


class PromptLogprobs:
    """Those of one step. Scored while its hidden states are there, read when it is collected.

    Args:
        spans: the plan's.
        first: index of each one's first token among all of the step's.
        after_slice: called after each slice of logits.
    """

    def __init__(
        self,
        spans: Sequence[PromptSpan],
        first: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
        after_slice: Callable[[], object],
    ) -> None:
        self._spans = spans
        self._num_rows = max(1, SLICE_BYTES // (4 * vocab_size))
        self._num_top = min(vocab_size, max(span.num_top for span in spans))
        self._after_slice = after_slice
        targets = [np.frombuffer(span.targets, np.uint32).astype(np.int64) for span in spans]
        indices = np.concatenate([np.arange(len(ids)) + at for ids, at in zip(targets, first, strict=True)])
        self._indices = torch.from_numpy(indices).to(device, non_blocking=True)
        self._targets = torch.from_numpy(np.concatenate(targets)).to(device, non_blocking=True)
        self._columns: list[Tensor] = []

    def score(self, logits_of: LogitsOf) -> None:
        """Compute them, slice by slice."""
        slices = []
        for indices, targets in zip(
            self._indices.split(self._num_rows), self._targets.split(self._num_rows), strict=True
        ):
            slices.append(_scores(logits_of(indices), targets, self._num_top))
            self._after_slice()
        self._columns = [torch.cat(parts) for parts in zip(*slices, strict=True)]

    def to_host(self) -> None:
        """Have them copied from a GPU, without waiting."""
        self._columns = [
            torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
            for one in self._columns
        ]

    def by_entry(self) -> dict[int, list[TokenLogprobs]]:
        """Return, by entry of the plan, those of its prompt's tokens, in order."""
        rows = zip(*(one.tolist() for one in self._columns), strict=True)
        found: dict[int, list[TokenLogprobs]] = {}
        for span in self._spans:
            found[span.entry] = [
                TokenLogprobs(token_id, logprob, top_ids[: span.num_top], top_logprobs[: span.num_top], rank)
                for token_id, (logprob, rank, top_ids, top_logprobs) in zip(
                    np.frombuffer(span.targets, np.uint32).tolist(), rows, strict=False
                )
            ]
        return found


def _scores(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log probabilities and ranks of the targets, and ids and log probabilities of the likeliest tokens."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, targets.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(num_top)
    return (
        (chosen - total).squeeze(1).clamp(min=MIN_LOGPROB),
        ranks,
        top.indices,
        (top.values - total).clamp(min=MIN_LOGPROB),
    )
