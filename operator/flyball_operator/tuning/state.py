"""What the slow loop remembers between decisions. Safe to lose: the replicas know revision and limits too."""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Literal

from msgspec import Struct, structs

from flyball_operator.tuning.evidence import Seen
from flyball_operator.tuning.knobs import Knob
from flyball_operator.tuning.signals import Counts
from flyball_protocol import Limits, Objectives

MAX_MOVES = 16
MAX_COOLDOWN_S = 1800.0
OSCILLATION_WINDOW = 10
"""A knob that turned round within this many cool-downs is oscillating; each time doubles the cool-down."""

WIDEST_WINDOW_S = 300.0
"""With little traffic, reports of so long a time are added up."""

BAN_S = 600.0
"""A move that gained nothing is not made again for so long; twice as long each time."""

UNJUDGED_BAN_S = 60.0
"""One that could not be judged, which says nothing of it: twice as long each time too."""

MAX_BAN_S = 3600.0


FURTHER = 1.1
"""A move goes clearly further than another from this factor on."""


class Direction(StrEnum):
    RAISE = "raise"
    CUT = "cut"
    CLAMP = "clamp"

    @property
    def opposite(self) -> "Direction":
        return {"raise": Direction.CUT, "cut": Direction.RAISE}.get(self, self)


class Move(Struct, frozen=True, kw_only=True):
    """One change that was decided. ``at_s`` is on the clock that decide() is given; None is no step-time target."""

    knob: Knob
    direction: Direction
    before: float | None
    after: float | None
    at_s: float

    def undone(self, at_s: float) -> "Move":
        """Return the move that takes this one back."""
        return Move(knob=self.knob, direction=self.direction.opposite, before=self.after, after=self.before, at_s=at_s)


class Forecast(Struct, frozen=True, kw_only=True):
    """What a move is expected to bring.

    Attributes:
        what: the count that it should improve: first tokens, or inter-token latency.
        before, predicted: share of samples over the objective, without the move and with it.
    """

    what: Literal["ttft", "itl"]
    before: float
    predicted: float


class Report(Struct, frozen=True):
    """Counts of one window that ended at ``at_s``."""

    at_s: float
    counts: Counts
    others: Counts = Counts()


class Trial(Struct, frozen=True, kw_only=True):
    """A change that one replica has on trial.

    Attributes:
        canary: the replica's name.
        move: the change; ``limits`` under ``revision`` is what the canary should have.
        before, before_revision: what every other replica should have.
        before_settled: whether those had been posted without a lease.
        started_s: when it was decided.
        forecast: what it should bring.
        baseline: the canary's counts from before, where there are no others to compare it with.
        num_waiting: requests in the canary's queue when it was decided, if first tokens are what it should improve.
        drained_s: when that queue was first seen half as long, None until then.
        taken_s: when the canary was first seen with it, None until then.
        reports: earlier windows of the canary and of the others, none of which overlap.
    """

    canary: str
    move: Move
    limits: Limits
    revision: int
    before: Limits
    before_revision: int
    started_s: float
    before_settled: bool = False
    forecast: Forecast | None = None
    baseline: Counts | None = None
    num_waiting: int = 0
    drained_s: float | None = None
    taken_s: float | None = None
    reports: tuple[Report, ...] = ()


class Ban(Struct, frozen=True, kw_only=True):
    """A kind of move that gained nothing, ``times`` times in a row. One that goes clearly further than ``value`` is another.

    Attributes:
        unjudged_at: the replica where it could not be judged; "" if it was.
    """

    knob: Knob
    direction: Direction
    value: float
    until_s: float
    times: int = 1
    unjudged_at: str = ""

    def covers(self, knob: Knob, direction: Direction, value: float) -> bool:
        if (self.knob, self.direction) != (knob, direction):
            return False
        return value > self.value / FURTHER if direction is Direction.CUT else value < self.value * FURTHER


class TunerState(Struct, frozen=True, kw_only=True):
    """What was done so far.

    Attributes:
        revision, limits: of the last change that every replica should have; 0 and None before the first.
        seqs: replicas with their own ``max_num_seqs``, because their step model differs.
        objectives: those that were posted, None before.
        tuned: whether limits were moved since they last were what the spec says.
        settled: whether the limits were found good and posted without a lease.
        fallback: the limits from before the last change, until that has settled.
        moves: the last ones, oldest first; that of the trial comes when it ends.
        trial: the change that is being tried, if any.
        bans: moves that are not made for a while.
        guessed: whether the step-time target in force was set before there was a plan.
        trim: factor on the planned step time, from observed latency.
        family: model and template of the replicas.
        seen: the replicas of the last round.
        reports: the counts of earlier windows under the same limits, none of which overlap.
        roomy_since_s: since when the KV pool has been larger than needed, None while it is not.
    """

    revision: int = 0
    limits: Limits | None = None
    seqs: dict[str, int] = {}
    objectives: Objectives | None = None
    tuned: bool = False
    settled: bool = False
    fallback: Limits | None = None
    moves: tuple[Move, ...] = ()
    trial: Trial | None = None
    bans: tuple[Ban, ...] = ()
    guessed: bool = False
    trim: float = 1.0
    family: str = ""
    seen: tuple[Seen, ...] = ()
    reports: tuple[Report, ...] = ()
    roomy_since_s: float | None = None

    def after(self, moves: Sequence[Move], limits: Limits, revision: int) -> "TunerState":
        """Return the state once a change is in force everywhere; it has yet to settle."""
        return structs.replace(
            self,
            revision=revision,
            limits=limits,
            tuned=True,
            settled=False,
            trial=None,
            moves=(*self.moves, *moves)[-MAX_MOVES:],
            reports=(),
        )

    def own(self, pod: str, limits: Limits) -> Limits:
        """Return ``limits`` with the replica's own ``max_num_seqs``, where it has one that is lower."""
        own = self.seqs.get(pod, limits.max_num_seqs)
        return limits if own >= limits.max_num_seqs else structs.replace(limits, max_num_seqs=own)

    def banned(self, move: Move, now_s: float, *, unjudged_at: str = "") -> "TunerState":
        """Return the state with such moves banned, longer each time."""
        if move.after is None:
            return self
        same = [one for one in self.bans if one.covers(move.knob, move.direction, move.after)]
        times = 1 + max((one.times for one in same), default=0)
        first_s = UNJUDGED_BAN_S if unjudged_at else BAN_S
        ban = Ban(
            knob=move.knob,
            direction=move.direction,
            value=move.after,
            until_s=now_s + min(MAX_BAN_S, first_s * 2.0 ** (times - 1)),
            times=times,
            unjudged_at=unjudged_at,
        )
        return structs.replace(self, bans=(*(one for one in self.bans if one not in same), ban)[-MAX_MOVES:])

    def ban(self, knob: Knob, direction: Direction, value: float, now_s: float) -> Ban | None:
        """Return what bans such a move for longest; None when nothing does."""
        found = [one for one in self.bans if one.until_s > now_s and one.covers(knob, direction, value)]
        return max(found, key=lambda one: one.until_s, default=None)

    @property
    def last_move(self) -> Move | None:
        return self.moves[-1] if self.moves else None

    def cooldown_left_s(self, knob: Knob, direction: Direction, *, now_s: float, cooldown_s: float) -> float:
        """Return how long a move has to wait; 0 or less when it may be made.

        A cut waits a quarter of the cool-down after whatever was changed last. A raise waits all of it, and so does a move that
        turns round on its knob.
        """
        full = self.stretched(cooldown_s, now_s=now_s)
        waits = [move.at_s + (cooldown_s / 4 if direction is Direction.CUT else full) for move in self.moves]
        waits += [move.at_s + full for move in self.moves if move.knob is knob and move.direction is direction.opposite]
        return max(waits, default=now_s) - now_s

    def stretched(self, cooldown_s: float, *, now_s: float) -> float:
        """Return the cool-down, doubled for each time a knob turned round lately."""
        since = now_s - OSCILLATION_WINDOW * cooldown_s
        turns: int = sum(second.at_s >= since for _, second in self._turns())
        return max(cooldown_s, min(MAX_COOLDOWN_S, cooldown_s * float(2**turns)))

    def _turns(self) -> Iterator[tuple[Move, Move]]:
        for knob in Knob:
            own = [move for move in self.moves if move.knob is knob and move.direction is not Direction.CLAMP]
            yield from ((one, two) for one, two in pairwise(own) if one.direction is not two.direction)


def finite(value: float) -> float | None:
    """Return a limit as a Move has it: None is no step-time target."""
    return None if math.isinf(value) else value
