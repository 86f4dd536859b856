"""Settings of a beam search, under the names of vLLM and transformers."""

import math
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import InvalidRequest

MAX_LENGTH_PENALTY = 10.0

EarlyStopping = bool | Literal["never"]


class BeamSearch(Struct, frozen=True, kw_only=True):
    """How the likeliest outputs of a prompt are looked for, in the place of sampling.

    Attributes:
        width: outputs that are followed side by side (``num_beams``), and how many are found.
        length_penalty: the score of an output is the sum of its log probabilities over its length to this power. Above 0 it
            favours long outputs.
        early_stopping: when the search ends, once ``width`` outputs have ended. True: at once. False: when the best of the
            others, as long as it is, has no better score than the worst of these. "never": when it could not get one either.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first setting that is out of range."""
        if not 1 <= self.width <= vocab_size // 2:
            raise InvalidRequest(
                f"the width of the beam search, best_of or else n, is {quoted(self.width)}; with a vocabulary of {vocab_size} "
                f"tokens it may be 1 to {vocab_size // 2}.",
                param="best_of",
            )
        if not (math.isfinite(self.length_penalty) and abs(self.length_penalty) <= MAX_LENGTH_PENALTY):
            raise InvalidRequest(
                f"length_penalty is {self.length_penalty}; it must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}.",
                param="length_penalty",
            )

    def check_seats(self, max_num_seqs: int) -> None:
        """Raise InvalidRequest if an engine never runs so many sequences side by side."""
        if self.width > max_num_seqs:
            raise InvalidRequest(
                f"the width of the beam search, best_of or else n, is {self.width}, and this replica runs at most "
                f"{max_num_seqs} sequences side by side (--max-num-seqs). Lower it.",
                param="best_of",
            )

    def num_candidates(self, stop_token_ids: Collection[int]) -> int:
        """Return how many of the likeliest tokens behind a beam are looked at: enough that ``width`` of them do not end it."""
        return self.width + len(stop_token_ids)

    def score(self, logprob: float, num_tokens: int) -> float:
        """Return the score of an output of so many tokens, given the sum of their log probabilities."""
        return float(logprob / num_tokens**self.length_penalty)
