"""What a runtime measures, in plain numbers, and the evidence that they amount to.

It needs no server and no metrics library, so whatever drives an engine can measure it, on its own clock. Each call takes
as much as there is at that moment, say all tokens of one step. All calls come from one thread.

Latencies count from a request's arrival (the API process's: its complete body) to the moment when its caller has a token.
A "request" is one engine request: one choice of one prompt.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from flyball_protocol import Evidence, HitPoint, Lengths, LimitsReport, MemoryState, Objectives, StepModel
from flyball_protocol.endpoints import TEMPLATE_ENV
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.errors import NotReady
from flyball_runtime.core.objective_counts import ObjectiveCounter
from flyball_runtime.core.stats import StepStats
from flyball_runtime.core.window import Counts, Series

RequestOutcome = Literal["stop", "length", "abort", "error"]
OUTCOMES: tuple[RequestOutcome, ...] = ("stop", "length", "abort", "error")
BLOCKED_REASONS = ("none", "seqs", "kv", "reserve", "budget", "step_time")

# fmt: off
LATENCY_EDGES_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)
TOKEN_EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# fmt: on

# Keys of the counts; of the last three, with a second part: (REQUESTS, outcome)
PROMPT_TOKENS = "prompt_tokens"
GENERATION_TOKENS = "generation_tokens"
PREFIX_QUERIED = "prefix_cache_queried_tokens"
PREFIX_HITS = "prefix_cache_hit_tokens"
PREEMPTIONS = "preemptions"
RECOMPUTED = "recomputed_tokens"
SWAPPED_OUT = "swapped_out_blocks"
SWAPPED_IN = "swapped_in_blocks"
HOST_HITS = "host_cache_hit_tokens"
DRAFTS = "spec_decode_num_drafts"
DRAFT_TOKENS = "spec_decode_num_draft_tokens"
ACCEPTED_TOKENS = "spec_decode_num_accepted_tokens"
ARRIVED = "requests_arrived"
REQUESTS = "requests"
REJECTED = "requests_rejected"
BLOCKED_STEPS = "blocked_steps"

RARE = {
    PREEMPTIONS: "num_preemptions",
    RECOMPUTED: "num_recomputed_tokens",
    SWAPPED_OUT: "num_swapped_out_blocks",
    SWAPPED_IN: "num_swapped_in_blocks",
    HOST_HITS: "num_host_hit_tokens",
    DRAFTS: "num_drafts",
    DRAFT_TOKENS: "num_draft_tokens",
    ACCEPTED_TOKENS: "num_accepted_tokens",
    PREFIX_QUERIED: "num_prefix_queried_tokens",
    PREFIX_HITS: "num_prefix_hit_tokens",
}
"""Counts that most steps leave alone, and where StepStats has them."""
_RARE = attrgetter(*RARE.values())

QUEUE_FULL = "queue_full"
"""Code of the refusals that count as demand all the same."""


@dataclass(slots=True)
class RequestTimes:
    """When one request came and when it got tokens, on the clock of its Measurements.

    ``num_gaps_over``: gaps between its tokens that were over the objective.
    """

    arrival_s: float
    num_prompt_tokens: int
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_gaps_over: int = 0


class Measurements:
    """The counts of one runtime; implements EngineObserver.

    Args:
        window_s: length of the sliding window.

    Attributes:
        boot_id, template: see Evidence.
        latest: stats of the last step, None before the first.
        step_model, lengths, prefix_hits: those that the engine reported last.
        objective_counter: against the objectives in force, None before any.
        ttft, itl, tpot, e2e, step_time, predicted_step_time: seconds.
        step_tokens, request_prompt_tokens, request_generation_tokens: tokens.
    """

    def __init__(self, clock: Clock, *, window_s: float = 60.0) -> None:
        self.clock = clock
        self.window_s = window_s
        self.boot_id = uuid.uuid4().hex
        self.template = os.environ.get(TEMPLATE_ENV, "")
        self.latest: StepStats | None = None
        self.step_model: StepModel | None = None
        self.lengths: Lengths | None = None
        self.prefix_hits: tuple[HitPoint, ...] = ()
        self.objective_counter: ObjectiveCounter | None = None
        self._counted_revision = 0
        self._first_step_s = 0.0
        self.counts = Counts(window_s)
        self.ttft, self.itl, self.tpot, self.e2e, self.step_time, self.predicted_step_time = (
            Series(LATENCY_EDGES_S, window_s) for _ in range(6)
        )
        self.step_tokens, self.request_prompt_tokens, self.request_generation_tokens = (
            Series(TOKEN_EDGES, window_s) for _ in range(3)
        )

    def arrived(self, count: int = 1) -> None:
        """Take in requests that the engine accepted."""
        self.counts.add(self.clock.now(), ARRIVED, count)

    def count_against(self, objectives: Objectives | None, revision: int = 0) -> None:
        """Count against these objectives from now on; None, and the same under the same revision, change nothing.

        Args:
            revision: of the limits. Under another one counting begins anew, so that what limits do is known soon.
        """
        known = None if self.objective_counter is None else self.objective_counter.objectives
        if objectives is not None and (known, self._counted_revision) != (objectives, revision):
            self.objective_counter = ObjectiveCounter(objectives, self.clock.now(), self.window_s)
            self._counted_revision = revision

    def step(self, stats: StepStats) -> None:
        """Take in one engine step, or the sign of life of an idle engine (0 tokens, blocked by nothing)."""
        now, count = self.clock.now(), self.counts.add
        if self.latest is None:
            self._first_step_s = now
        if self.objective_counter is not None:
            self.objective_counter.step(now)
        self.latest = stats
        self.step_model = stats.step_model or self.step_model
        self.lengths = stats.lengths or self.lengths
        self.prefix_hits = stats.prefix_hits or self.prefix_hits
        if stats.num_tokens or stats.blocked_by != "none":
            count(now, (BLOCKED_STEPS, stats.blocked_by))
        if stats.num_tokens:
            self.step_time.add_one(now, stats.duration_s)
            self.step_tokens.add_one(now, stats.num_tokens)
            if stats.predicted_s is not None:
                self.predicted_step_time.add_one(now, stats.predicted_s)
        rare = _RARE(stats)
        if any(rare):  # in most steps there is none of them
            for key, number in zip(RARE, rare, strict=True):
                count(now, key, number)

    def tokens(self, requests: Sequence[RequestTimes], count: int = 1) -> None:
        """Each of these requests has ``count`` tokens more; after the first ones, such tokens share their gap evenly."""
        now, num_prompt_tokens = self.clock.now(), 0
        waits: list[float] = []
        gaps: list[float] = []
        firsts: list[RequestTimes] = []
        for one in requests:
            if one.first_token_s is None:
                one.first_token_s = now
                waits.append(now - one.arrival_s)
                num_prompt_tokens += one.num_prompt_tokens
                firsts.append(one)
            else:
                gaps.append((now - one.last_token_s) / count)
            one.last_token_s = now
        counter = self.objective_counter
        if firsts:  # in most steps there are none
            self.ttft.add(now, waits)
            self.counts.add(now, PROMPT_TOKENS, num_prompt_tokens)
            if counter is not None:
                counter.first_tokens(now, waits)
        self.itl.add(now, gaps * count)
        if counter is not None and counter.gaps(now, gaps, count):
            _note_gaps_over(requests, firsts, gaps, count, counter.objectives)
        self.counts.add(now, GENERATION_TOKENS, len(requests) * count)

    def output(self, request: RequestTimes, count: int) -> None:
        """Take in a whole output, ``count`` tokens; when it came says nothing about when its tokens did."""
        now = self.clock.now()
        self.counts.add(now, PROMPT_TOKENS, request.num_prompt_tokens)
        self.counts.add(now, GENERATION_TOKENS, count)

    def ended(self, request: RequestTimes, outcome: RequestOutcome, num_output_tokens: int) -> None:
        """Take in the end of a request. Only those that finish (stop and length) count into latencies and sizes."""
        now = self.clock.now()
        self.counts.add(now, (REQUESTS, outcome))
        if outcome not in ("stop", "length"):
            return
        self.e2e.add_one(now, now - request.arrival_s)
        self.request_prompt_tokens.add_one(now, request.num_prompt_tokens)
        self.request_generation_tokens.add_one(now, num_output_tokens)
        if request.first_token_s is None:
            return
        if self.objective_counter is not None:
            self.objective_counter.ended(now, request.first_token_s, num_output_tokens - 1, request.num_gaps_over)
        if num_output_tokens > 1:
            self.tpot.add_one(now, (request.last_token_s - request.first_token_s) / (num_output_tokens - 1))

    def rejected(self, code: str) -> None:
        """Take in a request that the engine refused, by error code."""
        now = self.clock.now()
        self.counts.add(now, (REJECTED, code))
        if code == QUEUE_FULL:
            self.counts.add(now, ARRIVED)

    def blocked_by_shares(self) -> dict[str, float]:
        """Return the share of the window's steps by BLOCKED_REASONS; empty without steps."""
        recent = self.counts.recent(self.clock.now())
        steps = {reason: recent[BLOCKED_STEPS, reason] for reason in BLOCKED_REASONS}
        num_steps = sum(steps.values())
        return {reason: count / num_steps for reason, count in steps.items()} if num_steps else {}

    def evidence(
        self,
        model: str,
        limits: LimitsReport,
        *,
        key: str,
        ready: bool,
        draining: bool,
        memory: MemoryState | None = None,
    ) -> Evidence:
        """Return the evidence of this moment. ``num_finished`` counts stop and length, ``num_failed`` error.

        Args:
            key: of the engine, ``EngineInfo.key``.
            memory: of the replica's processes.
        Raises:
            NotReady: no step was taken in yet.
        """
        if (stats := self.latest) is None:
            raise NotReady
        now = self.clock.now()
        recent, steps = self.counts.recent(now), self.step_time.window(now)
        return Evidence(
            model=model,
            boot_id=self.boot_id,
            template=self.template,
            key=key,
            uptime_s=now - self._first_step_s,
            window_s=self.window_s,
            ready=ready,
            draining=draining,
            revision=limits.revision,
            target=limits.target,
            effective=limits.effective,
            envelope=limits.envelope,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_arrived=recent[ARRIVED],
            num_finished=recent[REQUESTS, "stop"] + recent[REQUESTS, "length"],
            num_failed=recent[REQUESTS, "error"],
            ttft=self.ttft.window(now),
            itl=self.itl.window(now),
            e2e=self.e2e.window(now),
            blocked_by=self.blocked_by_shares(),
            kv_blocks=stats.kv_blocks,
            num_prompt_tokens=recent[PROMPT_TOKENS],
            num_generated_tokens=recent[GENERATION_TOKENS],
            num_prefix_queried_tokens=recent[PREFIX_QUERIED],
            num_prefix_hit_tokens=recent[PREFIX_HITS],
            num_preemptions=recent[PREEMPTIONS],
            num_recomputed_tokens=recent[RECOMPUTED],
            num_steps=steps.count,
            step_time_p50_s=steps.p50_s,
            step_time_p95_s=steps.p95_s,
            step_model=self.step_model,
            lengths=self.lengths,
            memory=memory,
            prefix_hits=self.prefix_hits,
            objective_counts=None if self.objective_counter is None else self.objective_counter.counts(now),
        )


def _note_gaps_over(
    requests: Sequence[RequestTimes],
    firsts: list[RequestTimes],
    gaps: list[float],
    count: int,
    objectives: Objectives,
) -> None:
    """Note at the requests which of their gaps were over; those in ``firsts`` had none."""
    without = {id(one) for one in firsts}
    streaming = (one for one in requests if id(one) not in without)
    for one, gap in zip(streaming, gaps, strict=True):
        if objectives.itl_s is not None and gap > objectives.itl_s:
            one.num_gaps_over += count
