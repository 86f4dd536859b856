"""What the slow loop remembers between decisions. Safe to lose: the replicas know revision and limits too."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

from msgspec import Struct

from flyball_protocol import Limits
from flyball_simulation.baselines.rules.knobs import Knob

MAX_MOVES = 16
MAX_COOLDOWN_S = 1800.0
OSCILLATION_WINDOW = 10
"""A knob that turned round within this many cool-downs is oscillating; each time doubles the cool-down."""


class Direction(StrEnum):
    RAISE = "raise"
    CUT = "cut"
    CLAMP = "clamp"

    @property
    def opposite(self) -> "Direction":
        return {"raise": Direction.CUT, "cut": Direction.RAISE}.get(self, self)


class Move(Struct, frozen=True, kw_only=True):
    """One change that was decided. ``at_s`` is on the clock that decide() is given."""

    knob: Knob
    direction: Direction
    before: float
    after: float
    at_s: float

    def undone(self, at_s: float) -> "Move":
        """Return the move that takes this one back."""
        return Move(knob=self.knob, direction=self.direction.opposite, before=self.after, after=self.before, at_s=at_s)


class Trial(Struct, frozen=True, kw_only=True):
    """A change that one replica has on trial.

    Attributes:
        canary: the replica's name.
        move: the change; ``limits`` under ``revision`` is what the canary should have.
        before, before_revision: what every other replica should have.
        started_s: when it was decided.
        taken_s: when the canary was first seen with it, None until then.
    """

    canary: str
    move: Move
    limits: Limits
    revision: int
    before: Limits
    before_revision: int
    started_s: float
    taken_s: float | None = None


class TunerState(Struct, frozen=True, kw_only=True):
    """What was done so far.

    Attributes:
        revision, limits: of the last change that every replica should have; 0 and None before the first.
        moves: the last ones, oldest first; that of the trial comes when it ends.
        trial: the change that is being tried, if any.
    """

    revision: int = 0
    limits: Limits | None = None
    moves: tuple[Move, ...] = ()
    trial: Trial | None = None

    def after(self, moves: Sequence[Move], limits: Limits, revision: int) -> "TunerState":
        return TunerState(revision=revision, limits=limits, moves=(*self.moves, *moves)[-MAX_MOVES:])

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
        waits += [move.at_s + full for move in self.moves if move.knob is knob and move.direction is not direction]
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
