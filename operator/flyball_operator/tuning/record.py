"""Decisions on file: one JSON line each, with everything that was decided on, so that any of them can be replayed."""

import msgspec
from msgspec import Struct

from flyball_operator.spec import Tuning
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Decision
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.state import TunerState


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """One round: the arguments of decide(), and the result.

    ``time`` is ISO 8601 in UTC, for people.
    """

    time: str
    deployment: str
    tuning: Tuning
    state: TunerState
    evidence: tuple[PodEvidence, ...]
    now_s: float
    decision: Decision

    def replay(self) -> Decision:
        """Decide again from what was recorded."""
        return decide(self.tuning, self.state, self.evidence, now_s=self.now_s)


def to_line(record: DecisionRecord) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def from_line(line: bytes) -> DecisionRecord:
    """Raises msgspec.DecodeError or msgspec.ValidationError on a line that to_line() did not write."""
    return msgspec.json.decode(line, type=DecisionRecord)
