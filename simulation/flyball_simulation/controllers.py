"""What sets the limits: the operator's tuner, or what it is compared with."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import structs

from flyball_operator.spec import Tuning
from flyball_operator.tuning import PodEvidence
from flyball_operator.tuning.core import LEASE_ROUNDS, MIN_LEASE_S, LoopCore
from flyball_operator.tuning.record import DecisionRecord
from flyball_protocol import Limits, LimitsChange, LimitsUpdate
from flyball_runtime.core.errors import ConfigError
from flyball_simulation.baselines import rules


class Controller(Protocol):
    """Turns a round's evidence into updates, by replica name.

    Attributes:
        reads_evidence: whether there are rounds at all.
        paces: whether it may set a step-time target, or look at what has been learned of the step time.
    """

    interval_s: float
    reads_evidence: bool
    paces: bool

    def round(self, evidence: Sequence[PodEvidence], now_s: float) -> Mapping[str, LimitsUpdate]: ...

    @property
    def reason(self) -> str:
        """Why the last round decided what it did, in a word or two."""
        ...


class Static:
    """Leaves the limits as they are."""

    interval_s = 3600.0
    reads_evidence = False
    paces = False
    reason = "Static"

    def round(self, evidence: Sequence[PodEvidence], now_s: float) -> Mapping[str, LimitsUpdate]:
        return {}


class Auto:
    """The operator's own slow loop, as it runs on a cluster: every change is tried on one replica first."""

    reads_evidence = True
    paces = True

    def __init__(self, tuning: Tuning, deployment: str) -> None:
        self.interval_s = float(tuning.interval_seconds)
        self.records: list[DecisionRecord] = []
        self._tuning = structs.replace(tuning, mode="Auto")
        self._core = LoopCore(deployment, on_record=self.records.append)
        self.reason = ""

    def round(self, evidence: Sequence[PodEvidence], now_s: float) -> Mapping[str, LimitsUpdate]:
        turn = self._core.turn(self._tuning, evidence, now_s=now_s)
        self.reason = str(turn.decision.reason)
        return turn.updates

    def restart(self) -> None:
        """Forget everything, as an operator that was killed does."""
        self._core = LoopCore("restarted", on_record=self.records.append)


class Rules:
    """The first tuner (see ``baselines/rules``)."""

    reads_evidence = True
    paces = False

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = msgspec.convert(_only_known(msgspec.to_builtins(tuning), rules.Tuning), rules.Tuning)
        self.interval_s = float(self._tuning.interval_seconds)
        self._state = rules.TunerState()
        self.reason = ""

    def round(self, evidence: Sequence[PodEvidence], now_s: float) -> Mapping[str, LimitsUpdate]:
        pods = [
            rules.PodEvidence(pod=one.pod, evidence=one.evidence, age_s=one.age_s, problem=one.problem)
            for one in evidence
        ]
        decision = rules.advance(self._tuning, self._state, pods, now_s=now_s)
        self._state, self.reason = decision.state, str(decision.reason)
        wanted = {pod.pod: decision.wanted_at(pod.pod) for pod in pods}
        lease_s = max(MIN_LEASE_S, LEASE_ROUNDS * self.interval_s)
        return {
            pod: LimitsUpdate(revision=one[0], limits=rules.as_change(one[1]), ttl_s=lease_s)
            for pod, one in wanted.items()
            if one is not None
        }


AIMD_CUT = 0.7
AIMD_TOKENS = 64
AIMD_SEQS = 4
AIMD_MIN_TOKENS = 64
AIMD_MIN_SEQS = 4


class Aimd:
    """Additive increase, multiplicative decrease: both limits go down while the step time's p95 is over the ITL objective.

    Raises ConfigError without such an objective.
    """

    reads_evidence = True
    paces = False

    def __init__(self, tuning: Tuning) -> None:
        objective_ms = tuning.objectives.inter_token_latency_p95_milliseconds
        if objective_ms is None:
            raise ConfigError(
                "--controller aimd needs an objective of inter-token latency; set spec.tuning.objectives."
                "interTokenLatencyP95Milliseconds in the manifest."
            )
        self.interval_s = float(tuning.interval_seconds)
        self.reason = ""
        self._objective_s = objective_ms / 1000
        self._limits: Limits | None = None
        self._revision = 0

    def round(self, evidence: Sequence[PodEvidence], now_s: float) -> Mapping[str, LimitsUpdate]:
        answered = [one.evidence for one in evidence if one.evidence is not None]
        times_s = [one.step_time_p95_s for one in answered if one.step_time_p95_s is not None]
        if not times_s:
            self.reason = "NoEvidence"
            return {}
        limits, envelope = self._limits or answered[0].target, answered[0].envelope
        if max(times_s) > self._objective_s:
            self.reason = "Over"
            num_seqs, num_tokens = int(limits.max_num_seqs * AIMD_CUT), int(limits.max_num_batched_tokens * AIMD_CUT)
        else:
            self.reason = "Under"
            num_seqs, num_tokens = limits.max_num_seqs + AIMD_SEQS, limits.max_num_batched_tokens + AIMD_TOKENS
        num_seqs = min(max(AIMD_MIN_SEQS, num_seqs), envelope.max_num_seqs)
        num_tokens = min(max(AIMD_MIN_TOKENS, num_seqs, num_tokens), envelope.max_num_batched_tokens)
        self._limits = structs.replace(limits, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
        self._revision += 1
        change = LimitsChange(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
        return {one.pod: LimitsUpdate(revision=self._revision, limits=change) for one in evidence}


def _only_known(values: Any, kind: Any) -> Any:
    """Keep what an older struct had; keys may be in the CRD's spelling."""
    known = set(kind.__struct_fields__)
    snake = {_snake(key): value for key, value in values.items()}
    kept = {key: value for key, value in snake.items() if key in known and value is not None}
    nested = {"objectives": rules.Objectives, "bounds": rules.Bounds}
    for name, inner in nested.items():
        if name in kept:
            kept[name] = _only_known(kept[name], inner)
    for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_percent"):
        if isinstance(kept.get(name), dict):
            kept[name] = _only_known(kept[name], rules.Range)
    kept.pop("mode", None)
    return kept


def _snake(name: str) -> str:
    return "".join("_" + char.lower() if char.isupper() else char for char in name)
