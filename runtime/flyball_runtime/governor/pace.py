"""How much a step computes, so that it takes no longer than it should."""

from math import inf, sqrt
from typing import Protocol

from flyball_protocol import BootPrior, StepModel
from flyball_runtime.governor.drafting import Drafting, DraftingShare
from flyball_runtime.governor.learner import StepTimeLearner
from flyball_runtime.governor.work import Work

MIN_CHUNK = 16
"""Prompt tokens that a step computes however long it takes, so that a prompt once begun goes on."""

CHUNK_MULTIPLE = 16
"""Chunks that time cuts short have a multiple of this: a step has few kernels to run for a remainder."""

FIRST_CHUNK = 128
"""Largest chunk beside decodes before larger ones were learned from; from then on, twice the largest."""

NEXT_TO_NOTHING = 1.02
"""Times what a step takes: what it may grow by beside a target that it misses anyway."""


class Planned(Protocol):
    """A step, as far as it is planned: ``scheduler.Step``, or a whole ``BatchPlan``."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_decodes(self) -> int: ...

    @property
    def num_context_tokens(self) -> int: ...

    @property
    def prefill_work(self) -> int: ...


def work_of(step: Planned) -> Work:
    return Work(step.num_tokens - step.num_decodes, step.num_decodes, step.num_context_tokens, int(step.prefill_work))


class Governor:
    """Learns the step time, and says what fits into a step-time target. Without a target all does; learning goes on.

    A time is what passes between the tokens of two steps, so it includes what the engine does between them. Predicted
    times get the learner's margin on top.

    Args:
        prior: model of a runtime of the same key.

    Attributes:
        target_s: the step time to stay within; None: no target.
    """

    def __init__(self, prior: StepModel | None = None) -> None:
        self.target_s: float | None = None
        self._learner = StepTimeLearner(prior)
        self._drafting = DraftingShare()
        self._first_chunk = FIRST_CHUNK if prior is None else 1 << 30
        self._largest_chunk = 0

    @property
    def model(self) -> StepModel | None:
        """What has been learned; None before the first step without a prior."""
        return self._learner.model

    @property
    def num_steps(self) -> int:
        """Learned from."""
        return self._learner.num_steps

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step. The caller leaves out those that took their time for another reason than their work."""
        self._largest_chunk = max(self._largest_chunk, work.prefill_tokens)
        self._learner.observe(work, seconds)

    def observe_drafting(self, drafting: Drafting, seconds: float) -> None:
        """Learn what the passes of a draft model took, which are left out of the time that ``observe`` gets; 0.0: none ran."""
        if not seconds:
            self._drafting.skip()
        elif (expected_s := self._passes_s(drafting)) > 0.0:
            self._drafting.observe(seconds / expected_s)

    def prefill_s(self, start: int, end: int) -> float | None:
        """Return the seconds that tokens ``[start, end)`` of a prompt add to full steps; None until that is settled."""
        model = self._learner.model
        if model is None or not model.settled or not model.token_s:
            return None
        num_pairs = (end - start) * (start + end + 1) // 2
        return model.token_s * (end - start) + model.attention_pair_s * num_pairs

    def predict(self, work: Work) -> float | None:
        """Return the seconds that a step is expected to take, None before anything is known. Drafting comes on top."""
        model = self._learner.coefficients
        return None if model is None else model.predict(*work)

    def drafting_s(self, drafting: Drafting) -> float:
        """Return the seconds that drafting is expected to add to a step; 0.0 without a draft model, or if nothing is known."""
        share = self._drafting.share
        return share * self._passes_s(drafting) if share else 0.0

    def _passes_s(self, drafting: Drafting) -> float:
        """Return what the served model would take for the passes of a draft model; 0.0 if nothing is known."""
        num_drafted, num_drafts, start = drafting
        model = self._learner.coefficients
        if model is None or not num_drafts:
            return 0.0
        num_passes = -(-num_drafts // num_drafted)
        return num_passes * model.predict(0, num_drafted, num_drafted * start, 0)

    def drafts(self, step: Planned, num_drafted: int, most: int) -> int:
        """Return how many drafts, of so many for some of the decodes, a step has time for.

        Args:
            step: what is planned so far, all its decodes included.
            num_drafted: decodes that get some.
            most: of all of them together.
        """
        start = step.num_context_tokens // max(1, step.num_decodes)
        return self.chunk(step, start, most, spent_s=self.drafting_s(Drafting(num_drafted, most, start)))

    def chunk(self, step: Planned, start: int, most: int, least: int = 0, spent_s: float = 0.0) -> int:
        """Return how many more prompt tokens of one sequence a step has time for.

        A step without decodes delays no stream, so it has time for all.

        Args:
            step: what is planned so far, all its decodes included.
            start: tokens of the sequence that are computed.
            most: what is left of it and of the token budget.
            least: what the step computes however long it takes, if ``most`` allows.
            spent_s: what the step takes beside its tokens.
        """
        if self.target_s is None or not step.num_decodes or most <= 0:
            return most
        work, least = work_of(step), min(least, most)
        known = max(self._first_chunk, 2 * self._largest_chunk) - work.prefill_tokens
        high = min(most, max(known, least))
        model = self._learner.coefficients
        if model is None:
            return high
        available_s = self._available_s(self.target_s, model, step.num_decodes, step.num_context_tokens)
        # Where decodes alone miss the target, tokens below the knee are still free. Chunks that are planned are no part of this
        # bound: with many prompts, it would grow with each of them.
        free_s = NEXT_TO_NOTHING * model.predict(0, work.decodes, work.context_tokens, 0)
        low = _most_tokens(model, work, start, high, max(available_s, free_s) - spent_s)
        if low < most:
            low -= low % CHUNK_MULTIPLE
        return max(low, least)

    def fits(self, num_decodes: int, num_context_tokens: int) -> bool:
        """Return whether so many sequences can decode within the target, beside the smallest chunk of a prompt.

        Args:
            num_decodes: all running sequences, those whose prompts are not computed yet and the one to admit included.
            num_context_tokens: their tokens.
        """
        model = self._learner.coefficients
        if self.target_s is None or model is None or num_decodes <= 1:
            return True
        chunk = self._least_chunk
        seconds = model.predict(chunk, num_decodes, num_context_tokens, chunk * chunk)
        return seconds <= self._available_s(self.target_s, model, num_decodes, num_context_tokens)

    def first_token_s(self, step: Planned, num_tokens: int, most: int | None = None) -> float:
        """Return the seconds in which so many prompt tokens are computed beside a step's decodes; 0.0 if nothing is known.

        They take as many steps as they have to, under a target and by what a step may compute.

        Args:
            most: prompt tokens in one step; None: all.
        """
        model = self._learner.coefficients
        if model is None or num_tokens <= 0:
            return 0.0
        decodes, context = step.num_decodes, step.num_context_tokens
        chunk = num_tokens if most is None else min(num_tokens, max(1, most))
        if self.target_s is not None and decodes:
            available_s = self._available_s(self.target_s, model, decodes, context)
            paced = _most_tokens(model, Work(0, decodes, context, 0), num_tokens // 2, chunk, available_s)
            chunk = max(paced, min(MIN_CHUNK, chunk))
        num_steps = -(-num_tokens // chunk)
        return num_steps * model.predict(chunk, decodes, context, chunk * (num_tokens + 1) // 2)

    def tokens_per_s(self, step: Planned, num_drafted: int, num_drafts: int, num_accepted: float) -> float | None:
        """Return how many tokens a second the decodes of a step give; None if its time is not known.

        Args:
            step: without drafts, one token of each of its decodes.
            num_drafted: how many of the decodes get drafts, ``num_drafts`` together.
            num_accepted: how many more tokens the step gives with them.
        """
        model = self._learner.coefficients
        if model is None:
            return None
        work, start = work_of(step), step.num_context_tokens // max(1, step.num_decodes)
        num_tokens = num_drafted + num_drafts
        seconds = model.predict(
            work.prefill_tokens + num_tokens,
            work.decodes - num_drafted,
            work.context_tokens - num_drafted * start,
            work.attention_pairs + num_tokens * start,
        )
        seconds += self.drafting_s(Drafting(num_drafted, num_drafts, start))
        return (work.decodes + num_accepted) / seconds if seconds > 0.0 else None

    @property
    def _least_chunk(self) -> int:
        """Smallest chunk of a prompt; that of the largest prompt so far if all were shorter, as no more is learned of."""
        return min(MIN_CHUNK, self._largest_chunk or MIN_CHUNK)

    def _available_s(self, target_s: float, model: StepModel, decodes: int, context_tokens: int) -> float:
        """Return the time that a step may be predicted to take.

        That is the target less a margin, if one sequence beside the smallest chunk of a prompt can keep it. No useful step
        can keep a shorter target: it would cost throughput for a latency that is missed all the same.

        Args:
            decodes, context_tokens: of the sequences that are to run, whose mean context one sequence alone would have.
        """
        chunk = self._least_chunk
        least_s = model.predict(chunk, 1, context_tokens // max(1, decodes), chunk * chunk)
        kept_s = target_s / (1.0 + self._learner.margin)
        return kept_s if kept_s >= least_s else max(least_s, model.efficient_s)


def usable_prior(prior: BootPrior | None, key: str) -> tuple[StepModel | None, str]:
    """Return the prior's model if it is of this key; else None, and why it is refused, if there is one."""
    if prior is None or prior.step_model is None:
        return None, ""
    if prior.key != key:
        return None, f"the boot prior's step-time model is of {prior.key!r}, and this runtime is {key!r}"
    return prior.step_model, ""


def _most_tokens(model: StepModel, work: Work, start: int, most: int, seconds: float) -> int:
    """Return the most prompt tokens from ``start`` on with which a step takes no longer than this.

    ``n`` tokens add ``linear * n + square * n**2``, and above the knee ``token_s`` for each one on top. The second form is
    below the first one up to the knee, so the largest ``n`` is the smaller of the two roots.
    """
    prefill, decodes, context, pairs = work
    left_s = seconds - model.predict(prefill, decodes, context, pairs)
    if left_s < 0.0:
        return 0
    square = 0.5 * model.attention_pair_s
    linear = model.attention_pair_s * (start + 0.5) + model.interaction_s * decodes
    token_s, free_tokens = model.token_s, max(0.0, model.knee_tokens - prefill - decodes)
    above_s = left_s + token_s * free_tokens
    return int(min(most, _root(square, linear, left_s), _root(square, linear + token_s, above_s)))


def _root(square: float, linear: float, value: float) -> float:
    """Return the largest ``n`` with ``square * n**2 + linear * n <= value``, of which nothing is negative; inf if all are."""
    slope = linear + sqrt(linear * linear + 4.0 * square * value)
    return 2.0 * value / slope if slope > 0.0 else inf
