"""What scheduling knows of the time ahead: how long steps take, how far outputs grow, which deadlines can still be met."""

from collections.abc import Collection, Iterable
from math import inf
from typing import Protocol

from flyball_protocol import Objectives
from flyball_runtime.core.request import Sequence
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler.plan import Step


class Pace(Protocol):
    """Keeps steps within a step-time target: ``governor.Governor``. Decodes run whatever it says."""

    target_s: float | None
    """Set to what the limits say."""

    def chunk(self, step: Step, start: int, most: int, least: int = 0) -> int:
        """Return how many more tokens of a sequence, from ``start`` on, a step has time for."""
        ...

    def drafts(self, step: Step, num_drafted: int, most: int) -> int:
        """Return how many drafts, of so many for some decodes together, a step has time for."""
        ...

    def fits(self, num_decodes: int, num_context_tokens: int) -> bool:
        """Return whether a step has time for so many decodes and the cached tokens that they read."""
        ...


class Forecast(Protocol):
    """What is known about the time ahead."""

    def first_token_s(self, step: Step, num_tokens: int, most: int) -> float:
        """Return the seconds in which so many prompt tokens are computed, ``most`` a step, beside a step's decodes."""
        ...

    def tokens_per_s(self, step: Step, num_drafted: int, num_drafts: int, num_accepted: float) -> float | None:
        """Return how many tokens a second a step's decodes give, if some of them get drafts; None if nothing is known."""
        ...


class Lengths(Protocol):
    """What is known about the lengths of outputs: ``governor.OutputLengths``."""

    def expected_remaining(self, num_output_tokens: int, route: str = "") -> float | None:
        """Return how many more tokens a client's request gets that has so many; None if nothing is known."""
        ...

    def reserve(self, running: Iterable[Sequence]) -> int:
        """Return by how many tokens these will hardly ever grow more before they end."""
        ...


RESERVE_SHARE = 0.1
"""Of what running sequences may still grow by, so much is kept free for them. Some end while others grow, so all of it would
leave a ninth of the throughput unused in a cache that is full; this much takes most preemptions away, and no throughput."""

RESERVE_STEPS = 8
"""Steps between two looks at all that runs; what is admitted between them is added."""

CAUTION_STEPS = 64
"""A preemption has admission leave some blocks free: one for each running sequence, and twice as many with each further one.
Each step gives up one in so many of them. So what was just preempted is not admitted only to be preempted again."""


class Outlook:
    """Judges what admission and prompt chunks may take, by what is known of steps, outputs and deadlines.

    Args:
        chunked: whether a prompt may be computed in several steps. Without it nobody asks ``pace``.
        pace, forecast, lengths: see ``Scheduler``.
    Attributes:
        objectives: their time to the first token is the deadline of requests without one.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        chunked: bool,
        pace: Pace | None = None,
        forecast: Forecast | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self.objectives: Objectives | None = None
        self._kv = kv_cache
        self._chunked = chunked
        self._pace = pace
        self._forecast = forecast
        self._lengths = lengths
        self._caution = 0  # blocks held back after preemptions
        self._num_growth_tokens = 0.0  # what running sequences may still grow by, as of the last look
        self._next_reserve = 0  # the plan before which there is another look
        self._knows_lengths = False

    def set_step_time_target(self, target_ms: float | None) -> None:
        if self._pace is not None:
            self._pace.target_s = None if target_ms is None else target_ms / 1000

    def predict(self, seq: Sequence) -> None:
        """Note what a new sequence is expected to put out, and when its first token is due."""
        most = seq.max_total_tokens - seq.num_prompt_tokens
        expected = self._lengths.expected_remaining(0, seq.client) if self._lengths else None
        self._knows_lengths = expected is not None
        seq.num_predicted_tokens = most if expected is None else min(most, expected)
        ttft_s, e2e_s, objectives = seq.ttft_deadline_s, seq.e2e_deadline_s, self.objectives
        if ttft_s is None and e2e_s is None and objectives is not None:
            ttft_s = objectives.ttft_s
        gap_s = objectives.itl_s if objectives is not None and objectives.itl_s else 0.0
        seq.due_s = seq.arrived_s + min(
            inf if ttft_s is None else ttft_s,
            inf if e2e_s is None else e2e_s - max(0.0, seq.num_predicted_tokens - 1) * gap_s,
        )

    def is_too_late(self, seq: Sequence, step: Step, running: Iterable[Sequence], budget: int, now_s: float) -> bool:
        """Tell whether a waiting sequence would not meet its deadline if it were admitted now.

        Args:
            running: all of whose prompts the rest is computed before this one's.
            budget: tokens of a step.
        """
        if seq.is_late or seq.due_s == inf or seq.num_output_tokens:
            return False
        if now_s > seq.due_s or self._forecast is None:
            return now_s > seq.due_s
        prefills = (one for one in running if one.num_computed_tokens < one.num_prompt_tokens)
        num_tokens = seq.num_prompt_tokens + sum(one.num_prompt_tokens - one.num_computed_tokens for one in prefills)
        return now_s + self._forecast.first_token_s(step, num_tokens, max(1, budget - step.num_decodes)) > seq.due_s

    def num_reserved_blocks(self, running: Iterable[Sequence], number: int) -> int:
        """Return how many blocks admission leaves to what runs, in the ``number``-th plan."""
        if self._lengths is not None and number >= self._next_reserve:
            self._num_growth_tokens = float(self._lengths.reserve(running))
            self._next_reserve = number + RESERVE_STEPS
        return max(self._caution, self._kv.num_blocks_for(round(RESERVE_SHARE * self._num_growth_tokens)))

    def admitted(self, seq: Sequence) -> None:
        """Count what a sequence may grow by, until the next look at all that runs."""
        if self._knows_lengths:
            self._num_growth_tokens += seq.num_predicted_tokens

    def preempted(self, num_running: int) -> None:
        """Have admission leave more blocks free, after a step took some from what ran."""
        self._caution = min(self._kv.capacity, max(num_running, 2 * self._caution))

    def calm_down(self) -> None:
        """Give up some of that caution: a step goes by."""
        self._caution -= -(-self._caution // CAUTION_STEPS)

    def has_time_for(self, seq: Sequence, step: Step, running: Collection[Sequence]) -> bool:
        """Tell whether decodes will stay within the step-time target if this sequence is one of them."""
        if self._pace is None or not running or not self._chunked:
            return True
        prefills = step.sequences[step.num_decodes :]
        num_context_tokens = step.num_context_tokens + sum(len(one.token_ids) for one in prefills) + len(seq.token_ids)
        return self._pace.fits(len(running) + seq.num_seats, num_context_tokens)

    def chunk_len(self, num_remaining: int, budget: int) -> int:
        """Return how much of a prompt's rest the budget allows in one step."""
        if self._chunked:
            return max(0, min(num_remaining, budget))
        return num_remaining if num_remaining <= budget else 0

    def paced(self, step: Step, start: int, num_remaining: int, budget: int, least: int = 0) -> int:
        """Return how much of it budget and step-time target allow."""
        num_tokens = self.chunk_len(num_remaining, budget)
        if self._pace is None or not self._chunked:
            return num_tokens
        return self._pace.chunk(step, start, num_tokens, least)

    def num_worth(self, step: Step, drafts: Collection[tuple[int, float]]) -> int:
        """Return for how many decodes, the first ones, drafts are worth their time: a step then gives most tokens a second.

        Args:
            drafts: how many a decode gets, and how many of them the model is expected to accept. Those go first of which
                the largest share is.
        """
        if self._forecast is None:
            return len(drafts)
        highest, num_worth, num_drafts, num_accepted = self._forecast.tokens_per_s(step, 0, 0, 0.0), 0, 0, 0.0
        if highest is None:
            return len(drafts)
        for num_drafted, (num, accepted) in enumerate(drafts, 1):
            num_drafts += num
            num_accepted += accepted
            tokens_per_s = self._forecast.tokens_per_s(step, num_drafted, num_drafts, num_accepted)
            if tokens_per_s is not None and tokens_per_s > highest:
                highest, num_worth = tokens_per_s, num_drafted
        return num_worth

    def num_drafts(self, step: Step, num_drafted: int, num_drafts: int, budget: int) -> int:
        """Return how many drafts, of so many for some decodes together, a step has tokens and time for."""
        num_fitting = max(0, min(num_drafts, budget))
        if self._pace is None:
            return num_fitting
        return self._pace.drafts(step, num_drafted, num_fitting)
