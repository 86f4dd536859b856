"""Hidden states of prompts, pooled into one vector each, for the entries of a step that ask for it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from flyball_runtime.core.pooling import PoolSpan

HiddenOf = Callable[[Tensor], Tensor]
"""Takes indices of a step's tokens, ``[n]`` int64; returns their hidden states after the last norm, ``[n, hidden_size]``."""

Sums = dict[int, Tensor]
"""By row, the sum over what earlier steps computed of its prompt, ``[hidden_size]`` fp32."""


class PooledStates:
    """Those of one step. Computed while its hidden states are there, read when it is collected.

    Args:
        spans: the plan's.
        first: index of each one's first token among all of the step's.
        num_tokens: of each.
        rows: of each.
        sums: what the steps before left of the rows; this one goes on from there and leaves its own.
    """

    def __init__(
        self,
        spans: Sequence[PoolSpan],
        *,
        first: Sequence[int],
        num_tokens: Sequence[int],
        rows: Sequence[int],
        sums: Sums,
        device: torch.device,
    ) -> None:
        self._spans = spans
        self._num_tokens = list(num_tokens)
        self._rows = rows
        self._sums = sums
        indices = np.concatenate([np.arange(at, at + num) for at, num in zip(first, num_tokens, strict=True)])
        self._indices = torch.from_numpy(indices).to(device, non_blocking=True)
        self._vectors: Tensor | None = None

    def pool(self, hidden_of: HiddenOf) -> None:
        """Compute them."""
        ended = []
        parts = hidden_of(self._indices).split(self._num_tokens)
        for span, row, part in zip(self._spans, self._rows, parts, strict=True):
            total = part.sum(dim=0, dtype=torch.float32)
            if (before := self._sums.pop(row, None)) is not None:
                total += before
            if span.ends:
                ended.append(total / span.num_pooled)
            else:
                self._sums[row] = total
        self._vectors = torch.stack(ended) if ended else None

    def to_host(self) -> None:
        """Have them copied from a GPU, without waiting."""
        if (vectors := self._vectors) is not None:
            host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            self._vectors = host.copy_(vectors, non_blocking=True)

    def by_entry(self) -> dict[int, bytes | None]:
        """Return, by entry of the plan, the vectors of the prompts that end there; None for one that is not finite."""
        if self._vectors is None:
            return {}
        finite = self._vectors.isfinite().all(dim=1).tolist()
        vectors = (vector.tobytes() for vector in self._vectors.numpy())
        entries = (span.entry for span in self._spans if span.ends)
        return {
            entry: vector if is_finite else None
            for entry, vector, is_finite in zip(entries, vectors, finite, strict=True)
        }
