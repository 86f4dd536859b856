"""A make-believe deployment that the slow loop tunes, without I/O: replicas that take limits and count as told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from flyball_operator.spec import Tuning
from flyball_operator.tuning import Decision
from flyball_operator.tuning.core import LoopCore
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import Knob
from flyball_operator.tuning.record import DecisionRecord
from flyball_operator.tuning.recovery import Memory
from flyball_protocol import Evidence, Limits, LimitsUpdate, Objectives
from operator_kit.evidence import ENVELOPE, TUNING, make_evidence

START = Limits(max_num_seqs=128, kv_cache_fraction=1.0, max_num_batched_tokens=2048)
Sees = Callable[["Runtime"], dict[str, Any]]


@dataclass
class Runtime:
    """One replica: a ledger of limits, and when they and the objectives came."""

    name: str
    sees: Sees
    revision: int = 0
    limits: Limits = START
    last_known_good: Limits = START
    objectives: Objectives | None = None
    leased: bool = False
    silent: bool = False
    changed_s: float = 0.0
    now_s: float = 0.0
    started_s: float = -600.0

    @property
    def step_ms(self) -> float:
        return Knob.STEP_TIME.of(self.limits)

    def evidence(self) -> PodEvidence:
        if self.silent:
            return PodEvidence(pod=self.name, problem="no answer in 2.0 s")
        fields = {
            "revision": self.revision,
            "limits": self.limits,
            "posted": self.objectives,
            "since_s": self.now_s - self.changed_s,
            "uptime_s": self.now_s - self.started_s,
            "boot_id": f"{self.name} {self.started_s}",
        }
        return PodEvidence(pod=self.name, evidence=self._make(fields | self.sees(self)))

    def _make(self, fields: dict[str, Any]) -> Evidence:
        return make_evidence(**fields)

    def take(self, update: LimitsUpdate) -> None:
        if self.silent or update.revision < self.revision:
            return
        wanted = update.limits.applied_to(self.limits)
        if update.revision > self.revision or (update.objectives or self.objectives) != self.objectives:
            self.changed_s = self.now_s
        self.revision, self.limits, self.leased = update.revision, wanted, update.ttl_s is not None
        self.objectives = update.objectives or self.objectives
        if not self.leased:
            self.last_known_good = wanted

    def restart(self) -> None:
        self.revision, self.limits, self.last_known_good, self.objectives = 0, START, START, None
        self.started_s = self.changed_s = self.now_s

    def lapse(self) -> None:
        """Let the lease run out: each limit falls to the last known good one, or stays where it is if that is lower."""
        if self.leased:
            self.leased = False
            lower = {knob: min(knob.of(self.limits), knob.of(self.last_known_good)) for knob in Knob}
            step_ms = lower.pop(Knob.STEP_TIME)
            self.limits = Limits(
                step_time_target_ms=None if step_ms == float("inf") else step_ms,
                max_num_seqs=int(lower[Knob.MAX_NUM_SEQS]),
                max_num_batched_tokens=int(lower[Knob.MAX_NUM_BATCHED_TOKENS]),
                kv_cache_fraction=lower[Knob.KV_CACHE_FRACTION],
            )


@dataclass
class Deployment:
    """Rounds every 15 s. Attributes: decisions of all rounds, records of those worth keeping."""

    sees: Sees
    num_replicas: int = 3
    tuning: Tuning = TUNING
    now_s: float = 1000.0
    decisions: list[Decision] = field(default_factory=list)
    records: list[DecisionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [Runtime(f"replica {i}", self.sees) for i in range(1, self.num_replicas + 1)]
        self.core = LoopCore("chat", on_record=self.records.append)

    def round(self) -> Decision:
        self.now_s += 15.0
        for one in self.replicas:
            one.now_s = self.now_s
        turn = self.core.turn(self.tuning, [one.evidence() for one in self.replicas], now_s=self.now_s)
        for one in self.replicas:
            if one.name in turn.updates:
                one.take(turn.updates[one.name])
        self.decisions.append(turn.decision)
        return turn.decision

    def rounds(self, count: int) -> list[Decision]:
        return [self.round() for _ in range(count)]

    def minutes(self, count: float) -> list[Decision]:
        return self.rounds(round(4 * count))

    def restart_operator(self, memory: Memory | None = None) -> None:
        self.core = LoopCore("chat", on_record=self.records.append, memory=memory or Memory())

    @property
    def limits(self) -> Limits:
        """Of every replica. Raises ValueError while they differ."""
        first, *others = (one.limits for one in self.replicas)
        if any(one != first for one in others):
            raise ValueError(f"the replicas differ: {[structs.asdict(one.limits) for one in self.replicas]}")
        return first

    @property
    def actions(self) -> list[str]:
        return [str(one.action) for one in self.decisions if one.action != "hold"]

    @property
    def changes(self) -> list[tuple[str, str]]:
        return [(str(one.action), str(one.reason)) for one in self.decisions if one.action != "hold"]


__all__ = ["ENVELOPE", "START", "Deployment", "Runtime"]
