"""What a step computes, as far as its time depends on it."""

from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    """Counts of one step; see ``StepModel.predict``."""

    prefill_tokens: int
    decodes: int
    context_tokens: int
    attention_pairs: int

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decodes


SCALES = np.array((1.0, 256.0, 2.0**16, 2.0**18))
"""Typical sizes of the features (1, tokens, context tokens, attention pairs): divided by them, all are of the same order."""
