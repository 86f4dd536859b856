"""How the hidden states of a prompt become one vector, as requests and plans say it."""

from typing import Literal

from msgspec import Struct

Pooling = Literal["last", "mean"]
"""The hidden state of a prompt's last token, or the mean of all of them; in both cases after the model's last norm."""


class PoolSpan(Struct, frozen=True, array_like=True):
    """The last tokens of an entry of a plan, whose hidden states are added up.

    Attributes:
        entry: index of the plan's entry.
        at: of the first of them in the sequence.
        num_pooled: tokens that the vector is the mean of, if the prompt ends with this entry; else 0.
    """

    entry: int
    at: int
    num_pooled: int

    @property
    def ends(self) -> bool:
        """Whether the vector is wanted now."""
        return self.num_pooled > 0
