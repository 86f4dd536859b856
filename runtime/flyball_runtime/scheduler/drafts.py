"""Drafts: tokens that may come next, guessed from the sequence itself, of which the model verifies several in one step.

A run of last tokens is looked up in what came before them (prompt lookup: Saxena 2023), and what followed it there is
drafted. It costs no model, and helps where an output repeats its prompt or itself. Elsewhere it stops by itself: a sequence
whose drafts are not worth their time is only tried again from time to time, and new sequences begin with what is usual for all.
"""

from array import array
from typing import Any

import numpy as np

from flyball_runtime.core.request import Sequence
from flyball_runtime.core.speculation import SpeculativeConfig

MIN_ACCEPTANCE = 0.15
"""A sequence of whose drafts a smaller share is accepted gets none for a while. Where the step time is known, much more may be
asked for (see ``Outlook.num_worth``)."""

PAUSE_TOKENS = 32
"""Tokens that such a sequence gets before a trial: drafts that are worth their time if all of them are accepted."""

TRIAL_SEQUENCES = 8
"""One new sequence of so many begins with a trial. Outputs that end before a pause does would never get one."""

TRIAL_WEIGHT = 0.5
SEQUENCE_WEIGHT = 0.2
ALL_WEIGHT = 0.02
"""Weight of the latest verification in the mean of its sequence (a trial ends a time without any), and in that of all."""

FIRST_ACCEPTANCE = 0.5

MAX_OCCURRENCES = 1024
"""Earlier places of the last token that are looked at, the latest ones. A prompt of equal tokens takes no longer for it."""


class Drafter:
    """Drafts tokens, and learns for which sequences it is worth it.

    Attributes:
        acceptance: mean share of drafted tokens that are accepted, of all sequences; where new ones begin.
        max_batch_size: nothing is to be drafted while more sequences run.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._num_begun = 0
        self.acceptance = FIRST_ACCEPTANCE
        self.max_batch_size = config.disable_by_batch_size

    def draft(self, seq: Sequence) -> "array[int]":
        """Return what may follow the tokens of a sequence that decodes, all of them known; often nothing."""
        if seq.draft_acceptance is None:
            self._begin(seq)
        if len(seq.token_ids) < seq.min_tokens_to_draft or not seq.sampling.allows_drafts:
            return array("I")
        # the model gives one more token, behind the last draft
        most = min(self._config.num_speculative_tokens, seq.max_total_tokens - len(seq.token_ids) - 1)
        if self._config.model is not None:
            return array("I", [0] * most)  # places, which the executor's draft model fills
        return look_up(seq.token_ids, self._config.shortest_lookup, self._config.longest_lookup, most)

    def expected(self, seq: Sequence) -> float:
        """Return which share of a sequence's drafts to expect the model to accept: all in a trial."""
        return 1.0 if _is_trial(seq) else self._acceptance_of(seq)

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Take in how many of the drafts were accepted."""
        share = num_accepted / num_drafts
        weight = TRIAL_WEIGHT if _is_trial(seq) else SEQUENCE_WEIGHT
        before = self._acceptance_of(seq)
        seq.draft_acceptance = before + weight * (share - before)
        self.acceptance += ALL_WEIGHT * (share - self.acceptance)
        seq.min_tokens_to_draft = 0
        self._pause_if_poor(seq)

    def pause(self, seq: Sequence) -> None:
        """Draft nothing for a while, because it is not worth its time."""
        seq.min_tokens_to_draft = len(seq.token_ids) + PAUSE_TOKENS

    def _begin(self, seq: Sequence) -> None:
        seq.draft_acceptance = self.acceptance
        self._num_begun += 1
        if self._num_begun % TRIAL_SEQUENCES == 0:
            seq.min_tokens_to_draft = len(seq.token_ids)
        else:
            self._pause_if_poor(seq)

    def _acceptance_of(self, seq: Sequence) -> float:
        return self.acceptance if seq.draft_acceptance is None else seq.draft_acceptance

    def _pause_if_poor(self, seq: Sequence) -> None:
        if self._acceptance_of(seq) < MIN_ACCEPTANCE:
            self.pause(seq)


def _is_trial(seq: Sequence) -> bool:
    """Return whether drafts of a sequence are the first ones after a pause."""
    return seq.min_tokens_to_draft > 0


def look_up(token_ids: "array[int]", shortest: int, longest: int, most: int) -> "array[int]":
    """Return up to ``most`` tokens that followed the last tokens where these occurred before.

    The longest run of ``longest`` to ``shortest`` last tokens that occurred counts, in its latest occurrence. If that is so
    late that too few tokens follow, they are repeated, as in LZ77.
    """
    behind = _behind_latest(np.frombuffer(token_ids, np.uint32), shortest, longest) if most > 0 else None
    if behind is None:
        return array("I")
    period = token_ids[behind : behind + most]
    return (period * -(-most // len(period)))[:most]


def _behind_latest(tokens: "np.ndarray[Any, np.dtype[np.uint32]]", shortest: int, longest: int) -> int | None:
    """Return the index behind the latest earlier occurrence of the longest run of last tokens that has one."""
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])[-MAX_OCCURRENCES:]
    found = None
    for length in range(1, longest + 1):
        ends = ends[ends >= length - 1]
        if ends.size:
            ends = ends[tokens[ends - length + 1] == tokens[-length]]
        if not ends.size:
            break
        if length >= shortest:
            found = int(ends[-1]) + 1
    return found
