"""What a LocalRunner looks like at one moment, for tables and scripts."""

from dataclasses import dataclass

from flyball_operator.local.replica import State
from flyball_operator.tuning import Decision, PodEvidence


@dataclass(frozen=True)
class Event:
    """Something that happened. ``time_s`` is wall-clock time (seconds since the epoch)."""

    time_s: float
    text: str


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One replica. ``evidence`` is the last that was read, None before the first time."""

    number: int
    state: State
    in_state_s: float
    message: str
    pid: int | None
    port: int
    outstanding: int
    served: int
    restarts: int
    current: bool
    evidence: PodEvidence | None


@dataclass(frozen=True)
class Snapshot:
    """The deployment. ``decision`` is the slow loop's last, None while tuning is off; ``events`` are in order of time."""

    name: str
    url: str
    model: str
    wanted: int
    replicas: tuple[ReplicaSnapshot, ...]
    decision: Decision | None
    events: tuple[Event, ...]

    @property
    def num_ready(self) -> int:
        return sum(replica.state is State.READY for replica in self.replicas)
