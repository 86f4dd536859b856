"""What a run amounts to."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from flyball_protocol import Limits
from flyball_simulation.replica import Outcome, percentile
from flyball_simulation.workload import Workload

BIN_S = 60.0


class Bounds(Struct, frozen=True, kw_only=True):
    """The objectives, in seconds; None where there is none."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met_by(self, ttft_s: float | None, itl_p95_s: float | None) -> bool:
        """Return whether a request is good: its first token came, in time, and so did 95 % of its other ones."""
        if ttft_s is None:
            return False
        in_time = self.ttft_s is None or ttft_s <= self.ttft_s
        return in_time and (self.itl_s is None or itl_p95_s is None or itl_p95_s <= self.itl_s)


class Change(Struct, frozen=True, kw_only=True):
    """Limits that were set."""

    at_s: float
    replica: str
    reason: str
    limits: Limits


class Bin(Struct, frozen=True, kw_only=True):
    """What arrived within a minute, and how it went."""

    start_s: float
    num_requests: int
    num_good: int
    ttft_p95_s: float | None
    itl_p95_s: float | None


class Tried(Struct, frozen=True, kw_only=True):
    """One point of a sweep.

    Attributes:
        given_up: before all requests had ended, because others were better.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    share_good: float
    given_up: bool = False


class Feasible(Struct, frozen=True, kw_only=True):
    """The best fixed limits for a number of replicas, and whether they meet the objectives."""

    replicas: int
    max_num_seqs: int
    max_num_batched_tokens: int
    share_good: float
    is_feasible: bool


class Result(Struct, kw_only=True):
    """The content of OUT.json. Times are seconds of the simulated clock.

    Attributes:
        objectives: what a request was held to.
        share_good: of all requests, those that met the objectives; a failed one did not.
        num_failed: refused, or lost with a replica.
        goodput_per_s: good requests a second, over ``duration_s``.
        duration_s: for which requests came.
        ttft_*, itl_*: over all requests, and over all gaps between tokens.
        num_changes: rounds that set some replica's limits to something else.
        final_limits: of each replica, by name.
        timeline: by the minute in which requests arrived.
        sweep: of an oracle, everything that was tried.
        feasible: of an oracle with a chart, by number of replicas.
        num_decisions, num_replayed: decisions on record, and those that give the same when they are replayed.
        num_steps: engine steps of all replicas.
        steps_per_s: of the simulator, on the wall clock; all else is the same for the same seed.
    """

    controller: str
    plant: str
    seed: int
    replicas: int
    kv_tokens: int
    objectives: Bounds
    num_requests: int
    num_good: int
    num_failed: int
    share_good: float
    goodput_per_s: float
    duration_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    num_preemptions: int
    num_recomputed_tokens: int
    num_changes: int
    changes: list[Change]
    final_limits: dict[str, Limits]
    timeline: list[Bin]
    sweep: list[Tried]
    feasible: list[Feasible]
    num_decisions: int
    num_replayed: int
    num_steps: int
    steps_per_s: float

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def bins(workload: Workload, outcomes: Sequence[Outcome], bounds: Bounds) -> list[Bin]:
    """Return the run by the minute of arrival."""
    minutes: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        minutes.setdefault(int(workload[outcome.index].at_s // BIN_S), []).append(outcome)
    last = max(minutes, default=-1)
    return [_bin(minute * BIN_S, minutes.get(minute, []), bounds) for minute in range(last + 1)]


def _bin(start_s: float, outcomes: list[Outcome], bounds: Bounds) -> Bin:
    return Bin(
        start_s=start_s,
        num_requests=len(outcomes),
        num_good=sum(bounds.met_by(one.ttft_s, one.itl_p95_s) for one in outcomes),
        ttft_p95_s=percentile([one.ttft_s for one in outcomes if one.ttft_s is not None], 0.95),
        itl_p95_s=percentile([one.itl_p95_s for one in outcomes if one.itl_p95_s is not None], 0.95),
    )
