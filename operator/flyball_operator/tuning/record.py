"""Decisions on file: one JSON line each, with everything that was decided on, so that any of them can be replayed."""

import msgspec
from msgspec import Struct

from flyball_operator.spec import Tuning
from flyball_operator.tuning import spec_limits
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.state import TunerState

OF_SPEC = frozenset({Reason.SPEC_LIMITS, Reason.LIMITS_REFUSED})


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """One round: the arguments of decide(), and the result.

    Attributes:
        time: ISO 8601 in UTC, for people.
        problems: of limits of the spec, the words of the replicas that did not take them.
    """

    time: str
    deployment: str
    tuning: Tuning
    state: TunerState
    evidence: tuple[PodEvidence, ...]
    now_s: float
    decision: Decision
    problems: tuple[str, ...] = ()

    def replay(self) -> Decision:
        """Decide again from what was recorded."""
        wanted = spec_limits.due(self.tuning, self.state, self.evidence) if self.decision.reason in OF_SPEC else None
        if wanted is not None:
            return spec_limits.outcome(wanted, self.evidence, self.problems, self.state)
        return decide(self.tuning, self.state, self.evidence, now_s=self.now_s)


def to_line(record: DecisionRecord) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def from_line(line: bytes) -> DecisionRecord:
    """Raises msgspec.DecodeError or msgspec.ValidationError on a line that to_line() did not write."""
    return msgspec.json.decode(line, type=DecisionRecord)
