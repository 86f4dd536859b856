"""Beam search: which outputs of a prompt are followed, and which are found. The scheduler has them computed.

The search is that of transformers (``generate(num_beams=...)``), for one prompt.
"""

from array import array
from collections.abc import Iterator
from copy import copy
from typing import Literal

import numpy as np
from msgspec import structs

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.request import Hypothesis, Sequence, TokenLogprobs
from flyball_runtime.core.sampling_params import SamplingParams


class Trail:
    """The output of a beam, from its last token back; beams share what they have in common."""

    __slots__ = ("before", "token")

    def __init__(self, token: TokenLogprobs, before: "Trail | None") -> None:
        self.token = token
        self.before = before

    def tokens(self) -> list[TokenLogprobs]:
        """Return the tokens from the first on."""
        trail: Trail | None = self
        backwards = []
        while trail is not None:
            backwards.append(trail.token)
            trail = trail.before
        return backwards[::-1]


class Beam:
    """An output that is followed.

    Attributes:
        token_ids: of prompt and output.
        logprob: of all its output tokens together.
        trail: None before the first output token.
        seq: the running sequence that computes it, and has the same ``token_ids``; None if none does.
        candidates: the likeliest tokens to follow; None until they are computed.
        copies: pairs of blocks: before the next step the first is to be copied into the second.
        has_moved: whether ``seq`` has another block table than the executor knows of.
    """

    __slots__ = ("candidates", "copies", "has_moved", "logprob", "seq", "token_ids", "trail")

    def __init__(self, token_ids: "array[int]", logprob: float = 0.0, trail: Trail | None = None) -> None:
        self.token_ids = token_ids
        self.logprob = logprob
        self.trail = trail
        self.seq: Sequence | None = None
        self.candidates: TokenLogprobs | None = None
        self.copies: list[tuple[int, int]] = []
        self.has_moved = False


class Search:
    """The beam search of one request.

    Attributes:
        root: the request's own sequence: it waits in the queue, computes the prompt and ends with the best output. Further
            beams have sequences of their own while they run.
        sampling: settings for the rows of its sequences.
        beams: those followed; the best first.
        hypotheses: the best outputs that have ended; the best first.
    """

    def __init__(self, root: Sequence, settings: BeamSearch) -> None:
        self.root = root
        self.settings = settings
        self.beams = [Beam(root.token_ids)]
        self.hypotheses: list[Hypothesis] = []
        self._num_told = root.sampling.logprobs or 0
        most = max(settings.num_candidates(root.stop_token_ids), self._num_told)
        self.sampling: SamplingParams = structs.replace(root.sampling, temperature=0.0, logprobs=most)
        self._num_members = 0

    @property
    def running(self) -> list[Sequence]:
        return [beam.seq for beam in self.beams if beam.seq is not None]

    @property
    def idle(self) -> list[Sequence]:
        """Running sequences that have nothing to do until the other beams are computed."""
        return [beam.seq for beam in self.beams if beam.seq is not None and beam.candidates is not None]

    @property
    def is_behind(self) -> bool:
        """Whether a running sequence has more than its last token to compute."""
        return any(seq.num_uncomputed_tokens > 1 for seq in self.running)

    @property
    def missing(self) -> list[Beam]:
        """Beams still to be computed that have no running sequence."""
        return [beam for beam in self.beams if beam.seq is None and beam.candidates is None]

    @property
    def is_computed(self) -> bool:
        """Whether it is known for each beam what may follow."""
        return all(beam.candidates is not None for beam in self.beams)

    def carry(self, beam: Beam, block_size: int) -> Sequence:
        """Return a sequence for a beam that has none: the root, if that does not run, or a further one."""
        seq = self.root
        if seq.row is not None:
            self._num_members += 1
            seq = copy(self.root)
            seq.request_id = f"{self.root.request_id}/{self._num_members}"
            seq.row, seq.block_tables, seq.num_freed_blocks, seq.num_computed_tokens = None, [], [], 0
        seq.token_ids = beam.token_ids
        seq.block_hashes = self.root.block_hashes[: self.root.num_prompt_tokens // block_size]
        return seq

    def finish(self, block_size: int) -> Literal["stop", "length"]:
        """Give the root the best output, and return why that ended."""
        root, best = self.root, self.hypotheses[0]
        root.token_ids = root.token_ids[: root.num_prompt_tokens] + array("I", best.token_ids)
        root.block_hashes = root.block_hashes[: root.num_prompt_tokens // block_size]
        return best.reason

    def advance(self) -> list[tuple[Beam, Beam]]:
        """Return what is followed next, each with the beam that it continues; none when the search is over."""
        length = len(self.beams[0].token_ids) - self.root.num_prompt_tokens + 1
        is_full = self.root.num_prompt_tokens + length >= self.root.max_total_tokens
        children: list[tuple[Beam, Beam]] = []
        for rank, (beam, token_id, logprob) in enumerate(self._best_candidates()):
            is_stop = token_id in self.root.stop_token_ids
            if not is_stop and not is_full:
                token_ids = beam.token_ids + array("I", [token_id])
                children.append((Beam(token_ids, logprob, self._extended(beam, token_id, logprob)), beam))
            elif rank < self.settings.width:
                self._found(beam, token_id, logprob, is_stop)
            if len(children) == self.settings.width:
                break
        return [] if not children or self._is_over(children[0][0].logprob, length) else children

    def _best_candidates(self) -> Iterator[tuple[Beam, int, float]]:
        """Yield beams, tokens that may follow them, and log probabilities of both together; the likeliest first."""
        reported = [beam.candidates for beam in self.beams if beam.candidates is not None]
        ids = np.array([one.top_ids for one in reported])
        logprobs = np.array([one.top_logprobs for one in reported])
        logprobs += np.array([[beam.logprob] for beam in self.beams])
        for index in np.argsort(-logprobs, axis=None, kind="stable"):
            at = divmod(int(index), ids.shape[1])
            yield self.beams[at[0]], int(ids[at]), float(logprobs[at])

    def _found(self, beam: Beam, token_id: int, logprob: float, is_stop: bool) -> None:
        """Keep an output that has ended, if it is one of the best."""
        score = self.settings.score(logprob, len(beam.token_ids) - self.root.num_prompt_tokens + 1)
        if len(self.hypotheses) == self.settings.width and score <= self.hypotheses[-1].score:
            return  # before its tokens are gathered: with wide searches many outputs end in each step
        tokens = self._extended(beam, token_id, logprob).tokens()
        one = Hypothesis(
            token_ids=[token.token_id for token in tokens],
            score=score,
            cum_logprob=logprob,
            reason="stop" if is_stop else "length",
            logprobs=tokens if self.root.sampling.logprobs is not None else [],
        )
        best = sorted([*self.hypotheses, one], key=lambda other: other.score, reverse=True)
        self.hypotheses = best[: self.settings.width]

    def _extended(self, beam: Beam, token_id: int, logprob: float) -> Trail:
        """Return the output of a beam with one more token, and the likeliest in its place, if the request asks for them."""
        one, num = beam.candidates, self._num_told
        assert one is not None, "a beam goes on where its candidates are known"
        token = TokenLogprobs(token_id, logprob - beam.logprob, one.top_ids[:num], one.top_logprobs[:num])
        return Trail(token, beam.trail)

    def _is_over(self, best_logprob: float, length: int) -> bool:
        """Return whether the outputs found are not expected to be bettered by beams of so many output tokens."""
        settings, root = self.settings, self.root
        if len(self.hypotheses) < settings.width:
            return False
        if settings.early_stopping is True:
            return True
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = root.max_total_tokens - root.num_prompt_tokens
        return settings.score(best_logprob, length) <= self.hypotheses[-1].score


def searches(seq: Sequence) -> bool:
    """Return whether a sequence is a beam, or will be."""
    return seq.sampling.beam_search is not None
